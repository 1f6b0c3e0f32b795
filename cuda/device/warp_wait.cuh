// Waits of a whole warp for a barrier.
#pragma once

#include "config.h"
#include "cutlass/arch/barrier.h"

namespace fa {

// One lane polls, the others wait for it: 32 polling lanes would take issue slots from the warps
// that compute.
__device__ inline void warp_wait(const uint64_t* barrier, uint32_t phase) {
  if (threadIdx.x % kWarpSize == 0) cutlass::arch::ClusterBarrier::wait(barrier, phase);
  __syncwarp();
}

}  // namespace fa
