// Finds the tiles of a persistent CTA. The producer decides, through a counter on the device where
// tiles differ in length (the next CTA that is free takes the next tile, and with the longest first
// all end together) and in fixed steps where they do not; the consumers learn the tile's number
// through shared memory and derive the rest themselves. The lengths are read on the device; tiles
// that they leave empty are visited as well, since their O and LSE have to be written.
#pragma once

#include "cutlass/arch/barrier.h"
#include "device/epilogue/output_tile.cuh"
#include "device/forward/params.h"
#include "device/registers.cuh"

namespace fa {

struct ForwardTile {
  int batch;
  int head_kv;
  int group;      // first query head of the tile within its group: 0 when packed
  int row_begin;  // first row, packed or not, within the sequence
  int seqlen_k;
  Window window;
  KeyBlocks blocks;
};

__device__ inline KeyBlocks uniform(const KeyBlocks& blocks) {
  return {uniform(blocks.begin), uniform(blocks.end), uniform(blocks.full_begin),
          uniform(blocks.full_end)};
}

// What the epilogue needs of tile `index`.
template <int kBlockM>
__device__ OutputTile forward_output_tile(const ForwardParams& params, int index) {
  const TilePosition position = tile_position(params.order, index);
  const int packed_heads = params.output.qhead_per_khead.divisor;
  OutputTile output;
  output.batch = position.head / params.heads;
  output.head_kv = position.head - output.batch * params.heads;
  output.query_begin = 0;
  output.row_begin = position.row_block * kBlockM;
  output.num_rows = min(params.seqlen_q * packed_heads - output.row_begin, kBlockM);
  return output;
}

// Rows of the tile, counted from its first, before the end of its sequence.
__device__ inline int num_used_rows(const ForwardParams& params, const OutputTile& tile) {
  const int used =
      params.seqlen_q_of(tile.batch) * params.output.qhead_per_khead.divisor - tile.row_begin;
  return max(min(used, tile.num_rows), 0);
}

// What the main loop needs of tile `index`.
template <int kBlockM, int kBlockN>
__device__ ForwardTile forward_tile(const ForwardParams& params, int index) {
  const OutputTile output = forward_output_tile<kBlockM>(params, index);
  ForwardTile tile;
  tile.batch = output.batch;
  tile.row_begin = output.row_begin;
  if (params.output.qhead_per_khead.divisor > 1) {
    tile.head_kv = output.head_kv;
    tile.group = 0;
  } else {
    tile.head_kv = output.head_kv / params.qhead_per_khead;
    tile.group = output.head_kv - tile.head_kv * params.qhead_per_khead;
  }
  tile.seqlen_k = params.seqlen_k_of(output.batch);
  const int diagonal = params.top_left ? 0 : tile.seqlen_k - params.seqlen_q_of(output.batch);
  tile.window = {params.window_left, params.window_right, diagonal};
  const int used_rows = num_used_rows(params, output);
  const int first = params.output.qhead_per_khead.div(output.row_begin);
  const int last = params.output.qhead_per_khead.div(output.row_begin + max(used_rows, 1) - 1);
  tile.blocks = used_rows == 0 ? KeyBlocks{0, 0, 0, 0}
                               : key_blocks(tile.window, tile.seqlen_k, first, last, kBlockN);
  return tile;
}

// The next tile on its way from the producer to the consumers, in shared memory.
// `full`: the producer arrives, 1; the consumers wait; the slot holds a tile.
// `empty`: one lane of each consumer warp arrives; the producer waits; the slot has been read.
struct TileSlot {
  static constexpr int kNoMore = -1;

  uint64_t full;
  uint64_t empty;
  int index;         // kNoMore: the consumers are done
  uint32_t q_phase;  // parity of Q's barrier for this tile

  __device__ void initialise(int num_consumer_warps) {
    cutlass::arch::ClusterBarrier::init(&full, 1);
    cutlass::arch::ClusterBarrier::init(&empty, num_consumer_warps);
  }

  // `phase` counts the calls, modulo 2.
  __device__ void put(int index_to_put, uint32_t q_phase_to_put, uint32_t& phase, bool elected) {
    cutlass::arch::ClusterBarrier::wait(&empty, phase ^ 1);
    if (elected) {
      index = index_to_put;
      q_phase = q_phase_to_put;
      cutlass::arch::ClusterBarrier::arrive(&full);
    }
    phase ^= 1;
  }

  __device__ int take(uint32_t& q_phase_taken, uint32_t& phase, int thread) {
    cutlass::arch::ClusterBarrier::wait(&full, phase);
    const int index_taken = uniform(index);
    q_phase_taken = uniform(q_phase);
    __syncwarp();
    if (thread % kWarpSize == 0) cutlass::arch::ClusterBarrier::arrive(&empty);
    phase ^= 1;
    return index_taken;
  }
};

// The producer's order of tiles.
__device__ inline int next_tile(const ForwardParams& params, int index) {
  const int step = static_cast<int>(gridDim.x);
  return params.tile_counter == nullptr ? index + step : step + atomicAdd(params.tile_counter, 1);
}

}  // namespace fa
