// Issues one warpgroup's GEMM on the tensor cores without waiting for it.
#pragma once

#include "cute/arch/mma_sm90_gmma.hpp"
#include "cute/tensor.hpp"
#include "device/wgmma_ss.cuh"

namespace fa {

// Both issue one group of wgmma's. Neither the registers of an operand nor c may be touched until
// cute::warpgroup_wait<> says that the group is complete, and then fence_registers(c).

// Keeps the compiler from moving what reads or writes c across this point.
template <int kCount>
__device__ void fence_registers(float (&c)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(c[i]);
}

// c = a * b^T over the descriptors' last mode, both in shared memory, K-major or with a transpose
// MN-major, c 64 x 2 kCount; or += .
template <DataType kType, bool kTransposeA = false, bool kTransposeB = false,
          bool kAccumulate = false, typename A, typename B, int kCount>
__device__ void issue_gemm_ss(const A& a, const B& b, float (&c)[kCount]) {
  fence_registers(c);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < cute::size<2>(a); ++k) {
    WgmmaSs<kType, 2 * kCount>::template issue<kTransposeA, kTransposeB>(c, a(0, 0, k), b(0, 0, k),
                                                                         kAccumulate || k > 0);
  }
  cute::warpgroup_commit_batch();
  fence_registers(c);
}

// c += a * b over the fragments' last mode, a in registers.
template <typename TiledMma, typename A, typename B, typename C>
__device__ void issue_gemm_rs(const A& a, const B& b, C& c) {
  TiledMma mma;
  cute::warpgroup_fence_operand(c);
  cute::warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < cute::size<2>(a); ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), c);
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(c);
}

}  // namespace fa
