// fp32 to the 16-bit output elements, two at a time, round to nearest even.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "config.h"

namespace fa {

template <DataType kType>
__device__ uint32_t pack(float low, float high) {
  static_assert(size_bytes(kType) == 2);
  if constexpr (kType == DataType::bf16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace fa
