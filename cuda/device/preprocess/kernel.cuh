// What the backward needs of each query before it starts: delta = rowsum(dO * O) - dLSE, all that a
// gradient through LSE costs, and LSE in base 2; and a zeroed accumulator of dQ.
//
// One CTA per block of queries of one head, one row at a time per group of lanes. Rows that see no
// key (LSE = -inf) and rows past the sequence's end get LSE = +inf, which makes their P 0, and
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
  const int slots = params.workspace.q_slots;
  const int64_t workspace_block = blockIdx.x;
  const int head_of_all = blockIdx.x / slots;
  const int batch = head_of_all / params.heads;
  const int head = head_of_all - batch * params.heads;
  const Sequences sequences = params.sequences.of(params.batch_map, batch);
  const SlotPosition slot =
      slot_position(sequences.cu_seqlens_q, sequences.num_sequences, sequences.total_q,
                    blockIdx.x - head_of_all * slots, params.block_m);
  if (slot.sequence < 0) return;
  const Span queries = sequences.queries(slot.sequence);
  const int num_rows = queries.length - slot.row_begin;
  if (num_rows <= 0) return;

  float4* const dq =
      reinterpret_cast<float4*>(params.workspace.dq + workspace_block * params.dq_block_elements);
  for (int i = threadIdx.x; i < params.dq_block_elements / 4; i += kPreprocessThreads) {
    dq[i] = float4{0.f, 0.f, 0.f, 0.f};
  }

  const int64_t rows_per_batch = sequences.total_q;
  const int64_t first_row = queries.begin + slot.row_begin;
  const auto row_of = [&](BackwardOperand operand, int row) {
    return (params.batch_map.offset(operand, batch) * rows_per_batch + first_row + row) *
               params.heads +
           head;
  };
  const auto lse_of = [&](const float* base, BackwardOperand operand, int row) {
    return base[(params.batch_map.offset(operand, batch) * params.heads + head) * rows_per_batch +
                first_row + row];
  };
  float* const statistics = params.workspace.statistics + workspace_block * (2 * params.block_m);
  const int units = params.head_dim_v / 8;
  const int lanes = units <= 8 ? 8 : units <= 16 ? 16 : 32;  // per row
  const int lane = threadIdx.x % lanes;
  for (int row = threadIdx.x / lanes; row < params.block_m; row += kPreprocessThreads / lanes) {
    float sum = 0.f;
    float lse = INFINITY;
    float delta = 0.f;
    if (row < num_rows) {
      lse = lse_of(params.lse, kBackwardLse, row);
      if (lane < units) {
        const uint4 out =
            reinterpret_cast<const uint4*>(params.out)[row_of(kBackwardOut, row) * units + lane];
        const uint4 dout =
            reinterpret_cast<const uint4*>(params.dout)[row_of(kBackwardDout, row) * units + lane];
        sum = dot8<kType>(out, dout);
      }
    }
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane != 0) continue;
    if (lse == -INFINITY || row >= num_rows) {
      lse = INFINITY;
    } else {
      lse *= kLog2E;
      delta = sum - lse_of(params.dlse, kBackwardDlse, row);
    }
    statistics[row] = lse;
    statistics[params.block_m + row] = delta;
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
