// The main kernel of the attention backward: dK, dV, and dQ added up in fp32. delta and LSE come
// from the preprocess, which also zeroes the accumulator of dQ, and the postprocess rounds it.
//
// Persistent, one CTA per multiprocessor, warp-specialised: 2 consumer warpgroups, which split the keys
// of the tile; then a warpgroup of single warps, whose registers go to the others. With wide heads two
// CTAs split the keys of the tile and their warpgroups share them (BackwardConfig::wide).
//
//   scheduler  the next tile: a block of keys, the query blocks      tile.cuh, backward_maps.h
//              that see it
//   producers  TMA: Q and dO in rings; K and V per tile              producer.cuh
//   consumers  five GEMMs on wgmma per query block                  mainloop.cuh,
//                                                                   mainloop_wide.cuh,
//                                                                   consumer.cuh, mask.cuh
//              dK, dV -> global at the tile's end                   key_gradients.cuh,
//                                                                   partial_gradients.cuh
//   adder      dQ of each block, added in global memory; with wide  dq_adder.cuh, dq_turn.cuh
//              heads the consumers do it (register_dq_adder.cuh)
//   exchanger  with wide heads: dS to the other CTA                 ds_exchange.cuh
//
// All heads of a group are one tile's work, so that dK and dV need no accumulator in memory; where
// tiles are split, their parts are added in order: the bits are the same from run to run.
//
// Barriers; s is a stage, w a warpgroup:
//
//   q_full[s], dout_full[s],      the producer arrives, 1, with the bytes that TMA brings; the
//   k_full, v_full, peer_k_full   consumers wait; Q (dO, K, V, the other CTA's K) is there
//   q_empty[s], dout_empty[s]     one lane of each consumer warp arrives when its wgmma has read;
//                                 the producer waits; the stage is free
//   kv_empty                      one lane of each consumer warp arrives when its last wgmma of the
//                                 tile has read; the producer waits; K and V may be loaded
//   dq_full[w]                    one lane of each warp of w arrives; the adder waits; w's part of
//                                 dQ is in shared memory
//   dq_empty[w]                   the adder arrives, 1; w waits; the part has been read
//   ds_full, peer_ds_full,        see ds_exchange.cuh
//   ds_taken
//
// Tiles without a query block touch none of these. Tile slots: see tile.cuh. Named barriers: see
// traits.cuh.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "device/backward/dq_adder.cuh"
#include "device/backward/ds_exchange.cuh"
#include "device/backward/key_gradients.cuh"
#include "device/backward/mainloop.cuh"
#include "device/backward/mainloop_wide.cuh"
#include "device/backward/partial_gradients.cuh"
#include "device/backward/producer.cuh"

namespace fa {

// Inlined: as a function of its own it would spill.
template <BackwardConfig kConfig>
__device__ __forceinline__ void backward_consumer(const BackwardParams& params,
                                                  typename BackwardTraits<kConfig>::Smem& smem,
                                                  int thread) {
  using Traits = BackwardTraits<kConfig>;
  using Mainloop =
      std::conditional_t<Traits::kWide, WideMainloop<kConfig>, NarrowMainloop<kConfig>>;
  Mainloop mainloop(params, smem, thread);
  for (BackwardTileSlots::Ring slot;; smem.tiles.release(slot, thread)) {
    const BackwardTile& tile = smem.tiles.take(slot);
    if (!tile.more) return;
    const KeyGradients<kConfig> gradients(params, tile);
    if (tile.blocks.empty()) {
      gradients.zero(params.dk, params.head_dim, thread);
      gradients.zero(params.dv, params.head_dim_v, thread);
      continue;
    }
    float dk[Mainloop::kCountDk];
    float dv[Mainloop::kCountDv];
    mainloop.run(tile, dk, dv);
    // Found again, since it would spill if it were kept through the main loop: what follows from the
    // thread's number, and in wide tiles the parity of the slot.
    thread = opaque(thread);
    if constexpr (Traits::kWide) slot.phase = tile.slot_phase;
    __syncwarp();
    if (thread % kWarpSize == 0) cutlass::arch::ClusterBarrier::arrive(&smem.kv_empty);
    const auto store_dk = [&](const float(&values)[Mainloop::kCountDk]) {
      gradients.template store<Traits::kHeadDim>(values, params.scale, params.dk, params.head_dim,
                                                 thread);
    };
    const auto store_dv = [&](const float(&values)[Mainloop::kCountDv]) {
      gradients.template store<Traits::kHeadDimV>(values, 1.f, params.dv, params.head_dim_v,
                                                  thread);
    };
    if (!kConfig.splits_tiles() || tile.part_number < 0) {
      store_dv(dv);
      store_dk(dk);
      continue;
    }
    const PartialGradients<kConfig, Mainloop::kCountDk, Mainloop::kCountDv> partial(
        params, tile.part_number, thread);
    if (!partial.leave(dk, dv)) continue;
    float sum_dv[Mainloop::kCountDv];
    partial.sum_dv(sum_dv);
    store_dv(sum_dv);
    float sum_dk[Mainloop::kCountDk];
    partial.sum_dk(sum_dk);
    store_dk(sum_dk);
  }
}

template <typename Row>
__global__ void __launch_bounds__(backward_num_threads(Row::kConfig), 1)
    backward_kernel(const __grid_constant__ BackwardParams params) {
  constexpr BackwardConfig kConfig = Row::kConfig;
  using Traits = BackwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Barrier = cutlass::arch::ClusterBarrier;
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warpgroup = cutlass::canonical_warp_group_idx();

  if (threadIdx.x == 0) {
    // Without a query nothing is loaded, and an empty buffer has no descriptor.
    if (params.sequences.total_q > 0) {
      cute::prefetch_tma_descriptor(&params.q_tensor_map);
      cute::prefetch_tma_descriptor(&params.dout_tensor_map);
      cute::prefetch_tma_descriptor(&params.k_tensor_map);
      cute::prefetch_tma_descriptor(&params.v_tensor_map);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      Barrier::init(&smem.q_full[stage], 1);
      Barrier::init(&smem.dout_full[stage], 1);
      Barrier::init(&smem.q_empty[stage], Traits::kConsumerWarps);
      Barrier::init(&smem.dout_empty[stage], Traits::kConsumerWarps);
    }
    if constexpr (Traits::kWide) {
      Barrier::init(&smem.peer_k_full, 1);
      Barrier::init(&smem.ds_full, Traits::kConsumerWarps);
      Barrier::init(&smem.ds_taken, Traits::kConsumerWarps);
      Barrier::init(&smem.peer_ds_full, 1);
    } else {
      for (int w = 0; w < Traits::kWarpgroups; ++w) {
        Barrier::init(&smem.dq_full[w], kWarpgroupSize / kWarpSize);
        Barrier::init(&smem.dq_empty[w], 1);
      }
    }
    Barrier::init(&smem.k_full, 1);
    Barrier::init(&smem.v_full, 1);
    Barrier::init(&smem.kv_empty, Traits::kConsumerWarps);
    smem.tiles.initialise(Traits::kConsumerWarps + 3);
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (Traits::kCtas > 1) {
    // All threads of the cluster arrive and wait: the barriers of both CTAs are initialised.
    meet_cluster();
  } else {
    __syncthreads();
  }

  if (warpgroup == Traits::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize - Traits::kConsumerWarps;
    if (warp == 0) {
      BackwardProducer<kConfig>(params, smem).run_queries();
    } else if (warp == 1) {
      if constexpr (Traits::kWide) {
        DsExchange<kConfig>(params, smem).run();
      } else {
        DqAdder<kConfig>(params, smem).run();
      }
    } else if (warp == 2 && cute::elect_one_sync()) {
      smem.tiles.template schedule<Traits::kBlockM, Traits::kTileKeys, Traits::kCtas>(params);
    } else if (warp == 3) {
      BackwardProducer<kConfig>(params, smem).run_keys();
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    backward_consumer<kConfig>(params, smem, threadIdx.x);
  }
  // All threads of the cluster arrive and wait: no CTA uses the other one's shared memory any more.
  if constexpr (Traits::kCtas > 1) meet_cluster();
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)         \
  namespace fa {                                                                                   \
  struct backward_##dtype##_##head_dim##_##head_dim_v##_##block_m##_##block_n##_##stages {         \
    static constexpr BackwardConfig kConfig{DataType::dtype, head_dim, head_dim_v,                 \
                                            block_m,         block_n,  stages};                    \
  };                                                                                               \
  const void*                                                                                      \
      backward_##dtype##_##head_dim##_##head_dim_v##_##block_m##_##block_n##_##stages##_symbol() { \
    return reinterpret_cast<const void*>(                                                          \
        &backward_kernel<                                                                          \
            backward_##dtype##_##head_dim##_##head_dim_v##_##block_m##_##block_n##_##stages>);     \
  }                                                                                                \
  }
