// Online softmax in base 2, over the key blocks of a tile. With c = logit_unit * log2(e), per row
//
//   m' = max(m, scores), or m where that is not more than 8 / c greater
//   P = 2^(c score - c m')   l' = l 2^(c (m - m')) + sum P   O' = O 2^(c (m - m'))
//
// at one fused multiply-add and one exponential per score. The rule keeps m, which all results are
// relative to, in nearly every block but the first, and O need not be multiplied (2 to 6 % of the
// kernel's time); P is at most 2^8. State of a thread: its two rows' m (equal in the four threads of
// a row) and its own part of the sum l; the parts are added at the end.
//
// The rounding of c m' is an error of P that all scores of a row share, and too small to matter as
// long as |c m'| < 2^10. For larger logits the top score's P would not be 1, and its own rounding to
// 16 bits would show where one key has all the weight; `correct` takes the error out, of such rows
// only, as a row's bits must not depend on other rows. (From |c m'| = 2^31 on the error exceeds the
// range of P, and the row's result may be NaN.) A row that has seen no key has m = -inf and
// subtracts 0.
//
// The two rows are handled one after the other and without branches, so that the assembler
// interleaves the maximum of one row with the exponentials of the other, and both with what comes
// before and after: a branch between them cost 7 % of the kernel's time.
#pragma once

#include <cmath>

#include "device/epilogue/row_statistics.cuh"

namespace fa {

__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

struct OnlineSoftmax {
  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};

  // Of the block at hand.
  float offset[2];   // c m'
  float rescale[2];  // what O and the sum so far have to be multiplied with

  template <int kCount>
  __device__ __forceinline__ void maximise(const float (&s)[kCount], float logit_unit_log2) {
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
      // NaN where no key has been seen at all: not grown.
      constexpr float kMaxGrowth = 8.f;
      const float growth = (largest - row_max[half]) * logit_unit_log2;
      const bool grown = growth > kMaxGrowth;
      rescale[half] = grown ? exp2_approx(-growth) : 1.f;
      row_max[half] = grown ? largest : row_max[half];
      const float subtract = row_max[half] == -INFINITY ? 0.f : row_max[half];
      offset[half] = __fmul_rn(subtract, logit_unit_log2);
      row_sum[half] *= rescale[half];
    }
  }

  // Scores of one row -> P in place; returns their sum, which is still to be added to row_sum.
  template <int kHalf, int kCount>
  __device__ __forceinline__ float exponentiate(float (&s)[kCount], float logit_unit_log2) const {
    float even = 0.f;
    float odd = 0.f;
#pragma unroll
    for (int i = 2 * kHalf; i < kCount; i += 4) {
      s[i] = exp2_approx(fmaf(s[i], logit_unit_log2, -offset[kHalf]));
      s[i + 1] = exp2_approx(fmaf(s[i + 1], logit_unit_log2, -offset[kHalf]));
      even += s[i];
      odd += s[i + 1];
    }
    return even + odd;
  }

  // Collective over the warp: whether a row needs `correct`.
  __device__ bool has_large_logits() const {
    return __any_sync(~0u, fmaxf(fabsf(offset[0]), fabsf(offset[1])) >= kExactLimit);
  }

  // Between the two rows: takes the offset's error out of P of the first row and of its sum, and
  // makes scores of the second such that there is none. A row without large logits stays as it is.
  template <int kCount>
  __device__ __forceinline__ void correct(float (&s)[kCount], float& first_sum,
                                          float logit_unit_log2) {
    const float rounding = large(0) ? fmaf(-row_max[0], logit_unit_log2, offset[0]) : 0.f;
    const float factor = exp2_approx(rounding);
    const float subtract = large(1) ? row_max[1] : 0.f;
    first_sum *= factor;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      s[i] *= factor;
      s[i + 1] *= factor;
      s[i + 2] -= subtract;
      s[i + 3] -= subtract;
    }
    offset[1] = large(1) ? 0.f : offset[1];
  }

  // Collective over the four threads of a row: what the epilogue needs to know.
  __device__ RowStatistics finish(int half, float logit_unit) const {
    float sum = row_sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    // The sum is at least 1 where there is a key, or NaN: no special cases of division and logarithm,
    // whose branches took longer than all else at the end of a tile.
    constexpr float kLn2 = 0.693147181f;
    const float lse = fmaf(log2_approx(sum), kLn2, row_max[half] * logit_unit);
    return sum == 0.f ? RowStatistics{} : RowStatistics{__fdividef(1.f, sum), lse};
  }

 private:
  static constexpr float kExactLimit = 1024.f;

  __device__ bool large(int half) const { return fabsf(offset[half]) >= kExactLimit; }
};

}  // namespace fa
