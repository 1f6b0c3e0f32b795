// The two CTAs that share a tile of wide heads: what one of them does in the other's shared memory.
#pragma once

#include <cstdint>

#include "cute/arch/util.hpp"

namespace fa {

// A tile's work is split by this: 0 or 1.
__device__ inline int cluster_rank() { return static_cast<int>(blockIdx.x) % 2; }

// Where `local` lies in the other CTA.
__device__ inline uint32_t peer_address(const void* local) {
  uint32_t address;
  // Volatile, so that it is found where it is used instead of kept in a register.
  asm volatile(
      "{\n"
      ".reg .u32 rank;\n"
      "mov.u32 rank, %%cluster_ctarank;\n"
      "xor.b32 rank, rank, 1;\n"
      "mapa.shared::cluster.u32 %0, %1, rank;\n"
      "}"
      : "=r"(address)
      : "r"(cute::cast_smem_ptr_to_uint(local)));
  return address;
}

// Arrives at the other CTA's barrier: what this thread has written comes before.
__device__ inline void release_to_peer(const uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];"
               :
               : "r"(peer_address(barrier))
               : "memory");
}

// The same for what wgmma has read and a wait has seen complete: a release would also wait for the
// additions to global memory.
__device__ inline void arrive_at_peer(const uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];"
               :
               : "r"(peer_address(barrier))
               : "memory");
}

// Waits for release_to_peer.
__device__ inline void wait_for_peer(const uint64_t* barrier, uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n"
      "}"
      :
      : "r"(cute::cast_smem_ptr_to_uint(barrier)), "r"(phase)
      : "memory");
}

__device__ inline void store_to_peer(int* target, int value) {
  asm volatile("st.shared::cluster.s32 [%0], %1;"
               :
               : "r"(peer_address(target)), "r"(value)
               : "memory");
}

// Shared memory of this CTA -> the same place or another in the other one, whose barrier `full`
// counts the bytes.
__device__ inline void bulk_copy_to_peer(void* target, const void* source, int bytes,
                                         uint64_t* full) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(peer_address(target)), "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes),
        "r"(peer_address(full))
      : "memory");
}

// All threads of both CTAs arrive and wait.
__device__ inline void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" : : : "memory");
}

}  // namespace fa
