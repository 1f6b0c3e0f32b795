// The warp that sends each block's dS to the other CTA of the cluster.
//
//   ds_full        one lane of each consumer warp arrives; this warp waits; dS is in shared memory
//   peer_ds_full   this warp arrives, 1, with the bytes that the other CTA sends; the consumers
//                  wait; the other CTA's dS is in peer_ds
//   ds_taken       one lane of each consumer warp of the other CTA arrives; the consumers wait; it
//                  has multiplied this CTA's dS, which may be overwritten, here and there
#pragma once

#include "device/backward/cluster.cuh"
#include "device/backward/traits.cuh"

namespace fa {

template <BackwardConfig kConfig>
class DsExchange {
  using Smem = typename BackwardTraits<kConfig>::Smem;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;

 public:
  __device__ DsExchange(const BackwardParams& params, Smem& smem)
      : params_(params), smem_(smem), issues_(cute::elect_one_sync()) {}

  __device__ void run() {
    BackwardTileSlots::Ring slot;
    uint32_t phase = 0;
    while (true) {
      const BackwardTile& tile = smem_.tiles.take(slot);
      if (!tile.more) return;
      const int blocks = uniform(tile.blocks.end - tile.blocks.begin) * params_.qhead_per_khead;
      FA_NO_UNROLL
      for (int block = 0; block < blocks; ++block) {
        // Then the consumers have passed the last block's peer_ds_full and ds_taken.
        Barrier::wait(&smem_.ds_full, phase);
        if (issues_) {
          Barrier::arrive_and_expect_tx(&smem_.peer_ds_full, sizeof(smem_.ds));
          bulk_copy_to_peer(smem_.peer_ds, smem_.ds, sizeof(smem_.ds), &smem_.peer_ds_full);
        }
        phase ^= 1;
      }
      smem_.tiles.release(slot, threadIdx.x);
    }
  }

 private:
  const BackwardParams& params_;
  Smem& smem_;
  const bool issues_;
};

}  // namespace fa
