// The tail cleaner: a warp that zeroes V past the end of a sequence, since there it may hold
// anything, and 0 * NaN is NaN. It stands between producer and consumers for the block in which a
// sequence ends, the first one of a tile, while the consumers are busy with Q K^T and softmax.
//
//   producer: TMA -> v_tail     cleaner: wait v_tail | zero | arrive at v_full     consumers: v_full
#pragma once

#include "cutlass/arch/barrier.h"
#include "device/forward/tile_scheduler.cuh"
#include "device/forward/traits.cuh"

namespace fa {

// Zeroes keys `begin` ... of a stage of V.
template <ForwardConfig kConfig>
__device__ void zero_tail(char* stage, int begin) {
  using Traits = ForwardTraits<kConfig>;
  constexpr int kRowBytes = Traits::kPanelColumnsV * 2;
  constexpr int kPanelBytes = Traits::kBlockN * kRowBytes;
  constexpr int kPanels = Traits::kHeadDimV / Traits::kPanelColumnsV;
  // The swizzle stays within a row.
  for (int panel = 0; panel < kPanelBytes * kPanels; panel += kPanelBytes) {
    for (int byte = begin * kRowBytes + threadIdx.x % kWarpSize * 16; byte < kPanelBytes;
         byte += kWarpSize * 16) {
      *reinterpret_cast<uint4*>(stage + panel + byte) = uint4{0, 0, 0, 0};
    }
  }
}

template <ForwardConfig kConfig>
__device__ void run_tail_cleaner(typename ForwardTraits<kConfig>::Smem& smem) {
  using Traits = ForwardTraits<kConfig>;
  uint32_t tiles = 0;
  int stage = 0;        // of the tile's first block
  uint32_t phases = 0;  // of the slots' barriers, a bit each
  while (true) {
    const ForwardTile& tile = smem.tiles.get(tiles);
    if (tile.none()) return;
    if (!tile.empty()) {
      if (tile.tail_begin > 0) {
        const uint32_t slot = tiles % kForwardTileSlots;
        cutlass::arch::ClusterTransactionBarrier::wait(&smem.v_tail[slot], phases >> slot & 1);
        phases ^= 1u << slot;
        zero_tail<kConfig>(reinterpret_cast<char*>(smem.v[stage]), tile.tail_begin);
        cutlass::arch::fence_view_async_shared();
        __syncwarp();
        if (lane_index() == 0) {
          cutlass::arch::ClusterBarrier::arrive(&smem.v_full[stage]);
        }
      }
      stage = (stage + tile.blocks.end - tile.blocks.begin) % Traits::kStages;
    }
    smem.tiles.release(tiles);
  }
}

}  // namespace fa
