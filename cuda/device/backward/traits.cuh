// What a BackwardConfig means in types: elements, shared-memory layouts, wgmma descriptors, the
// shared-memory struct, named barriers. Two kinds of tile, see BackwardConfig::wide.
#pragma once

#include <type_traits>

#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_types.h"
#include "device/backward/mask.cuh"
#include "device/backward/tile.cuh"
#include "device/ring_position.cuh"
#include "device/warpgroup_gemm.cuh"

namespace fa {

template <BackwardConfig kConfig>
struct BackwardTraitsOfAll {
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kTileKeys = kConfig.block_n;       // of all CTAs of a cluster
  static constexpr int kBlockN = kConfig.keys_per_cta();  // of this one
  static constexpr int kCtas = backward_ctas(kConfig.head_dim);
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages;
  static constexpr bool kWide = kConfig.wide();
  static constexpr int kWarpgroups = kBackwardWarpgroups;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kBackwardConsumerWarps;
  static constexpr int kDqWarpgroups = backward_dq_warpgroups(kConfig.head_dim);
  static constexpr DqSplit kDqSplit = dq_split(kBlockM, kDqWarpgroups);
  using Element =
      std::conditional_t<kConfig.dtype == DataType::bf16, cutlass::bfloat16_t, cutlass::half_t>;
  using Ring = RingPosition<kStages>;

  // Registers per thread after the producer has given its own away: 64K for all.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // Tiles are panels of columns, rows of a panel 128 or 64 bytes with TMA's swizzle.
  static constexpr int kPanelColumns = backward_panel_columns(kConfig, kHeadDim);
  static constexpr int kPanelColumnsV = backward_panel_columns(kConfig, kHeadDimV);
  static_assert(kPanelColumns >= 32 && kPanelColumnsV >= 32);
  template <int kPanel>
  using KMajorAtom = std::conditional_t<kPanel == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  template <int kPanel>
  using MnMajorAtom = std::conditional_t<kPanel == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  template <int kPanel, int kRows, int kColumns, int kDepth = 1>
  using KMajor = decltype(cute::tile_to_shape(
      KMajorAtom<kPanel>{},
      cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kDepth>>{}));
  // The same memory as (columns, rows): rows first, so that a panel of columns is contiguous.
  template <int kPanel, int kRows, int kColumns, int kDepth = 1>
  using MnMajor = decltype(cute::tile_to_shape(
      MnMajorAtom<kPanel>{},
      cute::Shape<cute::Int<kColumns>, cute::Int<kRows>, cute::Int<kDepth>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using LayoutK = KMajor<kPanelColumns, kBlockN, kHeadDim>;
  using LayoutV = KMajor<kPanelColumnsV, kBlockN, kHeadDimV>;
  using LayoutQ = KMajor<kPanelColumns, kBlockM, kHeadDim, kStages>;
  using LayoutDout = KMajor<kPanelColumnsV, kBlockM, kHeadDimV, kStages>;
  using LayoutKt = MnMajor<kPanelColumns, kBlockN, kHeadDim>;
  using LayoutQt = MnMajor<kPanelColumns, kBlockM, kHeadDim, kStages>;
  using LayoutDoutt = MnMajor<kPanelColumnsV, kBlockM, kHeadDimV, kStages>;

  template <int kColumns, int kDepth, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
  using MmaSs = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kDepth>>,
                                 kMajorA, kMajorB>()));
  // One warpgroup's GEMMs. Where only descriptors are made, a slice of 16 columns of a K-major
  // operand is enough, and of an MN-major one a panel where no more are multiplied.
  using MmaScores = MmaSs<16, kHeadDim, cute::GMMA::Major::K, cute::GMMA::Major::K>;  // K Q^T
  using MmaDp = MmaSs<16, kHeadDimV, cute::GMMA::Major::K, cute::GMMA::Major::K>;     // V dO^T

  // Named barriers. kDsWritten: all consumer threads arrive and wait; dS of the block is in shared
  // memory. kWarpgroupBarrier + w: the 128 threads of warpgroup w meet.
  // With wide tiles kPWritten: all arrive and wait; P of the block is in shared memory. kPRead + w: the
  // other warpgroup arrives, w waits; the other's dV has read P.
  static constexpr int kDsWritten = 1;
  static constexpr int kWarpgroupBarrier = 2;
  static constexpr int kPWritten = kWarpgroupBarrier + kWarpgroups;
  static constexpr int kPRead = kPWritten + 1;
};

// The warpgroups split the keys.
template <BackwardConfig kConfig>
struct NarrowBackwardTraits : BackwardTraitsOfAll<kConfig> {
  using All = BackwardTraitsOfAll<kConfig>;
  using Element = typename All::Element;
  static constexpr int kBlockM = All::kBlockM;
  static constexpr int kBlockN = All::kBlockN;
  static constexpr int kHeadDim = All::kHeadDim;
  static constexpr int kHeadDimV = All::kHeadDimV;
  static constexpr int kStages = All::kStages;
  static constexpr int kWarpgroups = All::kWarpgroups;
  static_assert(kBlockN == kWarpgroups * kRowsPerWarpgroup);
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  // With two stages one barrier per block keeps dS apart: whoever writes a stage again has passed
  // the barrier of the block between, which every warpgroup reaches after it has read the stage.
  static constexpr int kDsStages = 2;

  // Arithmetic on a block of 128 queries is done in two parts, so that registers suffice.
  static constexpr int kParts = kBlockM == 128 ? 2 : 1;
  static constexpr int kScoreColumns = kBlockM / kParts;  // of a part of S^T
  // dV is issued before dS is computed, which then runs under it. With two parts P in 16 bits would
  // be more than the registers hold beside P and dP^T.
  static constexpr bool kDvBeforeDs = kParts == 1;

  using LayoutDs = typename All::template KMajor<64, kBlockM, kBlockN, kDsStages>;
  template <int kColumns, int kDepth>
  using MmaRs = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kDepth>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
  using MmaDv = MmaRs<kHeadDimV, kBlockM>;  // P^T dO
  using MmaDk = MmaRs<kHeadDim, kBlockM>;   // dS^T Q
  // dS K, or its transpose.
  using MmaDq = std::conditional_t<
      All::kDqSplit == DqSplit::transposed,
      typename All::template MmaSs<16, kBlockN, cute::GMMA::Major::MN, cute::GMMA::Major::K>,
      typename All::template MmaSs<64, kBlockN, cute::GMMA::Major::K, cute::GMMA::Major::MN>>;
  static_assert(All::kDqSplit == DqSplit::rows ? kHeadDim == 64 : kHeadDim == 64 * kWarpgroups);

  struct alignas(1024) Smem {
    Element k[kBlockN * kHeadDim];
    Element v[kBlockN * kHeadDimV];
    Element q[kStages][kBlockM * kHeadDim];
    Element dout[kStages][kBlockM * kHeadDimV];
    Element ds[kDsStages][kBlockM * kBlockN];
    float dq[kWarpgroups][kBlockM * kHeadDim / kWarpgroups];
    float statistics[kStages][2 * kBlockM];  // LSE, delta
    QueryMask<kBlockN> mask;
    uint64_t q_full[kStages], q_empty[kStages];
    uint64_t dout_full[kStages], dout_empty[kStages];
    uint64_t dq_full[kWarpgroups], dq_empty[kWarpgroups];
    uint64_t k_full, v_full, kv_empty;
    BackwardTileSlots tiles;
  };
  static_assert(sizeof(Smem) == backward_smem_bytes(kConfig));
};

// A tile is the work of a cluster of two CTAs, each with 64 of its keys. The warpgroups of a CTA share
// these: of S^T and dP^T each has half of the queries, of dK and dV half of the columns. Of dQ, the sum
// over the keys of both, each CTA has half of the columns, for which it gets the other one's dS, and
// its K once per tile.
template <BackwardConfig kConfig>
struct WideBackwardTraits : BackwardTraitsOfAll<kConfig> {
  using All = BackwardTraitsOfAll<kConfig>;
  using Element = typename All::Element;
  static constexpr int kBlockM = All::kBlockM;
  static constexpr int kBlockN = All::kBlockN;
  static constexpr int kHeadDim = All::kHeadDim;
  static constexpr int kHeadDimV = All::kHeadDimV;
  static constexpr int kStages = All::kStages;
  static constexpr int kScoreColumns = kBlockM / All::kWarpgroups;
  static_assert(All::kCtas == 2 && kBlockN == kRowsPerWarpgroup && kStages == 1);

  // Columns of dK and dV per warpgroup.
  static constexpr int kShare = kHeadDim / All::kWarpgroups;
  static constexpr int kShareV = kHeadDimV / All::kWarpgroups;
  // Columns of dQ: the CTA's, and of these the warpgroup's. A warpgroup has 64 queries and all of the
  // CTA's columns or, transposed, all queries and 64 columns.
  static constexpr bool kDqTransposed = All::kDqSplit == DqSplit::transposed;
  static_assert(kDqTransposed || All::kDqSplit == DqSplit::rows_and_columns);
  static constexpr int kDqCtaColumns = kHeadDim / All::kCtas;
  static constexpr int kDqColumns =
      kDqTransposed ? kDqCtaColumns / All::kWarpgroups : kDqCtaColumns;
  static_assert(!kDqTransposed || kDqColumns == 64);

  using LayoutKt = typename All::LayoutKt;
  using LayoutPeerKt = typename All::template MnMajor<All::kPanelColumns, kBlockN, kDqCtaColumns>;
  using LayoutDs = typename All::template KMajor<64, kBlockM, kBlockN>;
  using LayoutDst = typename All::template MnMajor<64, kBlockM, kBlockN>;
  using MmaDv = typename All::template MmaSs<kShareV, kBlockM, cute::GMMA::Major::MN,
                                             cute::GMMA::Major::MN>;  // P^T dO
  using MmaDk = typename All::template MmaSs<kShare, kBlockM, cute::GMMA::Major::MN,
                                             cute::GMMA::Major::MN>;  // dS^T Q
  // dS K, or its transpose.
  using MmaDq = std::conditional_t<
      kDqTransposed,
      typename All::template MmaSs<16, kBlockN, cute::GMMA::Major::MN, cute::GMMA::Major::K>,
      typename All::template MmaSs<kDqColumns, kBlockN, cute::GMMA::Major::K,
                                   cute::GMMA::Major::MN>>;

  struct alignas(1024) Smem {
    Element k[kBlockN * kHeadDim];
    Element v[kBlockN * kHeadDimV];
    Element peer_k[kBlockN * kDqCtaColumns];
    Element q[kStages][kBlockM * kHeadDim];
    Element dout[kStages][kBlockM * kHeadDimV];
    Element p[kBlockM * kBlockN];
    Element ds[kBlockM * kBlockN];
    Element peer_ds[kBlockM * kBlockN];
    float statistics[kStages][2 * kBlockM];  // LSE, delta
    QueryMask<kBlockN> mask;
    uint64_t q_full[kStages], q_empty[kStages];
    uint64_t dout_full[kStages], dout_empty[kStages];
    uint64_t ds_full, ds_taken, peer_ds_full;
    uint64_t k_full, v_full, peer_k_full, kv_empty;
    BackwardTileSlots tiles;
  };
  static_assert(sizeof(Smem) == backward_smem_bytes(kConfig));
};

template <BackwardConfig kConfig>
using BackwardTraits =
    std::conditional_t<kConfig.wide(), WideBackwardTraits<kConfig>, NarrowBackwardTraits<kConfig>>;

}  // namespace fa
