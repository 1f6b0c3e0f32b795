// Masks of one tile: each key is seen by an interval of queries, and outside of it P becomes 0.
//
// A thread of a consumer warpgroup holds two rows (keys) of P^T and of each the columns (queries)
// 8 g + 2 (lane % 4) and the next one. Selecting, not multiplying, keeps overflow out: where a
// query does not see a key its LSE bounds nothing.
#pragma once

#include "device/backward/tile.cuh"
#include "device/registers.cuh"

namespace fa {

// The queries that see each key of a tile. In shared memory, since registers are scarce and masks
// rare.
template <int kBlockN>
struct QueryMask {
  QueryRange queries[kBackwardWarpgroups * kRowsPerWarpgroup];

  // A warp writes and reads its own 16 keys only, also where the warpgroups share the keys.
  __device__ void prepare(const BackwardTile& tile, int thread) {
    thread = opaque(thread);
    __syncwarp();
    const int row = thread / kWarpSize * 16 + thread % 16;
    queries[row] = visible_queries(tile.window, tile.queries.length, tile.keys.length,
                                   tile.key_begin + row % kBlockN);
    __syncwarp();
  }

  // p: P^T of the query block that begins at query `first_query`.
  template <int kCount>
  __device__ void apply(float (&p)[kCount], int first_query, int thread) const {
    thread = opaque(thread);
    const int origin = first_query + accumulator_coordinate(thread, 0).column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const QueryRange range = queries[accumulator_coordinate(thread, 2 * half).row];
      const int begin = range.begin - origin;
      const int end = range.end - origin;
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
        const int column = accumulator_coordinate(0, i).column;
        p[i] = column < begin || column >= end ? 0.f : p[i];
        p[i + 1] = column + 1 < begin || column + 1 >= end ? 0.f : p[i + 1];
      }
    }
  }
};

}  // namespace fa
