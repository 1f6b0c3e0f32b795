// What a ForwardConfig means in types: elements, shared-memory layouts, wgmma instructions, the
// shared-memory struct, named barriers.
#pragma once

#include <type_traits>

#include "cutlass/arch/barrier.h"
#include "cutlass/numeric_types.h"
#include "device/epilogue/direct_output.cuh"
#include "device/epilogue/partial_output.cuh"
#include "device/forward/mask.cuh"
#include "device/forward/params.h"
#include "device/ring_position.cuh"
#include "device/warpgroup_gemm.cuh"

namespace fa {

template <ForwardConfig kConfig>
struct ForwardTraits {
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kBlockN = kConfig.block_n;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kHeadDimV = kConfig.head_dim_v;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kQStages = forward_q_stages(kConfig);
  static constexpr int kWarpgroups = forward_num_warpgroups(kConfig);
  static constexpr int kConsumerThreads = kWarpgroups * kWarpgroupSize;
  static constexpr int kConsumerWarps = kConsumerThreads / kWarpSize;
  using Element =
      std::conditional_t<kConfig.dtype == DataType::bf16, cutlass::bfloat16_t, cutlass::half_t>;
  using Ring = RingPosition<kStages>;
  using QRing = RingPosition<kQStages>;

  // Registers per thread after the producer has given its own away: 64K for all.
  static constexpr int kProducerRegisters = kWarpgroups == 1 ? 56 : kWarpgroups == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kWarpgroups == 1 ? 256 : kWarpgroups == 2 ? 240 : 160;

  // Warpgroups take turns on the tensor cores: one's softmax runs under the other's GEMM.
  static constexpr bool kTakeTurns = kWarpgroups > 1;

  // Tiles are panels of 64 (32) columns, rows of a panel 128 (64) bytes with TMA's swizzle.
  static constexpr int kPanelColumns = panel_columns(kHeadDim);
  static constexpr int kPanelColumnsV = panel_columns(kHeadDimV);
  static_assert(kPanelColumns >= 32 && kPanelColumnsV >= 32);
  template <int kColumns>
  using KMajorAtom = std::conditional_t<kColumns == 64, cute::GMMA::Layout_K_SW128_Atom<Element>,
                                        cute::GMMA::Layout_K_SW64_Atom<Element>>;
  template <int kColumns>
  using MnMajorAtom = std::conditional_t<kColumns == 64, cute::GMMA::Layout_MN_SW128_Atom<Element>,
                                         cute::GMMA::Layout_MN_SW64_Atom<Element>>;
  using LayoutQ = decltype(cute::tile_to_shape(
      KMajorAtom<kPanelColumns>{},
      cute::Shape<cute::Int<kBlockM>, cute::Int<kHeadDim>, cute::Int<kQStages>>{}));
  using LayoutK = decltype(cute::tile_to_shape(
      KMajorAtom<kPanelColumns>{},
      cute::Shape<cute::Int<kBlockN>, cute::Int<kHeadDim>, cute::Int<kStages>>{}));
  // V as the (head_dim_v, keys) operand of P V: keys first, so that a panel of columns is
  // contiguous.
  using LayoutVt = decltype(cute::tile_to_shape(
      MnMajorAtom<kPanelColumnsV>{},
      cute::Shape<cute::Int<kHeadDimV>, cute::Int<kBlockN>, cute::Int<kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));

  // One warpgroup's GEMMs. A slice of 16 keys is enough to make the descriptors of Q and K.
  using MmaQKSlice = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::_16, cute::Int<kHeadDim>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::K>()));
  using MmaPV = decltype(cute::make_tiled_mma(
      cute::GMMA::rs_op_selector<Element, Element, float,
                                 cute::Shape<cute::_64, cute::Int<kHeadDimV>, cute::Int<kBlockN>>,
                                 cute::GMMA::Major::K, cute::GMMA::Major::MN>()));

  // Named barriers kTurn + w: warpgroup w - 1 arrives, warpgroup w waits, 256; w may issue its GEMMs.
  // Per block of a tile but one, whether w has GEMMs then or not.
  static constexpr int kTurn = 1;

  using OutputType = std::conditional_t<kConfig.output == Output::final,
                                        DirectOutput<kConfig.dtype, kHeadDimV, kBlockM>,
                                        PartialOutput<kHeadDimV, kBlockM>>;

  struct alignas(1024) Smem {
    Element q[kQStages][kBlockM * kHeadDim];
    Element k[kStages][kBlockN * kHeadDim];
    Element v[kStages][kBlockN * kHeadDimV];
    RowMask<kBlockM> mask;
    uint64_t k_full[kStages], k_empty[kStages];
    uint64_t v_full[kStages], v_empty[kStages];
    uint64_t q_full[kQStages], q_empty[kQStages];
    uint64_t v_tail[kForwardTileSlots];
    TileQueue tiles;
  };
  static_assert(sizeof(Smem) == forward_smem_bytes(kConfig));
};

}  // namespace fa
