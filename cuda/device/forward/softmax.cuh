// Online softmax in base 2, over the key blocks of a tile. With c = logit_unit * log2(e), per row
//
//   m' = max(m, scores), or m where that is not more than 8 / c greater
//   P = 2^(c score - c m')   l' = l 2^(c (m - m')) + sum P   O' = O 2^(c (m - m'))
//
// at one fused multiply-add and one exponential per score. The rule keeps m, which all results are
// relative to, in nearly every block but the first; P is at most 2^8. State of a thread: its two
// rows' m (equal in the four threads of a row) and its own part of the sum l; the parts are added at
// the end.
//
// So a block begins with m as it is: `try_block` makes the first exponentials, where there are
// registers for them, while it looks for a score that is too great. Nearly always there is none, no
// thread needs to know of others' scores, and O stays as it is. Otherwise the scores are still
// there, and `update` does all that the block needs.
//
// A warp goes one way for all its rows, but a row's bits depend on its own scores only: `update`
// changes m by the rule above, which knows one row, and a row that keeps m gets from it what the
// other way gives: the same offset, the same multiply-adds (0 is subtracted before), the same order
// of summands, and a factor of 1 for l and O.
//
// The rounding of c m is an error of P that all scores of a row share, and too small to matter as
// long as |c m| < 2^10. For larger logits the top score's P would not be 1, and its own rounding to
// 16 bits would show where one key has all the weight: such a row subtracts before it multiplies,
// and has a threshold of -inf, so that any score of it calls for `update`. So has a row that has seen
// no key; its m is -inf and its offset 0. NaN is above no threshold and spreads by itself.
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
  float offset[2] = {0.f, 0.f};                 // c m
  float threshold[2] = {-INFINITY, -INFINITY};  // a greater score calls for `update`
  float rescale[2];    // by the last update: what O is to be multiplied with
  float block_sum[4];  // of the block at hand, per row of even and odd columns

  // Collective over the warp. The exponentials of the first scores -> early; whether a row needs
  // `update`, then `early` means nothing.
  template <int kEarly, int kCount>
  __device__ __forceinline__ bool try_block(const float (&s)[kCount], float* early,
                                            float logit_unit_log2) const {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      early[i] = exp2_approx(fmaf(s[i], logit_unit_log2, -offset[i / 2 % 2]));
    }
    const bool first = largest(s, 0) > threshold[0];
    const bool second = largest(s, 1) > threshold[1];
    bool overflow = false;
    if constexpr (kEarly > 0) {
      // An overflow without a score above the threshold does not happen; to ask for it keeps the
      // compiler from making the exponentials behind the branch.
      float sum[4];
#pragma unroll
      for (int i = 0; i < kEarly; ++i) sum[i % 4] = i < 4 ? early[i] : sum[i % 4] + early[i];
      overflow = (sum[0] + sum[1]) + (sum[2] + sum[3]) > kHuge;
    }
    return __any_sync(~0u, first | second | overflow);
  }

  // Scores kBegin to kEnd -> P in place; after a try_block that was true P means nothing.
  template <int kBegin, int kEnd, int kCount>
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], float logit_unit_log2) const {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      s[i] = exp2_approx(fmaf(s[i], logit_unit_log2, -offset[i / 2 % 2]));
    }
  }

  // Adds P of scores kBegin to kEnd to the sum; from 0 on, in this order, whichever way P was made.
  // Without `counts` the rows' sums stay as they are, and `block_sum` is for nothing until the next
  // one begins.
  template <int kBegin, int kEnd, int kCount>
  __device__ __forceinline__ void add(const float (&s)[kCount], bool counts = true) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      block_sum[i % 4] = i < 4 ? s[i] : block_sum[i % 4] + s[i];
    }
    if constexpr (kBegin == 0) {
      // The compiler would add behind the wait for P V, and not between the exponentials.
#pragma unroll
      for (float& sum : block_sum) asm volatile("" : "+f"(sum));
    }
    if constexpr (kBegin < kEnd && kEnd == kCount) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = block_sum[2 * half] + block_sum[2 * half + 1];
        row_sum[half] += counts ? sum : 0.f;
      }
    }
  }

  // Collective over the warp. A block with any scores: m, then scores -> P in place, and the sum.
  // The two rows one after the other and without branches, so that the assembler interleaves the
  // maximum of one with the exponentials of the other.
  template <int kCount>
  __device__ __forceinline__ void update(float (&s)[kCount], float logit_unit_log2) {
    // Finite, so that adding it to -inf is -inf.
    const float max_growth = fminf(__fdividef(8.f, logit_unit_log2), kHuge);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = largest(s, half);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const bool grown = top > row_max[half] + max_growth;
      rescale[half] = grown ? exp2_approx((row_max[half] - top) * logit_unit_log2) : 1.f;
      row_max[half] = grown ? top : row_max[half];
      offset[half] = grown ? __fmul_rn(top, logit_unit_log2) : offset[half];
      row_sum[half] *= rescale[half];
      const bool large = fabsf(offset[half]) >= 1024.f;
      threshold[half] = large ? -INFINITY : row_max[half] + max_growth;
      const float subtract = large ? row_max[half] : 0.f;
      const float summand = large ? 0.f : -offset[half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += i % 2 == 0 ? 1 : 3) {
        s[i] = exp2_approx(fmaf(s[i] - subtract, logit_unit_log2, summand));
      }
    }
    add<0, kCount>(s);
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
  static constexpr float kHuge = 3e38f;

  // This thread's largest score of a row. Two chains, so that the next maximum need not wait for
  // the last.
  template <int kCount>
  static __device__ __forceinline__ float largest(const float (&s)[kCount], int half) {
    float even = s[2 * half];
    float odd = s[2 * half + 1];
#pragma unroll
    for (int i = 4; i < kCount; i += 4) {
      even = fmaxf(even, s[i + 2 * half]);
      odd = fmaxf(odd, s[i + 2 * half + 1]);
    }
    return fmaxf(even, odd);
  }
};

}  // namespace fa
