// The adder of dQ: one warp that adds the consumers' blocks of dQ to the accumulator in global
// memory, by bulk reductions from shared memory, a warpgroup's part at a time. With wide heads the
// consumers add themselves (register_dq_adder.cuh).
//
// With `turns` the tiles of a head add to a block one after the other: see dq_turn.cuh.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "device/backward/dq_turn.cuh"
#include "device/backward/traits.cuh"

namespace fa {

__device__ inline void bulk_add(float* target, const float* source, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               :
               : "l"(target), "r"(cute::cast_smem_ptr_to_uint(source)), "r"(bytes)
               : "memory");
}

template <BackwardConfig kConfig>
class DqAdder {
  using Traits = BackwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Barrier = cutlass::arch::ClusterBarrier;
  static constexpr int kBlockElements = Traits::kBlockM * Traits::kHeadDim;
  static constexpr int kPartElements = kBlockElements / Traits::kWarpgroups;

 public:
  __device__ DqAdder(const BackwardParams& params, Smem& smem)
      : params_(params), smem_(smem), issues_(cute::elect_one_sync()) {}

  __device__ void run() {
    BackwardTileSlots::Ring slot;
    uint32_t phase = 0;
    while (true) {
      const BackwardTile& tile = smem_.tiles.take(slot);
      if (!tile.more) return;
      FA_NO_UNROLL
      for (int group = 0; group < params_.qhead_per_khead; ++group) {
        const int begin = uniform(tile.blocks.begin);
        const int end = uniform(tile.blocks.end);
        int64_t target =
            tile.query_block + static_cast<int64_t>(group) * params_.workspace.q_slots + begin;
        FA_NO_UNROLL
        for (int block = begin; block < end; ++block, ++target) {
          if (params_.turns != nullptr) wait_for_turn(tile, block, target);
          add(params_.workspace.dq + target * kBlockElements, phase);
          if (params_.turns != nullptr) pass_turn(target);
          phase ^= 1;
        }
      }
      smem_.tiles.release(slot, threadIdx.x);
    }
  }

 private:
  __device__ void add(float* target, uint32_t phase) {
#pragma unroll
    for (int part = 0; part < Traits::kWarpgroups; ++part) {
      Barrier::wait(&smem_.dq_full[part], phase);
      if (issues_) {
        bulk_add(target + part * kPartElements, smem_.dq[part], kPartElements * 4);
        cute::tma_store_arrive();
      }
    }
    if (issues_) {
      cute::tma_store_wait<1>();
      Barrier::arrive(&smem_.dq_empty[0]);
      cute::tma_store_wait<0>();
      Barrier::arrive(&smem_.dq_empty[1]);
    }
    static_assert(Traits::kWarpgroups == 2);
  }

  // All lanes poll, and the warp stays together: with one lane polling, apart from the others, the
  // kernel did not always end.
  __device__ void wait_for_turn(const BackwardTile& tile, int block, int64_t workspace_block) {
    const int before = tiles_before(tile, block, Traits::kBlockM, Traits::kBlockN);
    while (load_acquire(params_.turns + workspace_block) != before) {
    }
    // The additions of this tile, by the asynchronous proxy, come after the turn's.
    asm volatile("fence.proxy.async.global;" ::: "memory");
  }

  // Complete, not merely read: the next tile's additions must find this one's.
  __device__ void pass_turn(int64_t workspace_block) {
    if (!issues_) return;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    increment_release(params_.turns + workspace_block);
  }

  const BackwardParams& params_;
  Smem& smem_;
  const bool issues_;
};

}  // namespace fa
