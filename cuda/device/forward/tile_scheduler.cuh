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

namespace fa {

struct alignas(16) ForwardTile {
  KeyBlocks blocks;
  KeyBlocks shares[3];  // of them, per warpgroup
  Window window;
  int used_rows;    // rows before the end of the sequence; the others of the tile are empty
  int tail_begin;   // first row of the last block whose V has to be zeroed; 0: none
  uint32_t number;  // of the CTA's tiles that have keys; its place in the ring of Q
  OutputTile output;
  // Coordinates in the tensor maps; that of the first key is segment.key_begin.
  int batch[3];  // of q, k, v
  int head_kv;
  int group;  // first query head of the tile within its group: 0 when packed
  int query;
  Segment segment;
  int split;  // before that the place of the segment in its batch index, for the scheduler only

  // What ends the work instead of a tile.
  __device__ bool none() const { return uniform(output.num_rows) == 0; }
  __device__ bool empty() const { return uniform(blocks.end) <= uniform(blocks.begin); }
};
static_assert(sizeof(ForwardTile) == kForwardTileBytes);

__device__ inline KeyBlocks uniform(const KeyBlocks& blocks) {
  return {uniform(blocks.begin), uniform(blocks.end), uniform(blocks.full_begin),
          uniform(blocks.full_end)};
}

// What a consumer warpgroup needs to begin a tile, in registers.
struct TileStart {
  bool none;   // as in ForwardTile
  bool empty;  // likewise
  int end;     // of the tile's key blocks
  KeyBlocks share;
  uint32_t number;

  __device__ TileStart(const ForwardTile& tile, int warpgroup)
      : none(tile.none()),
        empty(tile.empty()),
        end(uniform(tile.blocks.end)),
        share(uniform(tile.shares[warpgroup])),
        number(uniform(static_cast<int>(tile.number))) {}
};

// The list of segments as the scheduler warp looks at it, see next_window. In shared memory, since
// the warp has few registers.
struct SegmentWindow {
  int ends[kWarpSize];     // tiles up to the end of each place
  int numbers[kWarpSize];  // of the segments
  int base;                // first place
  int begin;               // tiles before it

  __device__ void load(const Schedule& schedule, int base_to_load) {
    const int lane = lane_index();
    const int place = min(base_to_load + lane, schedule.workspace[Schedule::kNumListed] - 1);
    ends[lane] = schedule.tile_ends()[place];
    numbers[lane] = schedule.numbers()[place];
    base = base_to_load;
    begin = base_to_load == 0 ? 0 : schedule.tile_ends()[base_to_load - 1];
    __syncwarp();
  }

  // Number of the segment that holds tile `index`, which becomes the tile's number within it.
  // Collective over the warp; the index never decreases from call to call.
  __device__ int find(const Schedule& schedule, int& index) {
    const int lane = lane_index();
    while (ends[kWarpSize - 1] <= index) {
      const int place = window_probe(base, lane, schedule.workspace[Schedule::kNumListed]);
      const unsigned past = __ballot_sync(~0u, schedule.tile_ends()[place] > index);
      load(schedule, next_window(base, past == 0 ? kWarpSize : __ffs(past) - 1));
    }
    const int holder = __ffs(__ballot_sync(~0u, ends[lane] > index)) - 1;
    index -= holder == 0 ? begin : ends[holder - 1];
    return numbers[holder];
  }
};
static_assert(sizeof(SegmentWindow) == kForwardWindowBytes);

// Fills in tile `index`, all but its number. Collective over the warp. `tile` is in shared memory
// and all lanes write the same: the warp has so few registers that what one step finds must go
// there before the next step begins. A __syncwarp separates the reads of a field from its writes.
template <int kBlockN>
__device__ void find_tile(const ForwardParams& params, SegmentWindow& window, int index,
                          ForwardTile& tile) {
  const Schedule& schedule = params.schedule;
  const bool packed = schedule.packed();
  const int packed_heads = params.output.qhead_per_khead.divisor;
  {
    TileOrder order = params.order;
    if (packed) {
      const int number = window.find(schedule, index);
      const int batch = number / schedule.batch_segments;
      tile.output.batch = batch;
      tile.split = number - batch * schedule.batch_segments;
      __syncwarp();
      params.find_queries(tile.output.batch, tile.split, tile.segment);
      __syncwarp();
      params.find_keys(tile.output.batch, tile.split, tile.segment);
      __syncwarp();
      order.row_blocks = ceil_div(tile.segment.num_queries * packed_heads, params.rows_per_tile);
    }
    const TilePosition position = tile_position(order, index);
    tile.output.row_begin = position.row_block * params.rows_per_tile;
    tile.output.head_kv = position.head;
    __syncwarp();
  }
  {
    const int head_and_split = tile.output.head_kv;
    int head = head_and_split / params.num_splits;
    __syncwarp();
    tile.split = head_and_split - head * params.num_splits;
    if (!packed) {
      const int batch = head / params.heads;
      head -= batch * params.heads;
      tile.output.batch = batch;
      tile.segment = params.dense_segment(batch);
    }
    tile.output.head_kv = head;
    // Unpacked, heads of tiles are query heads.
    tile.head_kv = packed_heads > 1 ? head : head / params.qhead_per_khead;
    tile.group = packed_heads > 1 ? 0 : head - tile.head_kv * params.qhead_per_khead;
    __syncwarp();
  }
  params.batch_map.offsets(tile.output.batch, tile.batch);
  {
    const int batch =
        partial_batch(tile.output.batch, tile.split, params.num_splits, params.inner_batch);
    __syncwarp();
    tile.output.batch = batch;
    tile.output.query_begin = tile.segment.query_begin;
    __syncwarp();
  }
  {
    const int row_begin = tile.output.row_begin;
    const int num_rows =
        min(tile.segment.num_queries * packed_heads - row_begin, params.rows_per_tile);
    const int used_rows = clip(tile.segment.used_queries * packed_heads - row_begin, num_rows);
    tile.output.num_rows = num_rows;
    tile.used_rows = used_rows;
    const int first = params.output.qhead_per_khead.div(row_begin);
    const int last = params.output.qhead_per_khead.div(row_begin + max(used_rows, 1) - 1);
    tile.query = tile.segment.query_begin + first;
    const int seqlen_k = tile.segment.seqlen_k;
    tile.window = {params.window_left, params.window_right,
                   params.top_left ? 0 : seqlen_k - tile.segment.used_queries};
    __syncwarp();
    tile.blocks = used_rows == 0
                      ? KeyBlocks{0, 0, 0, 0}
                      : split_blocks(key_blocks(tile.window, seqlen_k, first, last, kBlockN),
                                     tile.split, params.num_splits);
    // Past the length V may hold anything, except past the buffer, where it reads as zeros.
    const int end = tile.blocks.end * kBlockN;
    tile.tail_begin = seqlen_k < min(params.seqlen_k, end) ? seqlen_k - end + kBlockN : 0;
    __syncwarp();
  }
  {
    // A lane per warpgroup.
    const int warpgroup = min(lane_index(), 2);
    const int row = warpgroup * kRowsPerWarpgroup;
    const int num_rows = min(tile.used_rows - row, kRowsPerWarpgroup);
    const int row_begin = tile.output.row_begin + row;
    const int first = params.output.qhead_per_khead.div(row_begin);
    const int last =
        num_rows > 0 ? params.output.qhead_per_khead.div(row_begin + num_rows - 1) : first - 1;
    const int seqlen_k = tile.segment.seqlen_k;
    const KeyBlocks share =
        share_of_rows(tile.blocks, key_blocks(tile.window, seqlen_k, first, last, kBlockN));
    tile.shares[warpgroup] = share;
  }
}

// Tiles on their way from the scheduler to producer and consumers, in shared memory.
// `full`: the scheduler arrives, 1; the others wait; the slot holds a tile.
// `empty`: one lane of each other warp arrives; the scheduler waits; the slot has been read.
struct TileQueue {
  using Barrier = cutlass::arch::ClusterBarrier;

  uint64_t full[kForwardTileSlots];
  uint64_t empty[kForwardTileSlots];
  ForwardTile tiles[kForwardTileSlots];
  SegmentWindow window;  // the scheduler's own

  __device__ void initialise(int num_reading_warps) {
    for (int slot = 0; slot < kForwardTileSlots; ++slot) {
      Barrier::init(&full[slot], 1);
      Barrier::init(&empty[slot], num_reading_warps);
    }
  }

  // `count` in what follows: tiles that the warp has put or released so far.
  __device__ ForwardTile& at(uint32_t count) { return tiles[count % kForwardTileSlots]; }

  __device__ void wait_empty(uint32_t count) {
    Barrier::wait(&empty[count % kForwardTileSlots], phase(count) ^ 1);
  }

  // After wait_empty, and when the tile has been written by all lanes.
  __device__ void put(uint32_t& count, bool elected) {
    __syncwarp();
    if (elected) Barrier::arrive(&full[count % kForwardTileSlots]);
    ++count;
  }

  // The tile stays readable until the warp releases it.
  __device__ const ForwardTile& get(uint32_t count) {
    Barrier::wait(&full[count % kForwardTileSlots], phase(count));
    return at(count);
  }

  __device__ void release(uint32_t& count) {
    __syncwarp();
    if (lane_index() == 0) Barrier::arrive(&empty[count % kForwardTileSlots]);
    ++count;
  }

 private:
  static __device__ uint32_t phase(uint32_t count) { return count / kForwardTileSlots % 2; }
};

__device__ inline int num_tiles(const ForwardParams& params) {
  return params.schedule.packed() ? params.schedule.workspace[Schedule::kNumTiles]
                                  : params.num_tiles;
}

// The CTA's first tile, before there are barriers: a cold start is long enough without waiting for
// them.
template <int kBlockN>
__device__ void find_first_tile(const ForwardParams& params, TileQueue& queue) {
  const int index = blockIdx.x;
  if (index >= num_tiles(params)) return;
  if (params.schedule.packed()) queue.window.load(params.schedule, 0);
  find_tile<kBlockN>(params, queue.window, index, queue.at(0));
}

// The scheduler warp, after find_first_tile.
template <int kBlockN>
__device__ void run_tile_scheduler(const ForwardParams& params, TileQueue& queue) {
  const bool elected = lane_index() == 0;
  uint32_t count = 0;
  uint32_t number = 0;
  int index = blockIdx.x;
  while (index < num_tiles(params)) {
    ForwardTile& tile = queue.at(count);
    if (count > 0) find_tile<kBlockN>(params, queue.window, index, tile);
    tile.number = number;
    number += !tile.empty();
    queue.put(count, elected);
    // A tile is claimed when the one before the last is at its last P V: not earlier, so that no CTA
    // holds a long tile that another could begin (16k keys, causal: 8 % of the kernel's time).
    queue.wait_empty(count);
    int next = index;
    if (elected && params.tile_counter != nullptr) next = atomicAdd(params.tile_counter, 1);
    index = uniform(next) + num_ctas();
  }
  queue.at(count).output.num_rows = 0;
  queue.put(count, elected);
}

}  // namespace fa
