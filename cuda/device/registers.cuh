// Hints to the compiler about where a value lives.
#pragma once

#include "config.h"

namespace fa {

// The value, with its origin hidden: what is derived from it is computed where it is needed, and
// not far ahead, to be kept in a register or spilled until then.
template <typename T>
__device__ T opaque(T value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The thread's lane, computed where it is needed.
__device__ inline int lane_index() { return static_cast<int>(opaque(threadIdx.x) % kWarpSize); }

// The value, equal in all lanes, made known to be so: it and what follows from it take uniform
// registers, and wgmma's descriptors need not be moved there one by one between the instructions.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// gridDim.x, read where it is used instead of kept in a register.
__device__ inline int num_ctas() {
  int count;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
  return count;
}

}  // namespace fa
