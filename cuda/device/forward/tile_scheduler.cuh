// The scheduler: a warp that finds the CTA's tiles, one ahead of those at work, and tells producer
// and consumers through slots in shared memory what each consists of. What it takes to find a tile
// (a counter on the device, the lengths, a search among packed sequences) is hidden behind the tile
// before.
//
//   scheduler   | tile 0 | tile 1 |        tile 2         |        tile 3
//   producer              | loads 0 | loads 1     | loads 2    ...
//   consumers                  | 0              | 1              | 2
//
// Tiles that differ in length are handed out by the counter (the next CTA that is free takes the
// next tile, and with the longest first all end together), others in fixed steps. The lengths are
// read on the device; tiles that they leave empty are visited as well, since their O and LSE have to
// be written.
#pragma once

#include "cutlass/arch/barrier.h"
#include "device/epilogue/output_tile.cuh"
#include "device/forward/params.h"
#include "device/registers.cuh"
#include "device/ring_position.cuh"

namespace fa {

struct alignas(16) ForwardTile {
  KeyBlocks blocks;
  Window window;
  int seqlen_k;
  int row_begin;     // first row, of packed heads or not, within the sequence
  int used_rows;     // rows before the end of the sequence; the others of the tile are empty
  uint32_t q_phase;  // parity of Q's barrier for this tile
  OutputTile output;
  // Coordinates in the tensor maps; that of the first key is segment.key_begin.
  int batch[3];  // of q, k, v
  int head_kv;
  int group;  // first query head of the tile within its group: 0 when packed
  int query;
  Segment segment;
  int split;

  // What ends the work instead of a tile.
  __device__ bool none() const { return output.num_rows == 0; }
};
static_assert(sizeof(ForwardTile) == kForwardTileBytes);

__device__ inline KeyBlocks uniform(const KeyBlocks& blocks) {
  return {uniform(blocks.begin), uniform(blocks.end), uniform(blocks.full_begin),
          uniform(blocks.full_end)};
}

// The segment of a packed call that holds tile `index`, and the tile's number within it. Collective
// over the warp.
__device__ inline int find_segment(const Schedule& schedule, int& index) {
  const int* const ends = schedule.tile_ends();
  const int lane = threadIdx.x % kWarpSize;
  const auto first_lane = [&](int low, int step, int last) {
    return __ffs(__ballot_sync(~0u, ends[min(low + (lane + 1) * step - 1, last)] > index)) - 1;
  };
  const int place = warp_search(schedule.workspace[Schedule::kNumListed], first_lane);
  if (place > 0) index -= ends[place - 1];
  return schedule.numbers()[place];
}

// Fills in tile `index`, all but its q_phase. Collective over the warp. `tile` is in shared memory
// and all lanes write the same: the warp has so few registers that what one step finds must go
// there before the next step begins.
template <int kBlockN>
__device__ void find_tile(const ForwardParams& params, int index, ForwardTile& tile) {
  const Schedule& schedule = params.schedule;
  const bool packed = schedule.workspace != nullptr;
  const int packed_heads = params.output.qhead_per_khead.divisor;
  {
    TileOrder order = params.order;
    if (packed) {
      const int number = find_segment(schedule, index);
      tile.segment = schedule.segments()[number];
      tile.output.batch = number / schedule.batch_segments;
      order.row_blocks = ceil_div(tile.segment.num_queries * packed_heads, params.rows_per_tile);
      __syncwarp();
    }
    const TilePosition position = tile_position(order, index);
    tile.row_begin = tile.output.row_begin = position.row_block * params.rows_per_tile;
    tile.output.head_kv = position.head;
    __syncwarp();
  }
  {
    int head = tile.output.head_kv / params.num_splits;
    tile.split = tile.output.head_kv - head * params.num_splits;
    if (!packed) {
      tile.output.batch = head / params.heads;
      head -= tile.output.batch * params.heads;
      tile.segment = params.dense_segment(tile.output.batch);
    }
    tile.output.head_kv = head;
    // Unpacked, heads of tiles are query heads.
    tile.head_kv = packed_heads > 1 ? head : head / params.qhead_per_khead;
    tile.group = packed_heads > 1 ? 0 : head - tile.head_kv * params.qhead_per_khead;
    __syncwarp();
  }
  params.batch_map.offsets(tile.output.batch, tile.batch);
  __syncwarp();
  tile.output.batch =
      partial_batch(tile.output.batch, tile.split, params.num_splits, params.inner_batch);
  tile.output.query_begin = tile.segment.query_begin;
  __syncwarp();
  {
    const int row_begin = tile.row_begin;
    const int num_rows =
        min(tile.segment.num_queries * packed_heads - row_begin, params.rows_per_tile);
    const int used_rows = clip(tile.segment.used_queries * packed_heads - row_begin, num_rows);
    tile.output.num_rows = num_rows;
    tile.used_rows = used_rows;
    const int first = params.output.qhead_per_khead.div(row_begin);
    const int last = params.output.qhead_per_khead.div(row_begin + max(used_rows, 1) - 1);
    tile.query = tile.segment.query_begin + first;
    tile.seqlen_k = tile.segment.seqlen_k;
    tile.window = {params.window_left, params.window_right,
                   params.top_left ? 0 : tile.seqlen_k - tile.segment.used_queries};
    __syncwarp();
    tile.blocks = used_rows == 0
                      ? KeyBlocks{0, 0, 0, 0}
                      : split_blocks(key_blocks(tile.window, tile.seqlen_k, first, last, kBlockN),
                                     tile.split, params.num_splits);
  }
}

// Tiles on their way from the scheduler to producer and consumers, in shared memory.
// `full`: the scheduler arrives, 1; the others wait; the slot holds a tile.
// `empty`: one lane of the producer warp and of each consumer warp arrives; the scheduler waits; the
// slot has been read.
struct TileQueue {
  using Ring = RingPosition<kForwardTileSlots>;
  using Barrier = cutlass::arch::ClusterBarrier;

  uint64_t full[kForwardTileSlots];
  uint64_t empty[kForwardTileSlots];
  ForwardTile tiles[kForwardTileSlots];

  __device__ void initialise(int num_reading_warps) {
    for (int slot = 0; slot < kForwardTileSlots; ++slot) {
      Barrier::init(&full[slot], 1);
      Barrier::init(&empty[slot], num_reading_warps);
    }
  }

  __device__ void wait_empty(const Ring& slot) {
    Barrier::wait(&empty[slot.stage], slot.phase ^ 1);
  }

  // After wait_empty, and when the tile has been written by all lanes.
  __device__ void put(Ring& slot, bool elected) {
    __syncwarp();
    if (elected) Barrier::arrive(&full[slot.stage]);
    slot.advance();
  }

  // The tile stays readable until the warp releases it.
  __device__ const ForwardTile& get(const Ring& slot) {
    Barrier::wait(&full[slot.stage], slot.phase);
    return tiles[slot.stage];
  }

  __device__ void release(Ring& slot, int thread) {
    __syncwarp();
    if (thread % kWarpSize == 0) Barrier::arrive(&empty[slot.stage]);
    slot.advance();
  }
};

// The scheduler warp.
template <int kBlockN>
__device__ void run_tile_scheduler(const ForwardParams& params, TileQueue& queue) {
  const bool elected = threadIdx.x % kWarpSize == 0;
  const auto num_tiles = [&] {
    const int* const workspace = params.schedule.workspace;
    return workspace == nullptr ? params.num_tiles : workspace[Schedule::kNumTiles];
  };
  const int step = static_cast<int>(gridDim.x);
  TileQueue::Ring slot;
  uint32_t q_phase = 0;
  int index = blockIdx.x;
  while (index < num_tiles()) {
    ForwardTile& tile = queue.tiles[slot.stage];
    find_tile<kBlockN>(params, index, tile);
    tile.q_phase = q_phase;
    if (!tile.blocks.empty()) q_phase ^= 1;
    queue.put(slot, elected);
    // A tile is claimed when the one before the last is done: not earlier, so that no CTA holds a
    // long tile that another could begin.
    queue.wait_empty(slot);
    if (params.tile_counter == nullptr) {
      index += step;
    } else {
      if (elected) index = step + atomicAdd(params.tile_counter, 1);
      index = uniform(index);
    }
  }
  queue.tiles[slot.stage].output.num_rows = 0;
  queue.put(slot, elected);
}

}  // namespace fa
