// Partial output: one tile's fp32 accumulator -> fp32 O straight from registers, and LSE.
//
// Executed by each consumer warp on its own (2 threads per row), without shared memory and barriers.
//
// The quad exchange: of two neighbouring groups of 8 columns, a thread holds columns 2q, 2q+1 of
// both. Even q give the second group's pair to q + 1 and get its first group's, after which even q
// hold four contiguous columns of the first group and odd q of the second:
//
//     before  q0: a0 a1 | b0 b1   q1: a2 a3 | b2 b3   q2: a4 a5 | b4 b5   q3: a6 a7 | b6 b7
//     after   q0: a0 a1 a2 a3     q1: b0 b1 b2 b3     q2: a4 a5 a6 a7     q3: b4 b5 b6 b7
#pragma once

#include "device/epilogue/output_tile.cuh"

namespace fa {

template <int kHeadDim, int kBlockM>
struct PartialOutput {
  static constexpr int kNumThreads = 2 * kBlockM;

  static __device__ void store_o(const OutputParams& params, const OutputTile& tile,
                                 const float (&acc)[kHeadDim / 2], const float (&lse)[2],
                                 int thread) {
    store_lse(params, tile, lse, thread);
    const int q = thread % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = accumulator_coordinate(thread, 2 * half).row;
      float* const o = o_row<float>(params, tile, row);
#pragma unroll
      for (int group = 0; group < kHeadDim / 16; ++group) {
        const float* const a = acc + 8 * group + 2 * half;
        const bool odd = q % 2 != 0;
        const float x = __shfl_xor_sync(0xffffffff, odd ? a[0] : a[4], 1);
        const float y = __shfl_xor_sync(0xffffffff, odd ? a[1] : a[5], 1);
        const float4 vector = odd ? float4{x, y, a[4], a[5]} : float4{a[0], a[1], x, y};
        const int column = 16 * group + 8 * (q % 2) + 4 * (q / 2);
        if (row < tile.num_rows && column < params.head_dim) {
          *reinterpret_cast<float4*>(o + column) = vector;
        }
      }
    }
  }

  static __device__ void store_empty(const OutputParams& params, const OutputTile& tile,
                                     int thread) {
    store_empty_tile<float, kNumThreads>(params, tile, thread);
  }
};

}  // namespace fa
