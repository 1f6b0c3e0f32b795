// The leading batch axes of a call, where each operand has the full size or size 1 (stride 0): this
// is how vmap over any subset of operands becomes one launch without a copy.
#pragma once

#include <cstdint>

#include "index_maps.h"

namespace fa {

template <int kNumOperands>
struct BatchMap {
  static constexpr int kMaxAxes = 8;  // after merging neighbours that broadcast alike

  int num_axes = 0;
  int size[kMaxAxes] = {};                      // outermost first
  int64_t stride[kNumOperands][kMaxAxes] = {};  // in units the operand's user defines

  // Offset of `operand` for linear batch index `batch`.
  FA_HOST_DEVICE int64_t offset(int operand, int batch) const {
    int64_t offset = 0;
    FA_NO_UNROLL
    for (int axis = num_axes - 1; axis > 0; --axis) {
      offset += batch % size[axis] * stride[operand][axis];
      batch /= size[axis];
    }
    return num_axes == 0 ? 0 : offset + batch * stride[operand][0];
  }

  // Offsets of the first kCount operands at once, for units that need no more than 31 bits.
  template <int kCount>
  FA_HOST_DEVICE void offsets(int batch, int (&offset)[kCount]) const {
    static_assert(kCount <= kNumOperands);
    // Summed up in registers: `offset` may be shared memory that several threads write alike.
    int sum[kCount] = {};
    FA_NO_UNROLL
    for (int axis = num_axes - 1; axis >= 0; --axis) {
      const int rest = batch / size[axis];
      const int index = batch - rest * size[axis];
      for (int operand = 0; operand < kCount; ++operand) {
        sum[operand] += index * static_cast<int>(stride[operand][axis]);
      }
      batch = rest;
    }
    for (int operand = 0; operand < kCount; ++operand) offset[operand] = sum[operand];
  }
};

}  // namespace fa
