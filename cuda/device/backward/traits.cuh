// What a BackwardConfig means in types: elements, shared-memory layouts, wgmma descriptors, the
// shared-memory struct, named barriers.
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
struct BackwardTraits {
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kWarpgroups = kBackwardWarpgroups;
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
  static constexpr DqSplit kDqSplit = dq_split(kBlockM, kWarpgroups);
  using Element =
      std::conditional_t<kConfig.dtype == DataType::bf16, cutlass::bfloat16_t, cutlass::half_t>;
  using Ring = RingPosition<kStages>;
  static_assert(kBlockN == kWarpgroups * kRowsPerWarpgroup);
  static_assert(kHeadDim % 64 == 0 && kHeadDimV % 64 == 0);
  // With two stages one barrier per block keeps dS apart: whoever writes a stage again has passed
  // the barrier of the block between, which every warpgroup reaches after it has read the stage.
  static_assert(kStages == 2);

  // Registers per thread after the producer has given its own away: 64K for all.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  // A block of 128 queries is taken in two parts, the second's S^T and dP^T under the first's
  // exponentials.
  static constexpr int kParts = kBlockM == 128 ? 2 : 1;
  // dV is issued before dS is computed, which then runs under it; with two parts the second's S^T
  // and dP^T do that, and the registers would not suffice for both.
  static constexpr bool kDvBeforeDs = kParts == 1;

  // Tiles are panels of 64 columns, rows of a panel 128 bytes with TMA's swizzle.
  static constexpr int kPanelColumns = 64;
  using KMajorAtom = cute::GMMA::Layout_K_SW128_Atom<Element>;
  using MnMajorAtom = cute::GMMA::Layout_MN_SW128_Atom<Element>;
  template <int kRows, int kColumns, int kDepth = 1>
  using KMajor = decltype(cute::tile_to_shape(
      KMajorAtom{}, cute::Shape<cute::Int<kRows>, cute::Int<kColumns>, cute::Int<kDepth>>{}));
  // The same memory as (columns, rows): rows first, so that a panel of columns is contiguous.
  template <int kRows, int kColumns, int kDepth = 1>
  using MnMajor = decltype(cute::tile_to_shape(
      MnMajorAtom{}, cute::Shape<cute::Int<kColumns>, cute::Int<kRows>, cute::Int<kDepth>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using LayoutK = KMajor<kBlockN, kHeadDim>;
  using LayoutV = KMajor<kBlockN, kHeadDimV>;
  using LayoutQ = KMajor<kBlockM, kHeadDim, kStages>;
  using LayoutDout = KMajor<kBlockM, kHeadDimV, kStages>;
  using LayoutDs = KMajor<kBlockM, kBlockN, kStages>;
  using LayoutKt = MnMajor<kBlockN, kHeadDim>;
  using LayoutQt = MnMajor<kBlockM, kHeadDim, kStages>;
  using LayoutDoutt = MnMajor<kBlockM, kHeadDimV, kStages>;

  template <int kColumns, int kDepth, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
  using MmaSs = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kDepth>>,
                                 kMajorA, kMajorB>()));
  template <int kColumns, int kDepth>
  using MmaRs = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kColumns>, cute::Int<kDepth>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));
  // One warpgroup's GEMMs. Where only descriptors are made, a slice of 16 columns of a K-major
  // operand is enough, one panel of an MN-major one.
  using MmaScores = MmaSs<16, kHeadDim, cute::GMMA::Major::K, cute::GMMA::Major::K>;  // K Q^T
  using MmaDp = MmaSs<16, kHeadDimV, cute::GMMA::Major::K, cute::GMMA::Major::K>;     // V dO^T
  using MmaDv = MmaRs<kHeadDimV, kBlockM / kParts>;                                   // P^T dO
  using MmaDk = MmaRs<kHeadDim, kBlockM / kParts>;                                    // dS^T Q
  // dS K, or its transpose.
  using MmaDq = std::conditional_t<kDqSplit == DqSplit::transposed,
                                   MmaSs<16, kBlockN, cute::GMMA::Major::MN, cute::GMMA::Major::K>,
                                   MmaSs<64, kBlockN, cute::GMMA::Major::K, cute::GMMA::Major::MN>>;
  static_assert(kDqSplit == DqSplit::rows ? kHeadDim == 64 : kHeadDim == 64 * kWarpgroups);

  // Named barriers. kDsWritten: all consumer threads arrive and wait; dS of the block is in shared
  // memory. kKRead: likewise; no wgmma of the tile reads K any more. kWarpgroupBarrier + w: the 128
  // threads of warpgroup w meet.
  static constexpr int kDsWritten = 1;
  static constexpr int kKRead = 2;
  static constexpr int kWarpgroupBarrier = 3;

  struct alignas(1024) Smem {
    Element k[kBlockN * kHeadDim];   // dK on top of it
    Element v[kBlockN * kHeadDimV];  // dV on top of it
    Element q[kStages][kBlockM * kHeadDim];
    Element dout[kStages][kBlockM * kHeadDimV];
    Element ds[kStages][kBlockM * kBlockN];
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

}  // namespace fa
