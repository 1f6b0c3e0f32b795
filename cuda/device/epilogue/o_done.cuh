// "O done": the hand-over of the shared memory that O borrows (V's, in the fused forward) back to
// the producers that will load into it. What a destination gets is one of the two structs below.
//
// The barrier of ODone is an mbarrier per CTA. Arrivals: cluster size x (1 thread on the TMA path,
// all epilogue threads otherwise). The producer waits before its next load into that memory, and
// once more before it exits, so that a peer never signals a finished CTA.
#pragma once

#include "cutlass/arch/barrier.h"

namespace fa {

template <int kClusterSize>
struct ODone {
  using Barrier = cutlass::arch::ClusterBarrier;

  Barrier& barrier;

  // What the barrier expects when so many threads of each CTA of the cluster signal.
  static constexpr uint32_t arrivals(int num_signalling_threads) {
    return static_cast<uint32_t>(kClusterSize * num_signalling_threads);
  }

  // The calling thread has finished with the memory in every CTA of the cluster that reads it.
  __device__ void signal() const {
    if constexpr (kClusterSize == 1) {
      barrier.arrive();
    } else {
#pragma unroll
      for (uint32_t cta = 0; cta < kClusterSize; ++cta) barrier.arrive(cta);
    }
  }
};

// For a CTA that stores one tile and ends: nobody waits for the memory.
struct NoHandOver {
  __device__ void signal() const {}
};

}  // namespace fa
