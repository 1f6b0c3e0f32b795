// Merges the splits of the key axis:
//
//   LSE = log sum_s exp(lse_s),   O = sum_s w_s O_s,   w_s = exp(lse_s - LSE)
//
// A warp is a worker of its own: it owns kQueries consecutive queries of one head: 4, or where
// there are few queries in all, as in decode, as many as its lanes hold at once. Neighbouring warps
// take neighbouring heads, so that the block reads and writes whole rows of (heads, head_dim).
//
//   1  lane l looks at query l % kQueries and every 8th split from l / kQueries on:
//      one pass over global memory for the maximum, one over shared memory for weights and sum
//   2  lanes spread over head_dim, 16 bytes each, so that the warp holds all its rows at once;
//      while one split is added up, the loads of the next one are in flight, or with few queries
//      those of 8 splits together
//
//   smem, per warp   | weight of (split, query), exp(lse - max) | 1 / sum per query |
//
// Splits whose weight is 0 are not read: their O may be anything. A row without any key in any
// split gets O = 0, LSE = -inf. With one split the weight is exactly 1. NaN in an lse gives NaN.
// Memory-bound; no streaming hints, which cost 1 %.
#pragma once

#include <cmath>

#include "config.h"
#include "device/combine/params.h"
#include "device/epilogue/convert.cuh"

namespace fa {

// One split's 16 bytes of each of the lane's rows; zeros, and no load, where the weight is 0.
template <int kRows>
__device__ void load_split(float4 (&vector)[kRows], const float* weight, const float* o_partial,
                           int64_t row_stride) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    vector[i] = float4{0.f, 0.f, 0.f, 0.f};
    if (weight[i] != 0.f) {
      vector[i] = *reinterpret_cast<const float4*>(o_partial + i * row_stride);
    }
  }
}

// Adds one split's 16 bytes of each of the lane's rows.
template <int kRows>
__device__ void add_split(float4 (&sum)[kRows], const float* weight,
                          const float4 (&vector)[kRows]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    sum[i].x += weight[i] * vector[i].x;
    sum[i].y += weight[i] * vector[i].y;
    sum[i].z += weight[i] * vector[i].z;
    sum[i].w += weight[i] * vector[i].w;
  }
}

// Task `task`: kQueries consecutive queries of one head. Executed by one warp.
template <CombineConfig kConfig, int kQueries>
__device__ void combine_queries(const CombineParams& params, int task, float* weights) {
  constexpr int kVector = 4;
  // Lanes per row, parts of a row wider than the warp, and rows per lane.
  constexpr int kRowLanes =
      kConfig.head_dim / kVector < kWarpSize ? kConfig.head_dim / kVector : kWarpSize;
  constexpr int kParts = kConfig.head_dim / kVector / kRowLanes;
  constexpr int kRows = kQueries * kRowLanes / kWarpSize;
  // As many for any kQueries, so that a row's bits do not depend on how many there are.
  constexpr int kSplitLanes = kWarpSize / kCombineRowsPerWarp;
  // Splits whose loads are in flight together, as far as registers go.
  constexpr int kSplitsAtOnce = kRows == 1 ? 8 : 1;

  const int lane = threadIdx.x % kWarpSize;
  float* const inverse_sums = weights + kQueries * params.num_splits;
  int head, batch, query_block;
  params.seqlen_blocks(batch, query_block, params.heads.divmod(head, task));
  const int query_begin = query_block * kQueries;
  const int num_queries = min(kQueries, params.seqlen - query_begin);

  // Weights; 0 for queries past the end.
  {
    const int query = lane % kQueries;
    const int split_lane = lane < kQueries * kSplitLanes ? lane / kQueries : params.num_splits;
    const float* const lse_partial = params.lse_partial +
                                     params.batch_map.offset(kLsePartial, batch) +
                                     int64_t{head} * params.seqlen + query_begin + query;
    float largest = -INFINITY;
#pragma unroll 4
    for (int split = split_lane; split < params.num_splits; split += kSplitLanes) {
      const float lse =
          query < num_queries ? lse_partial[split * params.split_stride[kLsePartial]] : -INFINITY;
      weights[split * kQueries + query] = lse;
      largest = fmaxf(largest, lse);
    }
#pragma unroll
    for (int step = kQueries; step < kQueries * kSplitLanes; step *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const float subtract = largest == -INFINITY ? 0.f : largest;
    float sum = 0.f;
    for (int split = split_lane; split < params.num_splits; split += kSplitLanes) {
      const float weight = expf(weights[split * kQueries + query] - subtract);
      weights[split * kQueries + query] = weight;
      sum += weight;
    }
#pragma unroll
    for (int step = kQueries; step < kQueries * kSplitLanes; step *= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
    }
    if (lane < kQueries) inverse_sums[query] = sum == 0.f ? 0.f : 1.f / sum;
    if (lane < num_queries) {
      params.lse[(int64_t{batch} * params.heads.divisor + head) * params.seqlen + query_begin +
                 query] = logf(sum) + subtract;
    }
    __syncwarp();
  }

  // Weighted sum.
  const int first_row = lane / kRowLanes * kRows;
  const int64_t row_stride = int64_t{params.heads.divisor} * params.head_dim;
  const int64_t first =
      int64_t{query_begin + first_row} * row_stride + int64_t{head} * params.head_dim;
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int column = (part * kRowLanes + lane % kRowLanes) * kVector;
    if (column >= params.head_dim) continue;
    const float* o_partial =
        params.out_partial + params.batch_map.offset(kOutPartial, batch) + first + column;
    const float* weight = weights + first_row;
    float4 sum[kRows] = {};
    if constexpr (kSplitsAtOnce > 1) {
      for (int split = 0; split < params.num_splits; split += kSplitsAtOnce) {
        const int count = min(kSplitsAtOnce, params.num_splits - split);
        float4 vector[kSplitsAtOnce][kRows] = {};
#pragma unroll
        for (int i = 0; i < kSplitsAtOnce; ++i) {
          if (i < count) {
            load_split(vector[i], weight + i * kQueries,
                       o_partial + i * params.split_stride[kOutPartial], row_stride);
          }
        }
#pragma unroll
        for (int i = 0; i < kSplitsAtOnce; ++i) {
          if (i < count) add_split(sum, weight + i * kQueries, vector[i]);
        }
        weight += kSplitsAtOnce * kQueries;
        o_partial += kSplitsAtOnce * params.split_stride[kOutPartial];
      }
    } else {
      float4 next[kRows];
      load_split(next, weight, o_partial, row_stride);
      for (int split = 0; split < params.num_splits; ++split) {
        float4 vector[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) vector[i] = next[i];
        if (split + 1 < params.num_splits) {
          o_partial += params.split_stride[kOutPartial];
          load_split(next, weight + kQueries, o_partial, row_stride);
        }
        add_split(sum, weight, vector);
        weight += kQueries;
      }
    }
    const int64_t at = int64_t{batch} * params.seqlen * row_stride + first + column;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (first_row + i >= num_queries) break;
      const float inverse = inverse_sums[first_row + i];
      const float4 o{sum[i].x * inverse, sum[i].y * inverse, sum[i].z * inverse,
                     sum[i].w * inverse};
      if constexpr (kConfig.out_dtype == DataType::f32) {
        *reinterpret_cast<float4*>(static_cast<float*>(params.out) + at + i * row_stride) = o;
      } else {
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(params.out) + at + i * row_stride) =
            uint2{pack<kConfig.out_dtype>(o.x, o.y), pack<kConfig.out_dtype>(o.z, o.w)};
      }
    }
  }
}

template <typename Row>
__global__ void __launch_bounds__(kCombineWarps* kWarpSize, kCombineBlocksPerSm)
    combine_kernel(const __grid_constant__ CombineParams params) {
  constexpr CombineConfig kConfig = Row::kConfig;
  constexpr int kFewQueries = combine_few_queries(kConfig.head_dim);
  extern __shared__ __align__(16) float smem[];
  const int warp = threadIdx.x / kWarpSize;
  const int task = blockIdx.x * kCombineWarps + warp;
  if (task >= params.num_tasks) return;
  float* const weights = smem + warp * kCombineRowsPerWarp * (params.num_splits + 1);
  // The kernel may start under the one that writes the partial results. Nothing is read before this
  // line, and nothing with __ldg, which need not stay behind it.
  cudaGridDependencySynchronize();
  if (kFewQueries < kCombineRowsPerWarp && params.queries_per_warp == kFewQueries) {
    combine_queries<kConfig, kFewQueries>(params, task, weights);
  } else {
    combine_queries<kConfig, kCombineRowsPerWarp>(params, task, weights);
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_COMBINE_KERNEL(dtype, head_dim)                                      \
  namespace fa {                                                                         \
  struct combine_##dtype##_##head_dim {                                                  \
    static constexpr CombineConfig kConfig{DataType::dtype, head_dim};                   \
  };                                                                                     \
  const void* combine_##dtype##_##head_dim##_symbol() {                                  \
    return reinterpret_cast<const void*>(&combine_kernel<combine_##dtype##_##head_dim>); \
  }                                                                                      \
  }
