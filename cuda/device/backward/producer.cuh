// The producers: one warp that keeps the rings of Q (with its LSE and delta) and dO full, one that
// loads K and V tile by tile. All lanes of a warp walk the loop, so that its state fits into uniform
// registers, and one of them issues.
//
//   per tile, for each head of the group, query blocks in ascending order:   Q dO Q' dO' ...
//
// Q and dO of the next tile are on their way while the consumers still finish this one, K and V while
// they store dK and dV. Q and dO are read again by the tiles of other keys and stay in
// L2 (evict last); K and V are read once (evict first).
#pragma once

#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "device/backward/traits.cuh"

namespace fa {

template <BackwardConfig kConfig>
class BackwardProducer {
  using Traits = BackwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Ring = typename Traits::Ring;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using Hint = cute::TMA::CacheHintSm90;

 public:
  __device__ BackwardProducer(const BackwardParams& params, Smem& smem)
      : params_(params), smem_(smem), issues_(cute::elect_one_sync()) {}

  __device__ void run_queries() {
    Ring ring;
    BackwardTileSlots::Ring slot;
    while (true) {
      const BackwardTile& tile = smem_.tiles.take(slot);
      if (!tile.more) return;
      const int begin = uniform(tile.queries.begin + tile.blocks.begin * Traits::kBlockM);
      const int end = uniform(tile.queries.begin + tile.blocks.end * Traits::kBlockM);
      FA_NO_UNROLL
      for (int group = 0; group < params_.qhead_per_khead; ++group) {
        const float* statistics =
            params_.workspace.statistics +
            (tile.query_block + static_cast<int64_t>(group) * params_.workspace.q_slots +
             tile.blocks.begin) *
                (2 * Traits::kBlockM);
        FA_NO_UNROLL
        for (int query = begin; query < end; query += Traits::kBlockM) {
          load_q(ring, tile, group, query, statistics);
          load_dout(ring, tile, group, query);
          ring.advance();
          statistics += 2 * Traits::kBlockM;
        }
      }
      if (params_.tile_counter != nullptr) smem_.tiles.report_loaded(threadIdx.x);
      smem_.tiles.release(slot, threadIdx.x);
    }
  }

  __device__ void run_keys() {
    BackwardTileSlots::Ring slot;
    while (true) {
      const BackwardTile& tile = smem_.tiles.take(slot);
      if (!tile.more) return;
      if (!tile.blocks.empty()) {
        EmptyBarrier::wait(&smem_.kv_empty, tile.phase ^ 1);
        load_keys<Traits::kPanelColumns>(params_.k_tensor_map, smem_.k, &smem_.k_full, tile,
                                         kBackwardK, tile.key_begin, 0);
        load_keys<Traits::kPanelColumnsV>(params_.v_tensor_map, smem_.v, &smem_.v_full, tile,
                                          kBackwardV, tile.key_begin, 0);
        if constexpr (Traits::kWide) {
          load_keys<Traits::kPanelColumns>(params_.k_tensor_map, smem_.peer_k, &smem_.peer_k_full,
                                           tile, kBackwardK, tile.key_begin ^ Traits::kBlockN,
                                           cluster_rank() * Traits::kDqCtaColumns);
        }
      }
      smem_.tiles.release(slot, threadIdx.x);
    }
  }

 private:
  __device__ void load_q(const Ring& ring, const BackwardTile& tile, int group, int query,
                         const float* statistics) {
    EmptyBarrier::wait(&smem_.q_empty[ring.stage], ring.phase ^ 1);
    if (!issues_) return;
    uint64_t* const full = &smem_.q_full[ring.stage];
    constexpr int kStatisticsBytes = sizeof(smem_.statistics[0]);
    FullBarrier::arrive_and_expect_tx(full, sizeof(smem_.q[0]) + kStatisticsBytes);
    load_panels<Traits::kPanelColumns>(params_.q_tensor_map, smem_.q[ring.stage], full, group,
                                       query, tile.head_kv, tile.operand_batch[kBackwardQ]);
    cute::SM90_BULK_COPY_G2S::copy(statistics, full, smem_.statistics[ring.stage],
                                   kStatisticsBytes);
  }

  __device__ void load_dout(const Ring& ring, const BackwardTile& tile, int group, int query) {
    EmptyBarrier::wait(&smem_.dout_empty[ring.stage], ring.phase ^ 1);
    if (!issues_) return;
    uint64_t* const full = &smem_.dout_full[ring.stage];
    FullBarrier::arrive_and_expect_tx(full, sizeof(smem_.dout[0]));
    load_panels<Traits::kPanelColumnsV>(params_.dout_tensor_map, smem_.dout[ring.stage], full,
                                        group, query, tile.head_kv,
                                        tile.operand_batch[kBackwardDout]);
  }

  template <int kPanelColumns, typename Element, int kElements>
  __device__ void load_panels(const CUtensorMap& tensor_map, Element (&stage)[kElements],
                              uint64_t* full, int group, int query, int head_kv, int batch) {
    constexpr int kPanelElements = Traits::kBlockM * kPanelColumns;
#pragma unroll
    for (int panel = 0; panel < kElements / kPanelElements; ++panel) {
      cute::SM90_TMA_LOAD_5D::copy(&tensor_map, full, static_cast<uint64_t>(Hint::EVICT_LAST),
                                   stage + panel * kPanelElements, panel * kPanelColumns, group,
                                   query, head_kv, batch);
    }
  }

  template <int kPanelColumns, typename Element, int kElements>
  __device__ void load_keys(const CUtensorMap& tensor_map, Element (&target)[kElements],
                            uint64_t* full, const BackwardTile& tile, BackwardOperand operand,
                            int first_key, int first_column) {
    constexpr int kPanelElements = Traits::kBlockN * kPanelColumns;
    if (!issues_) return;
    FullBarrier::arrive_and_expect_tx(full, sizeof(target));
#pragma unroll
    for (int panel = 0; panel < kElements / kPanelElements; ++panel) {
      cute::SM90_TMA_LOAD_4D::copy(
          &tensor_map, full, static_cast<uint64_t>(Hint::EVICT_FIRST),
          target + panel * kPanelElements, first_column + panel * kPanelColumns,
          tile.keys.begin + first_key, tile.head_kv, tile.operand_batch[operand]);
    }
  }

  const BackwardParams& params_;
  Smem& smem_;
  const bool issues_;
};

}  // namespace fa
