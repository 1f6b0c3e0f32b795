// The producer: one warp that keeps the rings of K and V full and loads Q tile by tile. All its
// lanes walk the loop, so that its state fits into uniform registers, and one of them issues.
//
//   per tile, key blocks from the last to the first:   K  Q  K' V  K'' V'  ...  V''
//
// K runs one block ahead of V, as the consumers issue Q K'^T before P V. What the next tile needs
// first is on its way while the consumers still finish this one. K and V that other tiles read again
// stay in L2 (evict last); Q is read once (evict first).
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
  using QRing = typename Traits::QRing;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Hint = cute::TMA::CacheHintSm90;

 public:
  __device__ ForwardProducer(const ForwardParams& params, Smem& smem)
      : params_(params), smem_(smem), issues_(cute::elect_one_sync()) {}

  __device__ void run() {
    Ring ring;  // the next block of K; V is one block behind
    QRing q_ring;
    uint32_t tiles = 0;
    while (true) {
      const ForwardTile& tile = smem_.tiles.get(tiles);
      if (tile.none()) break;
      const int begin = uniform(tile.blocks.begin);
      const int end = uniform(tile.blocks.end);
      if (begin < end) {
        // One round more than there are blocks: V follows K by one.
        FA_NO_UNROLL
        for (int block = end - 1; block >= begin - 1; --block) {
          const Ring v_ring = ring.previous();
          if (block >= begin) {
            load_block<Traits::kPanelColumns>(params_.k_tensor_map, smem_.k[ring.stage],
                                              &smem_.k_full[ring.stage], smem_.k_empty, ring, tile,
                                              block, kK);
            ring.advance();
          }
          if (block == end - 1) {
            load_q(tile, q_ring);
            q_ring.advance();
            continue;
          }
          const bool last = block == end - 2;
          uint64_t* const full = last && tile.tail_begin > 0
                                     ? &smem_.v_tail[tiles % kForwardTileSlots]
                                     : &smem_.v_full[v_ring.stage];
          load_block<Traits::kPanelColumnsV>(params_.v_tensor_map, smem_.v[v_ring.stage], full,
                                             smem_.v_empty, v_ring, tile, block + 1, kV);
        }
      }
      smem_.tiles.release(tiles);
    }
  }

 private:
  // With packed heads a row of the tile is one head of the group, and the box takes whole groups:
  // rows that hold none keep what they had, and nothing comes of them.
  __device__ void load_q(const ForwardTile& tile, const QRing& ring) {
    constexpr int kPanelElements = Traits::kBlockM * Traits::kPanelColumns;
    EmptyBarrier::wait(&smem_.q_empty[ring.stage], ring.phase ^ 1);
    if (!issues_) return;
    uint64_t* const full = &smem_.q_full[ring.stage];
    FullBarrier::arrive_and_expect_tx(
        full, params_.rows_per_tile * Traits::kHeadDim * sizeof(smem_.q[0][0]));
#pragma unroll
    for (int panel = 0; panel < Traits::kHeadDim / Traits::kPanelColumns; ++panel) {
      cute::SM90_TMA_LOAD_5D::copy(
          &params_.q_tensor_map, full, static_cast<uint64_t>(Hint::EVICT_FIRST),
          smem_.q[ring.stage] + panel * kPanelElements, panel * Traits::kPanelColumns, tile.group,
          tile.query, tile.head_kv, tile.batch[kQ]);
    }
  }

  template <int kPanelColumns, typename Element, int kElements>
  __device__ void load_block(const CUtensorMap& tensor_map, Element (&stage)[kElements],
                             uint64_t* full, uint64_t* empty, const Ring& ring,
                             const ForwardTile& tile, int block, ForwardOperand operand) {
    constexpr int kPanelElements = Traits::kBlockN * kPanelColumns;
    EmptyBarrier::wait(&empty[ring.stage], ring.phase ^ 1);
    if (!issues_) return;
    FullBarrier::arrive_and_expect_tx(full, sizeof(stage));
    const auto hint = params_.keys_read_once ? Hint::EVICT_FIRST : Hint::EVICT_LAST;
#pragma unroll
    for (int panel = 0; panel < kElements / kPanelElements; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(&tensor_map, full, static_cast<uint64_t>(hint),
                                   stage + panel * kPanelElements, panel * kPanelColumns,
                                   tile.segment.key_begin + block * Traits::kBlockN, tile.head_kv,
                                   tile.batch[operand]);
    }
  }

  const ForwardParams& params_;
  Smem& smem_;
  const bool issues_;
};

}  // namespace fa
