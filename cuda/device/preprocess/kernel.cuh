// What the backward needs of each query before it starts: delta = rowsum(dO * O) - dLSE, all that a
// gradient through LSE costs, and LSE in base 2; and a zeroed accumulator of dQ.
//
// A CTA has all or some of the rows of a block of queries of one head. It loads them at once, a row per
// group of lanes, and zeroes its share of the accumulator while they are on their way. Rows that see
// no key (LSE = -inf) and rows past the sequence's end get LSE = +inf, which makes their P 0, and
// delta = 0. Reads O and dO once, writes the workspace once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <type_traits>

#include "device/backward/params.h"
#include "device/registers.cuh"

namespace fa {

// The sum of the products of two vectors of eight 16-bit elements.
template <DataType kType>
__device__ float dot8(const uint4& a, const uint4& b) {
  using Pair = std::conditional_t<kType == DataType::bf16, __nv_bfloat162, __half2>;
  const auto to_float = [](const Pair& pair) {
    if constexpr (kType == DataType::bf16) {
      return __bfloat1622float2(pair);
    } else {
      return __half22float2(pair);
    }
  };
  const Pair* const pairs_a = reinterpret_cast<const Pair*>(&a);
  const Pair* const pairs_b = reinterpret_cast<const Pair*>(&b);
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 x = to_float(pairs_a[i]);
    const float2 y = to_float(pairs_b[i]);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
  }
  return sum;
}

template <typename Row>
__global__ void __launch_bounds__(kPreprocessThreads)
    preprocess_kernel(const __grid_constant__ PreprocessParams params) {
  constexpr DataType kType = Row::kConfig.dtype;
  const int block_m = params.block_m;
  const int rows = preprocess_rows(block_m, params.head_dim_v);
  const int parts = preprocess_parts(block_m, params.head_dim_v);
  const int slots = params.workspace.q_slots;
  const int block = blockIdx.x / parts;
  const int head_of_all = block / slots;
  const int batch = head_of_all / params.heads;
  const int head = head_of_all - batch * params.heads;
  const Sequences sequences = params.sequences.of(params.batch_map, batch);
  const SlotPosition slot = slot_position(sequences.cu_seqlens_q, sequences.num_sequences,
                                          sequences.total_q, block - head_of_all * slots, block_m);
  if (slot.sequence < 0) return;
  const Span queries = sequences.queries(slot.sequence);
  const int num_rows = queries.length - slot.row_begin;
  if (num_rows <= 0) return;

  const int begin = (blockIdx.x - block * parts) * rows;
  const int end = min(begin + rows, block_m);
  const int lanes = preprocess_lanes(params.head_dim_v);
  const int lane = threadIdx.x % lanes;
  const int units = params.head_dim_v / 8;
  const auto row_at = [&](int i) { return begin + (threadIdx.x + i * kPreprocessThreads) / lanes; };
  // The first row of the block of queries, and of it the lane's part.
  const int64_t first_row = queries.begin + slot.row_begin;
  const auto vectors = [&](const void* base, BackwardOperand operand) {
    const int64_t row = params.batch_map.offset(operand, batch) * sequences.total_q + first_row;
    return static_cast<const uint4*>(base) + (row * params.heads + head) * units + lane;
  };
  const auto statistic = [&](const float* base, BackwardOperand operand) {
    const int64_t of_head = params.batch_map.offset(operand, batch) * params.heads + head;
    return base + of_head * sequences.total_q + first_row;
  };
  const uint4* const out_vectors = vectors(params.out, kBackwardOut);
  const uint4* const dout_vectors = vectors(params.dout, kBackwardDout);
  const float* const lse_of_rows = statistic(params.lse, kBackwardLse);
  const float* const dlse_of_rows = statistic(params.dlse, kBackwardDlse);
  const int64_t row_vectors = params.heads * units;

  uint4 out[kPreprocessRowsPerThread] = {};
  uint4 dout[kPreprocessRowsPerThread] = {};
  float lse[kPreprocessRowsPerThread];
  float dlse[kPreprocessRowsPerThread];
#pragma unroll
  for (int i = 0; i < kPreprocessRowsPerThread; ++i) {
    const int row = row_at(i);
    lse[i] = -INFINITY;
    if (row >= min(num_rows, end)) continue;
    if (lane < units) {
      out[i] = out_vectors[row * row_vectors];
      dout[i] = dout_vectors[row * row_vectors];
    }
    lse[i] = lse_of_rows[row];
    dlse[i] = dlse_of_rows[row];
  }

  // Under the loads. The order within the block does not matter for zeros.
  float4* const dq =
      reinterpret_cast<float4*>(params.workspace.dq + int64_t{block} * block_m * params.dq_columns);
  for (int i = begin * params.dq_columns / 4 + threadIdx.x; i < end * params.dq_columns / 4;
       i += kPreprocessThreads) {
    dq[i] = float4{0.f, 0.f, 0.f, 0.f};
  }

  float* const statistics = params.workspace.statistics + int64_t{block} * (2 * block_m);
#pragma unroll
  for (int i = 0; i < kPreprocessRowsPerThread; ++i) {
    const int row = row_at(i);
    float sum = dot8<kType>(out[i], dout[i]);
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane != 0 || row >= end) continue;
    const bool counts = lse[i] != -INFINITY;
    statistics[row] = counts ? lse[i] * kLog2E : INFINITY;
    statistics[block_m + row] = counts ? sum - dlse[i] : 0.f;
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_PREPROCESS_KERNEL(dtype)                                      \
  namespace fa {                                                                  \
  struct preprocess_##dtype {                                                     \
    static constexpr PreprocessConfig kConfig{DataType::dtype};                   \
  };                                                                              \
  const void* preprocess_##dtype##_symbol() {                                     \
    return reinterpret_cast<const void*>(&preprocess_kernel<preprocess_##dtype>); \
  }                                                                               \
  }
