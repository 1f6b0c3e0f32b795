// The producer: one warp that keeps the rings of K and V full and loads Q tile by tile. All its
// lanes walk the loop, so that its state fits into uniform registers, and one of them issues.
//
//   per tile, key blocks from the last to the first:   K  Q  K' V  K'' V'  ...  V''
//
// K runs one block ahead of V, as the consumers issue Q K'^T before P V. K and Q of the next tile
// are on their way while the consumers still finish this one; the first V waits for O done, since O
// lies on V. K and V are read again by other tiles and stay in L2 (evict last); Q is read once
// (evict first).
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "device/forward/tile_scheduler.cuh"
#include "device/forward/traits.cuh"

namespace fa {

template <ForwardConfig kConfig>
class ForwardProducer {
  using Traits = ForwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Ring = typename Traits::Ring;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Hint = cute::TMA::CacheHintSm90;

 public:
  __device__ ForwardProducer(const ForwardParams& params, Smem& smem)
      : params_(params), smem_(smem), issues_(cute::elect_one_sync()) {}

  __device__ void run() {
    Ring ring;  // the next block of K; V is one block behind
    uint32_t slot_phase = 0;
    uint32_t tile_phase = 0;
    for (int index = blockIdx.x, next = 0; index < params_.num_tiles; index = uniform(next)) {
      smem_.tile.put(index, tile_phase, slot_phase, issues_);
      // Asked for early: the answer takes a while.
      if (threadIdx.x % kWarpSize == 0) next = next_tile(params_, index);
      auto tile = forward_tile<Traits::kBlockM, Traits::kBlockN>(params_, index);
      tile.blocks = uniform(tile.blocks);
      if (tile.blocks.empty()) continue;
      int batch[3];  // of q, k, v
      params_.batch_map.offsets(tile.batch, batch);
      // One round more than there are blocks: V follows K by one.
      FA_NO_UNROLL
      for (int block = tile.blocks.end - 1; block >= tile.blocks.begin - 1; --block) {
        const Ring v_ring = ring.previous();
        if (block >= tile.blocks.begin) {
          load_block<Traits::kPanelColumns>(params_.k_tensor_map, smem_.k[ring.stage], smem_.k_full,
                                            smem_.k_empty, ring, block, tile.head_kv, batch[kK]);
          ring.advance();
        }
        if (block == tile.blocks.end - 1) {
          EmptyBarrier::wait(&smem_.q_empty, tile_phase ^ 1);
          load_q(tile, batch[kQ]);
          continue;
        }
        if (block == tile.blocks.end - 2) smem_.o_done.wait(tile_phase ^ 1);
        load_block<Traits::kPanelColumnsV>(params_.v_tensor_map, smem_.v[v_ring.stage],
                                           smem_.v_full, smem_.v_empty, v_ring, block + 1,
                                           tile.head_kv, batch[kV]);
      }
      tile_phase ^= 1;
    }
    smem_.tile.put(TileSlot::kNoMore, 0, slot_phase, issues_);
    // The last tile's O has left shared memory: nothing is on its way to this CTA when it ends.
    smem_.o_done.wait(tile_phase ^ 1);
  }

 private:
  __device__ void load_q(const ForwardTile& tile, int batch) {
    constexpr int kPanelElements = Traits::kBlockM * Traits::kPanelColumns;
    // Packed, a row of the tile is one head of the group; the box takes the whole group.
    const int query = params_.output.qhead_per_khead.div(tile.row_begin);
    if (!issues_) return;
    FullBarrier::arrive_and_expect_tx(&smem_.q_full, sizeof(smem_.q));
#pragma unroll
    for (int panel = 0; panel < Traits::kHeadDim / Traits::kPanelColumns; ++panel) {
      cute::SM90_TMA_LOAD_5D::copy(&params_.q_tensor_map, &smem_.q_full,
                                   static_cast<uint64_t>(Hint::EVICT_FIRST),
                                   smem_.q + panel * kPanelElements, panel * Traits::kPanelColumns,
                                   tile.group, query, tile.head_kv, batch);
    }
  }

  template <int kPanelColumns, typename Element, int kElements>
  __device__ void load_block(const CUtensorMap& tensor_map, Element (&stage)[kElements],
                             uint64_t* full, uint64_t* empty, const Ring& ring, int block,
                             int head_kv, int batch) {
    constexpr int kPanelElements = Traits::kBlockN * kPanelColumns;
    EmptyBarrier::wait(&empty[ring.stage], ring.phase ^ 1);
    if (!issues_) return;
    FullBarrier::arrive_and_expect_tx(&full[ring.stage], sizeof(stage));
#pragma unroll
    for (int panel = 0; panel < kElements / kPanelElements; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(&tensor_map, &full[ring.stage],
                                   static_cast<uint64_t>(Hint::EVICT_LAST),
                                   stage + panel * kPanelElements, panel * kPanelColumns,
                                   block * Traits::kBlockN, head_kv, batch);
    }
  }

  const ForwardParams& params_;
  Smem& smem_;
  const bool issues_;
};

}  // namespace fa
