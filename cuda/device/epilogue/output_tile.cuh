// One tile of the output: which rows it has and where they go. Dense, packed GQA and varlen differ
// only in these numbers, so all destinations (BulkOutput, DirectOutput, PartialOutput) share this
// struct.
#pragma once

#include "device/epilogue/output_params.h"
#include "index_maps.h"

namespace fa {

struct OutputTile {
  int batch;
  int head_kv;
  int query_begin;  // first query of the tile's sequence in the buffer
  int row_begin;    // first row of the tile in its sequence (packed rows when G > 1)
  int num_rows;     // rows to write
};

// Query and query head of a tile's row.
struct RowPosition {
  int query;
  int head;
};

__device__ inline RowPosition row_position(const OutputParams& params, const OutputTile& tile,
                                           int row) {
  int query, subhead;
  params.qhead_per_khead(query, subhead, tile.row_begin + row);
  return {tile.query_begin + query, tile.head_kv * params.qhead_per_khead.divisor + subhead};
}

template <typename Element>
__device__ Element* o_row(const OutputParams& params, const OutputTile& tile, int row) {
  const RowPosition position = row_position(params, tile, row);
  return static_cast<Element*>(params.o) + tile.batch * params.o_batch_stride +
         position.query * params.o_query_stride + position.head * params.o_head_stride;
}

__device__ inline void store_lse_row(const OutputParams& params, const OutputTile& tile, int row,
                                     float lse) {
  const RowPosition position = row_position(params, tile, row);
  params.lse[tile.batch * params.lse_batch_stride + position.head * params.lse_head_stride +
             position.query] = lse;
}

// LSE of the two rows a thread holds; the thread that owns column 0 writes.
__device__ inline void store_lse(const OutputParams& params, const OutputTile& tile,
                                 const float (&lse)[2], int thread) {
  if (thread % 4 != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_coordinate(thread, 2 * half).row;
    if (row < tile.num_rows) store_lse_row(params, tile, row, lse[half]);
  }
}

// A tile without any key: O = 0, LSE = -inf.
template <typename Element, int kNumThreads>
__device__ void store_empty_tile(const OutputParams& params, const OutputTile& tile, int thread) {
  constexpr int kThreadsPerRow = 8;
  constexpr int kVector = 16 / sizeof(Element);
  for (int row = thread / kThreadsPerRow; row < tile.num_rows;
       row += kNumThreads / kThreadsPerRow) {
    uint4* const vectors = reinterpret_cast<uint4*>(o_row<Element>(params, tile, row));
    for (int i = thread % kThreadsPerRow; i < params.head_dim / kVector; i += kThreadsPerRow) {
      vectors[i] = uint4{0, 0, 0, 0};
    }
  }
  if (thread < tile.num_rows) store_lse_row(params, tile, thread, -INFINITY);
}

}  // namespace fa
