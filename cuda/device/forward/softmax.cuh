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
// So a block begins with m as it is: `try_block` makes the first exponentials, into registers of
// their own, while it looks for a score that is too great. Nearly always there is none, no thread
// needs to know of others' scores, and O stays as it is. Otherwise the scores are still there, and
// `update` and `exponentiate` do all that the block needs. Both give the same bits to a row that
// keeps its m: they depend on the row alone.
//
// The rounding of c m is an error of P that all scores of a row share, and too small to matter as
// long as |c m| < 2^10. For larger logits the top score's P would not be 1, and its own rounding to
// 16 bits would show where one key has all the weight: such a row has a threshold of -inf, so that
// it never keeps m unseen, and subtracts before it multiplies. A row that has seen no key has
// m = -inf and subtracts 0.
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

template <int kCount>
struct OnlineSoftmax {
  // Scores of a thread whose exponentials are made before m is known to be kept.
  static constexpr int kEarly = 12;

  float row_max[2] = {-INFINITY, -INFINITY};
  float row_sum[2] = {0.f, 0.f};
  float offset[2] = {0.f, 0.f};                  // c m
  float threshold[2] = {-INFINITY, -INFINITY};  // a greater score changes m
  float rescale[2];    // by the last update: what O has to be multiplied with
  float block_sum[4];  // of the block at hand, per row of even and odd columns

  // Collective over the warp. The exponentials of the first scores -> early; whether a row needs
  // `update` or is large, then `early` means nothing.
  __device__ __forceinline__ bool try_block(const float (&s)[kCount], float (&early)[kEarly],
                                            float logit_unit_log2) const {
#pragma unroll
    for (int i = 0; i < kEarly; ++i) {
      early[i] = exp2_approx(fmaf(s[i], logit_unit_log2, -offset[i / 2 % 2]));
    }
    const bool first = largest(s, 0) > threshold[0];
    const bool second = largest(s, 1) > threshold[1];
    float sum[4];
#pragma unroll
    for (int i = 0; i < kEarly; ++i) sum[i % 4] = i < 4 ? early[i] : sum[i % 4] + early[i];
    const bool overflow = (sum[0] + sum[1]) + (sum[2] + sum[3]) > 3e38f;
    return __any_sync(~0u, first | second | overflow);
  }

  // After a try_block that was false: the other scores from kBegin to kEnd -> P in place.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void exponentiate_kept(float (&s)[kCount],
                                                    float logit_unit_log2) const {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      s[i] = exp2_approx(fmaf(s[i], logit_unit_log2, -offset[i / 2 % 2]));
    }
  }

  // Collective over the warp: m of the block at hand.
  __device__ __forceinline__ void update(const float (&s)[kCount], float logit_unit_log2) {
    // Finite, so that adding it to -inf is -inf.
    const float max_growth = fminf(__fdividef(8.f, logit_unit_log2), 3e38f);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = largest(s, half);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      // From no key at all it grows by any score, and NaN is not more.
      const bool grown = top > row_max[half] + max_growth;
      rescale[half] = grown ? exp2_approx((row_max[half] - top) * logit_unit_log2) : 1.f;
      row_max[half] = grown ? top : row_max[half];
      offset[half] = grown ? __fmul_rn(top, logit_unit_log2) : offset[half];
      threshold[half] = large(half) ? -INFINITY : row_max[half] + max_growth;
      row_sum[half] *= rescale[half];
    }
  }

  // Scores -> P in place, after `update`.
  __device__ __forceinline__ void exponentiate(float (&s)[kCount], float logit_unit_log2) const {
    float summand[2] = {-offset[0], -offset[1]};
    if (__any_sync(~0u, large(0) | large(1))) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) s[i] -= large(i / 2 % 2) ? row_max[i / 2 % 2] : 0.f;
#pragma unroll
      for (int half = 0; half < 2; ++half) summand[half] = large(half) ? 0.f : summand[half];
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      s[i] = exp2_approx(fmaf(s[i], logit_unit_log2, summand[i / 2 % 2]));
    }
  }

  // Adds P of scores kBegin to kEnd; from 0 on, in this order, whichever way P was made.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void add(const float (&s)[kCount]) {
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) {
      block_sum[i % 4] = i < 4 ? s[i] : block_sum[i % 4] + s[i];
    }
    if constexpr (kEnd == kCount) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[half] += block_sum[2 * half] + block_sum[2 * half + 1];
      }
    }
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
  __device__ bool large(int half) const { return fabsf(offset[half]) >= 1024.f; }

  // This thread's largest score of a row. Two chains, so that the next maximum need not wait for
  // the last.
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
