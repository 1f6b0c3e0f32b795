// The tiles of a persistent CTA. A tile is one block of keys, all heads of its group and all query
// blocks that see any of the keys, or one of the parts of such a tile (TileParts), which is a tile like
// any other until dK and dV are stored. With a cluster each CTA has a part of the keys, and both visit
// the same query blocks.
//
// One warp, the scheduler, finds them, reads the lengths and leaves what the others need in shared
// memory, in a ring of two slots, so that it and the producer are one tile ahead of the consumers.
// Tiles come through a counter on the device where they differ in length or wait for each other (the
// next CTA that is free takes the next tile) and in fixed steps where they do not. From the counter
// a tile is taken as late as the loads allow, when those of the tile before have all been issued: a
// CTA that held a tile long before its time would keep others waiting for it.
#pragma once

#include <climits>

#include "cutlass/arch/barrier.h"
#include "device/backward/cluster.cuh"
#include "device/backward/params.h"
#include "device/registers.cuh"
#include "device/ring_position.cuh"

namespace fa {

struct BackwardTile {
  int64_t row_begin;     // first key among the keys of all batch indices
  int64_t query_block;   // query block 0 of the group's first head in the workspace
  int operand_batch[4];  // batch index of q, k, v, dout
  int head_kv;
  int key_begin;  // first key, within the sequence
  int num_rows;   // keys to write, from the first on
  Span keys;
  Span queries;
  Window window;
  QueryBlocks blocks;
  QueryRange valid;     // queries whose Q and dO count
  uint32_t phase;       // parity of the barriers of K and V
  uint32_t slot_phase;  // parity of the barriers of the slot
  bool more;            // false: no tile, the end
  int part_number;      // see TilePart
};

static_assert(sizeof(BackwardTile) == kBackwardTileBytes);

// One lane's work. kBlockN keys are shared by kCtas CTAs.
template <int kBlockM, int kBlockN, int kCtas>
__device__ void find_tile(const BackwardParams& params, int index, BackwardTile& tile) {
  const TilePosition position = tile_position(params.order, tile_part(params.split, index).tile);
  const int batch = position.head / params.heads_kv;
  tile.head_kv = position.head - batch * params.heads_kv;
  const auto descriptors = [&](const int32_t* base, BackwardOperand operand) {
    return base == nullptr ? base : base + params.batch_map.offset(operand, opaque(batch));
  };
  const Sequences& sequences = params.sequences;
  const int32_t* const cu_seqlens_k = descriptors(sequences.cu_seqlens_k, kBackwardCuSeqlensK);
  const SlotPosition slot = slot_position(cu_seqlens_k, sequences.num_sequences, sequences.total_k,
                                          position.row_block, kBlockN);
  Span keys{0, 0};
  Span queries{0, 0};
  if (slot.sequence >= 0) {
    keys = span_of(cu_seqlens_k, descriptors(sequences.seqused_k, kBackwardSequsedK), slot.sequence,
                   sequences.total_k);
    queries = span_of(descriptors(sequences.cu_seqlens_q, kBackwardCuSeqlensQ),
                      descriptors(sequences.seqused_q, kBackwardSequsedQ), slot.sequence,
                      sequences.total_q);
  }
  tile.keys = keys;
  tile.queries = queries;
  tile.key_begin = slot.row_begin + (kCtas == 1 ? 0 : cluster_rank() * (kBlockN / kCtas));
  // Packed, the rows outside every sequence are zero before the kernel starts.
  tile.num_rows = (sequences.packed() ? keys.length : sequences.total_k) - tile.key_begin;
  tile.row_begin = static_cast<int64_t>(batch) * sequences.total_k + keys.begin + tile.key_begin;
  tile.query_block =
      static_cast<int64_t>(position.head) * params.qhead_per_khead * params.workspace.q_slots +
      first_slot(queries.begin, slot.sequence, kBlockM);
  const Window window{params.window_left, params.window_right,
                      params.top_left ? 0 : keys.length - queries.length};
  tile.window = window;
  tile.blocks = query_blocks(window, queries.length, keys.length, slot.row_begin, kBlockM, kBlockN);
  QueryRange valid = seeing_queries(window, queries.length, keys.length);
  // Where nothing but the buffer's end follows, TMA brings zeros.
  if (queries.begin + valid.end >= sequences.total_q) valid.end = INT_MAX;
  tile.valid = valid;
  params.batch_map.offsets(opaque(batch), tile.operand_batch);
  // Found again: the warp has few registers.
  const TilePart part = tile_part(params.split, opaque(index));
  tile.part_number = part.part_number;
  if (part.part_number >= 0) {
    tile.blocks = blocks_of_part(tile.blocks, part.part, params.split.parts);
  }
}

// `full[s]`: the scheduler arrives, 1; everybody else waits; slot s holds a tile.
// `empty[s]`: one lane of each warp that reads arrives; the scheduler waits; the slot is free.
// `loaded`, only where tiles come from the counter: the producer of queries arrives, 1; the scheduler
// waits; the tile's loads are issued.
// With a cluster the first CTA's scheduler takes tiles from the counter and tells the other one's:
// `number_full`: the first one's arrives, 1; the other's waits; `number` is there.
// `number_taken`: the other's arrives, 1; the first one's waits; `number` may be overwritten.
struct BackwardTileSlots {
  using Ring = RingPosition<2>;
  using Barrier = cutlass::arch::ClusterBarrier;

  BackwardTile tile[2];
  uint64_t full[2];
  uint64_t empty[2];
  uint64_t loaded;
  uint64_t number_full;
  uint64_t number_taken;
  int number;

  __device__ void initialise(int num_readers) {
    for (int slot = 0; slot < 2; ++slot) {
      Barrier::init(&full[slot], 1);
      Barrier::init(&empty[slot], num_readers);
    }
    Barrier::init(&loaded, 1);
    Barrier::init(&number_full, 1);
    Barrier::init(&number_taken, 1);
  }

  __device__ const BackwardTile& take(const Ring& ring) {
    Barrier::wait(&full[ring.stage], ring.phase);
    return tile[ring.stage];
  }

  __device__ void release(Ring& ring, int thread) {
    __syncwarp();
    if (thread % kWarpSize == 0) Barrier::arrive(&empty[ring.stage]);
    ring.advance();
  }

  __device__ void report_loaded(int thread) {
    if (thread % kWarpSize == 0) Barrier::arrive(&loaded);
  }

  template <int kBlockM, int kBlockN, int kCtas>
  __device__ void schedule(const BackwardParams& params) {
    Ring ring;
    uint32_t phase = 0;
    uint32_t loaded_phase = 0;
    uint32_t claim_phase = 0;
    const int step = static_cast<int>(gridDim.x) / kCtas;
    // Where tiles wait for one another, those with lower numbers must be in work, and the first ones
    // come from the counter as well: a CTA may start late. Elsewhere the first is the CTA's number.
    const bool ordered = params.turns != nullptr;
    const int first_counted = ordered ? 0 : step;
    for (int index = ordered ? claim<kCtas>(params, claim_phase)
                             : static_cast<int>(blockIdx.x) / kCtas;
         ;) {
      Barrier::wait(&empty[ring.stage], ring.phase ^ 1);
      BackwardTile& next = tile[ring.stage];
      next.more = index < params.num_tiles;
      next.slot_phase = ring.phase;
      if (next.more) {
        find_tile<kBlockM, kBlockN, kCtas>(params, index, next);
        next.phase = phase;
        if (!next.blocks.empty()) phase ^= 1;
      }
      Barrier::arrive(&full[ring.stage]);
      if (index >= params.num_tiles) return;
      ring.advance();
      if (params.tile_counter == nullptr) {
        index += step;
        continue;
      }
      Barrier::wait(&loaded, loaded_phase);
      loaded_phase ^= 1;
      index = first_counted + claim<kCtas>(params, claim_phase);
    }
  }

 private:
  // The counter's next number. CTA 0 of a cluster takes it and tells the other one.
  template <int kCtas>
  __device__ int claim(const BackwardParams& params, uint32_t& phase) {
    if constexpr (kCtas == 1) return atomicAdd(params.tile_counter, 1);
    int index;
    if (cluster_rank() == 0) {
      index = atomicAdd(params.tile_counter, 1);
      wait_for_peer(&number_taken, phase ^ 1);
      store_to_peer(&number, index);
      release_to_peer(&number_full);
    } else {
      wait_for_peer(&number_full, phase);
      index = number;
      release_to_peer(&number_taken);
    }
    phase ^= 1;
    return index;
  }
};

__device__ inline QueryBlocks uniform(const QueryBlocks& blocks) {
  return {uniform(blocks.begin), uniform(blocks.end), uniform(blocks.full_begin),
          uniform(blocks.full_end)};
}

}  // namespace fa
