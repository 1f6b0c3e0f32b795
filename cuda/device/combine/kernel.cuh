// Merges the splits of the key axis:
//
//   LSE = log sum_s exp(lse_s),   O = sum_s w_s O_s,   w_s = exp(lse_s - LSE)
//
// A warp is a worker of its own: it owns 8 consecutive queries of one head. Neighbouring warps take
// neighbouring heads, so that the block reads and writes whole rows of (heads, head_dim).
//
//   1  lane l looks at query l % 8 and splits l / 8, l / 8 + 4, ...: one pass for the maximum, one for
//      the sum, two shuffles each; the weights go to shared memory (8 x num_splits per warp)
//   2  lanes spread over head_dim, 16 bytes each, kRows rows and kSplits splits at a time
//
// Splits whose weight is 0 are not read: their O may be anything. A row without any key in any split
// gets O = 0, LSE = -inf. With one split the weight is exactly 1. NaN in an lse gives NaN.
// Memory-bound: what counts is that kRows * kSplits loads of a lane are in flight.
#pragma once

#include <cmath>

#include "config.h"
#include "device/combine/params.h"
#include "device/epilogue/convert.cuh"

namespace fa {

// sum[i] += weight[s][i] * O of split s and row i. With kSkip a row whose weight is 0 is not read; without,
// all loads are issued before the first use (a condition on them makes the compiler wait for each).
template <bool kSkip, int kSplits, int kRows>
__device__ void accumulate(float4 (&sum)[kRows], const float (&weight)[kSplits][kRows],
                           const float* o_partial, int64_t split_stride, int64_t row_stride) {
  float4 vector[kSplits][kRows] = {};
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (kSkip && weight[s][i] == 0.f) continue;
      vector[s][i] =
          __ldcs(reinterpret_cast<const float4*>(o_partial + s * split_stride + i * row_stride));
    }
  }
#pragma unroll
  for (int s = 0; s < kSplits; ++s) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      sum[i].x += weight[s][i] * vector[s][i].x;
      sum[i].y += weight[s][i] * vector[s][i].y;
      sum[i].z += weight[s][i] * vector[s][i].z;
      sum[i].w += weight[s][i] * vector[s][i].w;
    }
  }
}

template <typename Row>
__global__ void __launch_bounds__(kCombineWarps* kWarpSize)
    combine_kernel(const __grid_constant__ CombineParams params) {
  constexpr CombineConfig kConfig = Row::kConfig;
  constexpr int kQueries = kCombineRowsPerWarp;
  constexpr int kVector = 4;
  // Lanes per row and rows the warp reads at once; a row wider than the warp takes several vectors.
  constexpr int kRowLanes = kConfig.head_dim / kVector < kWarpSize ? kConfig.head_dim / kVector : kWarpSize;
  constexpr int kRowVectors = kConfig.head_dim / kVector / kRowLanes;
  constexpr int kRowsAtOnce = kWarpSize / kRowLanes;
  constexpr int kRows = kQueries / kRowsAtOnce < 4 ? kQueries / kRowsAtOnce : 4;
  constexpr int kSplits = 2;

  extern __shared__ float weights_of_block[];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  float* const weights = weights_of_block + warp * kQueries * params.num_splits;

  const int task = blockIdx.x * kCombineWarps + warp;
  if (task >= params.num_tasks) return;
  int head, batch, query_block;
  params.seqlen_blocks(batch, query_block, params.heads.divmod(head, task));
  const int query_begin = query_block * kQueries;
    const int num_queries = min(kQueries, params.seqlen - query_begin);

    // Weights.
    {
      const int query = lane % kQueries;
      const float* const lse_partial = params.lse_partial +
                                       params.batch_map.offset(kLsePartial, batch) +
                                       int64_t{head} * params.seqlen + query_begin + query;
      const auto load = [&](int split) {
        return query < num_queries ? lse_partial[split * params.split_stride[kLsePartial]]
                                   : -INFINITY;
      };
      float largest = -INFINITY;
      for (int split = lane / kQueries; split < params.num_splits; split += kWarpSize / kQueries) {
        largest = fmaxf(largest, load(split));
      }
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
      const float subtract = largest == -INFINITY ? 0.f : largest;
      float sum = 0.f;
      for (int split = lane / kQueries; split < params.num_splits; split += kWarpSize / kQueries) {
        const float weight = expf(load(split) - subtract);
        weights[split * kQueries + query] = weight;
        sum += weight;
      }
      sum += __shfl_xor_sync(~0u, sum, 8);
      sum += __shfl_xor_sync(~0u, sum, 16);
      const float inverse = sum == 0.f ? 0.f : 1.f / sum;
      for (int split = lane / kQueries; split < params.num_splits; split += kWarpSize / kQueries) {
        weights[split * kQueries + query] *= inverse;
      }
      if (lane < num_queries) {
        params.lse[(int64_t{batch} * params.heads.divisor + head) * params.seqlen + query_begin +
                   query] =
            logf(sum) + subtract;
      }
      __syncwarp();
    }

    // Weighted sum.
    const int64_t row_stride = int64_t{params.heads.divisor} * params.head_dim;
    const int64_t first = int64_t{query_begin} * row_stride + int64_t{head} * params.head_dim;
    const float* const out_partial =
        params.out_partial + params.batch_map.offset(kOutPartial, batch) + first;
    const int64_t out_begin = batch * params.seqlen * row_stride + first;
#pragma unroll
    for (int part = 0; part < kRowVectors; ++part) {
      const int column = part * kRowLanes * kVector + lane % kRowLanes * kVector;
      const bool in_row = column < params.head_dim;
      for (int base = lane / kRowLanes; base < kQueries; base += kRows * kRowsAtOnce) {
        float4 sum[kRows] = {};
        // Lanes past the row's end read its beginning and drop it.
        const float* o_partial = out_partial + base * row_stride + (in_row ? column : 0);
        const int64_t split_stride = params.split_stride[kOutPartial];
        for (int split = 0; split < params.num_splits; split += kSplits) {
          const int num_splits = min(kSplits, params.num_splits - split);
          float weight[kSplits][kRows];
          bool all = num_splits == kSplits;
#pragma unroll
          for (int s = 0; s < kSplits; ++s) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              weight[s][i] =
                  s < num_splits ? weights[(split + s) * kQueries + base + i * kRowsAtOnce] : 0.f;
              all = all && weight[s][i] != 0.f;
            }
          }
          if (__all_sync(~0u, all)) {
            accumulate<false>(sum, weight, o_partial, split_stride, kRowsAtOnce * row_stride);
          } else {
            accumulate<true>(sum, weight, o_partial, split_stride, kRowsAtOnce * row_stride);
          }
          o_partial += kSplits * split_stride;
        }
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int query = base + i * kRowsAtOnce;
          if (!in_row || query >= num_queries) continue;
          const int64_t at = out_begin + query * row_stride + column;
          if constexpr (kConfig.out_dtype == DataType::f32) {
            __stcs(reinterpret_cast<float4*>(static_cast<float*>(params.out) + at), sum[i]);
          } else {
            __stcs(reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + at),
                   uint2{pack<kConfig.out_dtype>(sum[i].x, sum[i].y),
                         pack<kConfig.out_dtype>(sum[i].z, sum[i].w)});
          }
        }
      }
    }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_COMBINE_KERNEL(dtype, head_dim)                                 \
  namespace fa {                                                                    \
  struct combine_##dtype##_##head_dim {                                             \
    static constexpr CombineConfig kConfig{DataType::dtype, head_dim};              \
  };                                                                                \
  const void* combine_##dtype##_##head_dim##_symbol() {                             \
    return reinterpret_cast<const void*>(&combine_kernel<combine_##dtype##_##head_dim>); \
  }                                                                                 \
  }
