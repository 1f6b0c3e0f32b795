// Kernel parameters of the combine.
#pragma once

#include <cstdint>

#include "cutlass/fast_math.h"
#include "device/batch_map.h"

namespace fa {

enum CombineOperand { kOutPartial, kLsePartial, kNumCombineOperands };

struct CombineParams {
  const float* out_partial;                 // per batch index and split (seqlen, heads, head_dim)
  const float* lse_partial;                 // per batch index and split (heads, seqlen)
  void* out;                                // (batch, seqlen, heads, head_dim)
  float* lse;                               // (batch, heads, seqlen)
  BatchMap<kNumCombineOperands> batch_map;  // strides in elements of the operand
  int64_t split_stride[kNumCombineOperands];
  int queries_per_warp;
  int num_tasks;
  cutlass::FastDivmod seqlen_blocks;  // ceil(seqlen / queries_per_warp)
  cutlass::FastDivmod heads;
  int seqlen;
  int head_dim;
  int num_splits;
};

}  // namespace fa
