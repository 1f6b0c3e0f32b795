// Online softmax in base 2, over the key blocks of a tile. With c = logit_unit * log2(e), per row
//
//   m' = max(m, scores)   P = 2^(c score - c m')
//   l' = l 2^(c (m - m')) + sum P   O' = O 2^(c (m - m'))
//
// at one fused multiply-add and one exponential per score. State of a thread: its two rows' maximum
// m (equal in the four threads of a row) and its own part of the sum l; the parts are added at the
// end.
//
// The rounding of c m' is an error of P that all scores of a row share, and too small to matter as
// long as |c m'| < 2^8. For larger logits m' is subtracted first, which is exact, so that the top
// score's P is 1 at any size. A row that has seen no key has m = -inf and subtracts 0.
#pragma once

#include <cmath>

#include "device/epilogue/row_statistics.cuh"

namespace fa {

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

inline constexpr float kLog2E = 1.44269504f;

struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};

  // Scores -> P in place; returns in `rescale` what O has to be multiplied with.
  template <int kCount>
  __device__ void update(float (&s)[kCount], float logit_unit_log2, float (&rescale)[2]) {
    float offset[2];
    float subtract[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Two chains, so that the next maximum need not wait for the last.
      float even = fmaxf(row_max[half], s[2 * half]);
      float odd = s[2 * half + 1];
#pragma unroll
      for (int i = 4; i < kCount; i += 4) {
        even = fmaxf(even, s[i + 2 * half]);
        odd = fmaxf(odd, s[i + 2 * half + 1]);
      }
      float largest = fmaxf(even, odd);
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      subtract[half] = largest == -INFINITY ? 0.f : largest;
      rescale[half] = exp2_approx((row_max[half] - subtract[half]) * logit_unit_log2);
      row_max[half] = largest;
      offset[half] = subtract[half] * logit_unit_log2;
    }
    constexpr float kExactLimit = 256.f;
    if (__any_sync(~0u, fmaxf(fabsf(offset[0]), fabsf(offset[1])) >= kExactLimit)) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] -= subtract[i / 2 % 2];
      offset[0] = offset[1] = 0.f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float even = row_sum[half] * rescale[half];
      float odd = 0.f;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        float& first = s[i + 2 * half];
        float& second = s[i + 2 * half + 1];
        first = exp2_approx(fmaf(first, logit_unit_log2, -offset[half]));
        second = exp2_approx(fmaf(second, logit_unit_log2, -offset[half]));
        even += first;
        odd += second;
      }
      row_sum[half] = even + odd;
    }
  }

  // Collective over the four threads of a row: what the epilogue needs to know.
  __device__ RowStatistics finish(int half, float logit_unit) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return RowStatistics::unnormalised(row_max[half] * logit_unit, sum);
  }
};

}  // namespace fa
