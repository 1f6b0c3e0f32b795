// Masks of one tile: each query sees an interval of keys, and whatever lies outside becomes -inf.
//
// A thread of a consumer warpgroup holds two rows of S and of each the columns 8 g + 2 (lane % 4)
// and the next one, g = 0 ... kBlockN / 8 - 1 (accumulator_coordinate). Selecting, not adding,
// keeps NaN out that K may hold past its length.
#pragma once

#include <cmath>

#include "device/forward/tile_scheduler.cuh"
#include "device/registers.cuh"

namespace fa {

// The keys that each row of a tile sees. In shared memory, since registers are scarce and masks
// rare.
template <int kBlockM>
struct RowMask {
  KeyRange keys[kBlockM];

  // A warp writes and reads its own 16 rows only.
  __device__ void prepare(const ForwardParams& params, const ForwardTile& tile, int thread) {
    thread = opaque(thread);
    __syncwarp();
    const int row = thread / kWarpSize * 16 + thread % 16;
    keys[row] = visible_keys(tile.window, tile.segment.seqlen_k,
                             params.output.qhead_per_khead.div(tile.output.row_begin + row));
    __syncwarp();
  }

  // s: scores of the key block that begins at key `first_key`. A bit per element, so that an
  // element costs a test and a selection.
  template <int kCount>
  __device__ void apply(float (&s)[kCount], int first_key, int thread) const {
    thread = opaque(thread);
    const int origin = first_key + accumulator_coordinate(thread, 0).column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange range = keys[accumulator_coordinate(thread, 2 * half).row];
      const int begin = score_elements_before(range.begin - origin);
      const int end = score_elements_before(range.end - origin);
#pragma unroll
      for (int word = 0; word < kCount / 2; word += 32) {
        const uint32_t visible = lowest_bits(end - word) & ~lowest_bits(begin - word);
#pragma unroll
        for (int bit = 0; bit < 32 && word + bit < kCount / 2; ++bit) {
          float& score = s[(word + bit) / 2 * 4 + 2 * half + bit % 2];
          score = visible >> bit & 1 ? score : -INFINITY;
        }
      }
    }
  }
};

}  // namespace fa
