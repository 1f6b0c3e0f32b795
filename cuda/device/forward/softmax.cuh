// Online softmax in base 2, over the key blocks of a tile. With c = logit_unit * log2(e), per row
//
//   m' = max(m, scores)   P = 2^(c score - c m')
//   l' = l 2^(c (m - m')) + sum P   O' = O 2^(c (m - m'))
//
// at one fused multiply-add and one exponential per score. State of a thread: its two rows' maximum
// m (equal in the four threads of a row) and its own part of the sum l; the parts are added at the
// end.
//
// c m' is rounded once per row, and every place that uses it rounds it alike: what is really
// subtracted differs from c m' by a residual that all weights of a row share, so that it cancels in
// O and is taken out of LSE at the end. Logits may be of any size. A row that has seen no key has
// m = -inf and subtracts 0.
//
// No branches: the assembler interleaves the maximum of one row with the exponentials of the other,
// and both with what comes before and after. A branch here cost 10 % of the kernel's time.
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
  float offset[2];

  // The new maxima; returns in `rescale` what O has to be multiplied with.
  template <int kCount>
  __device__ void maximise(const float (&s)[kCount], float logit_unit_log2, float (&rescale)[2]) {
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
      offset[half] = largest == -INFINITY ? 0.f : __fmul_rn(largest, logit_unit_log2);
      rescale[half] = exp2_approx(__fmul_rn(row_max[half], logit_unit_log2) - offset[half]);
      row_max[half] = largest;
      row_sum[half] *= rescale[half];
    }
  }

  // Scores of one row -> P in place.
  template <int kHalf, int kCount>
  __device__ void exponentiate(float (&s)[kCount], float logit_unit_log2) {
    float even = row_sum[kHalf];
    float odd = 0.f;
#pragma unroll
    for (int i = 2 * kHalf; i < kCount; i += 4) {
      s[i] = exp2_approx(fmaf(s[i], logit_unit_log2, -offset[kHalf]));
      s[i + 1] = exp2_approx(fmaf(s[i + 1], logit_unit_log2, -offset[kHalf]));
      even += s[i];
      odd += s[i + 1];
    }
    row_sum[kHalf] = even + odd;
  }

  // Collective over the four threads of a row: what the epilogue needs to know.
  __device__ RowStatistics finish(int half, float logit_unit, float logit_unit_log2) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float largest = row_max[half];
    const float residual = fmaf(largest, logit_unit_log2, -__fmul_rn(largest, logit_unit_log2));
    RowStatistics statistics = RowStatistics::unnormalised(largest * logit_unit, sum);
    if (statistics.lse != -INFINITY) statistics.lse -= residual / kLog2E;
    return statistics;
  }
};

}  // namespace fa
