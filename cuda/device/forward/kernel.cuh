// The fused attention forward: O = softmax(softcap(scale Q K^T) + mask) V and its LSE, 16-bit in,
// fp32 inside.
//
// Persistent, one CTA per multiprocessor, warp-specialised: 1 ... 3 consumer warpgroups of 64 query
// rows each, then a warpgroup of which three warps work, producer, scheduler and tail cleaner, and
// whose registers go to the others.
//
//   scheduler  the next tile, and what it consists of           tile_scheduler.cuh, forward_maps.h
//   producer   TMA: Q per tile, K and V in rings of stages      producer.cuh
//   cleaner    zeroes V past the end of a sequence              tail_cleaner.cuh
//   consumers  S = Q K^T, softmax, O += P V on wgmma            mainloop.cuh, mask.cuh, softmax.cuh
//              O, LSE: registers -> global                      device/epilogue/
//
//   shared memory  | Q | Q of the next tile, where there is room | K stages | V stages | barriers |
//
// Barriers; s is a stage, t a tile's slot:
//
//   q_full[s], k_full[s], v_full[s]     the producer arrives, 1, with the bytes that TMA brings;
//                                       the consumers wait; the stage is there
//   v_tail[t]                           the producer arrives, 1, instead of at v_full of the block in
//                                       which a sequence ends; the cleaner waits, and arrives at
//                                       v_full; per slot, as the producer may be a tile ahead of it
//   q_empty[s], k_empty[s], v_empty[s]  one lane of each consumer warp arrives when its wgmma has
//                                       read, or when the stage is there and its warpgroup sees none
//                                       of the keys; the producer waits; the stage is free
//
// Warpgroups of a tile meet only to take turns: O leaves from registers, so that one's output runs
// under the other's GEMMs and the next tile's V waits for neither (3 to 5 % of the kernel's time with
// 1,024 keys against O through V's shared memory and a TMA store for all).
//
// Tiles without a key block touch none of these. Tile slots: see tile_scheduler.cuh. Named barriers:
// see traits.cuh.
#pragma once

#include "cutlass/arch/reg_reconfig.h"
#include "device/forward/mainloop.cuh"
#include "device/forward/producer.cuh"
#include "device/forward/tail_cleaner.cuh"

namespace fa {

template <ForwardConfig kConfig>
__device__ void forward_consumer(const ForwardParams& params,
                                 typename ForwardTraits<kConfig>::Smem& smem) {
  using Traits = ForwardTraits<kConfig>;
  using Output = typename Traits::OutputType;
  ForwardMainloop<kConfig> mainloop(params, smem);
  uint32_t tiles = 0;
  const auto next_start = [&]() __attribute__((always_inline)) {
    return TileStart(smem.tiles.get(tiles), cutlass::canonical_warp_group_idx());
  };
  TileStart start = next_start();
  while (!start.none) {
    const ForwardTile& tile = smem.tiles.at(tiles);
    if (start.empty) {
      Output::store_empty(params.output, tile.output, threadIdx.x);
      smem.tiles.release(tiles);
      start = next_start();
      continue;
    }
    float o[Traits::kHeadDimV / 2];
    RowStatistics statistics[2];
    OutputTile output;
    int used_rows;
    // What the output needs to know, and the next tile. Found again, since it would spill if it were
    // kept through the main loop.
    const auto read_ahead = [&]() __attribute__((always_inline)) {
      tiles = opaque(tiles);
      const ForwardTile& done = smem.tiles.at(tiles);
      output = done.output;
      used_rows = done.used_rows;
      smem.tiles.release(tiles);
      start = next_start();
    };
    mainloop.run(tile, start, o, statistics, read_ahead);
    const int thread = opaque(threadIdx.x);
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (accumulator_coordinate(thread, 2 * half).row >= used_rows) statistics[half] = {};
      lse[half] = statistics[half].lse;
    }
    // Only empty rows need more than a multiplication: O of theirs may be NaN.
    if (__any_sync(~0u, lse[0] == -INFINITY || lse[1] == -INFINITY)) {
#pragma unroll
      for (int i = 0; i < Traits::kHeadDimV / 2; ++i) o[i] = statistics[i / 2 % 2].apply(o[i]);
    } else {
#pragma unroll
      for (int i = 0; i < Traits::kHeadDimV / 2; ++i) o[i] *= statistics[i / 2 % 2].scale;
    }
    Output::store_o(params.output, output, o, lse, thread);
  }
}

template <typename Row>
__global__ void __launch_bounds__(forward_num_threads(Row::kConfig), 1)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  constexpr ForwardConfig kConfig = Row::kConfig;
  using Traits = ForwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Barrier = cutlass::arch::ClusterBarrier;
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warpgroup = cutlass::canonical_warp_group_idx();
  const int warp = cutlass::canonical_warp_idx_sync();
  constexpr int kProducerWarp = Traits::kConsumerWarps;
  constexpr int kSchedulerWarp = kProducerWarp + 1;
  constexpr int kCleanerWarp = kProducerWarp + 2;

  if (warp == kSchedulerWarp) {
    // The kernel may start under the schedule's, which waits for all that came before it: nothing is
    // read before this line, and the other warps do so behind __syncthreads.
    cudaGridDependencySynchronize();
    find_first_tile<Traits::kBlockN>(params, smem.tiles);
  }
  if (threadIdx.x == kProducerWarp * kWarpSize) {
    // Without a key nothing is loaded, and an empty buffer has no descriptor.
    if (params.seqlen_k > 0) {
      cute::prefetch_tma_descriptor(&params.q_tensor_map);
      cute::prefetch_tma_descriptor(&params.k_tensor_map);
      cute::prefetch_tma_descriptor(&params.v_tensor_map);
    }
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      Barrier::init(&smem.k_full[stage], 1);
      Barrier::init(&smem.v_full[stage], 1);
      Barrier::init(&smem.k_empty[stage], Traits::kConsumerWarps);
      Barrier::init(&smem.v_empty[stage], Traits::kConsumerWarps);
    }
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      Barrier::init(&smem.q_full[stage], 1);
      Barrier::init(&smem.q_empty[stage], Traits::kConsumerWarps);
    }
    for (uint64_t& tail : smem.v_tail) Barrier::init(&tail, 1);
    smem.tiles.initialise(Traits::kConsumerWarps + 2);
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  // What merges partial results may be launched now; it waits for this kernel's end by itself.
  if constexpr (kConfig.output == Output::partial) cudaTriggerProgrammaticLaunchCompletion();

  if (warpgroup == Traits::kWarpgroups) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kProducerRegisters>();
    if (warp == kProducerWarp) {
      ForwardProducer<kConfig>(params, smem).run();
    } else if (warp == kSchedulerWarp) {
      run_tile_scheduler<Traits::kBlockN>(params, smem.tiles);
    } else if (warp == kCleanerWarp) {
      run_tail_cleaner<kConfig>(smem);
    }
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kConsumerRegisters>();
    forward_consumer<kConfig>(params, smem);
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)            \
  namespace fa {                                                                                             \
  struct                                                                                                     \
      forward_##dtype##_##head_dim##_##head_dim_v##_##output##_##block_m##_##block_n##_##stages {            \
    static constexpr ForwardConfig kConfig{DataType::dtype, head_dim, head_dim_v, Output::output,            \
                                           block_m,         block_n,  stages};                               \
  };                                                                                                         \
  const void*                                                                                                \
      forward_##dtype##_##head_dim##_##head_dim_v##_##output##_##block_m##_##block_n##_##stages##_symbol() { \
    return reinterpret_cast<const void*>(                                                                    \
        &forward_kernel<                                                                                     \
            forward_##dtype##_##head_dim##_##head_dim_v##_##output##_##block_m##_##block_n##_##stages>);     \
  }                                                                                                          \
  }
