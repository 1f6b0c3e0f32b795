// Where O and LSE lie in global memory. Shared by every kernel that ends in the epilogue.
#pragma once

#include <cstdint>

#include "cutlass/fast_math.h"

namespace fa {

struct OutputParams {
  void* o;     // (batch, query, head, head_dim), head_dim contiguous
  float* lse;  // (batch, head, query), query contiguous
  // Strides in elements.
  int64_t o_batch_stride, o_query_stride, o_head_stride;
  int64_t lse_batch_stride, lse_head_stride;
  // G: row r of a packed tile is query r / G of head h * G + r % G.
  cutlass::FastDivmod qhead_per_khead;
  int head_dim;  // columns at or past it are never written
};

}  // namespace fa
