// The stand-alone epilogue: fp32 accumulators and row statistics in global memory -> O and LSE, through
// the same epilogue code that ends the fused forward.
//
// One producer warp and one consumer warpgroup per 64 rows; several CTAs per multiprocessor, each
// walking the tiles of TileScheduler. The kernel only moves bytes, so everything serves keeping
// loads in flight: `stages` whole accumulator tiles wait in shared memory.
//
//   producer   tile -> wait `empty` -> TMA acc -> stage, cp.async statistics -> stage ... next stage
//   consumers  wait `full` -> stage -> wgmma fragment layout, scaled -> epilogue, O borrows the stage
//
//   stage   | acc: kHeadDim / 32 panels of kBlockM x 32 fp32, 128-byte swizzle | O on top of it |
//
// `full[s]`: the producer's lane 0 (with the bytes that TMA will bring) and all its 32 lanes (when their
// cp.async have landed) arrive, 33; the consumers wait; tile, acc and statistics of stage s are there.
// `empty[s]`: O done, see o_done.cuh; the producer waits; stage s may be overwritten.
#pragma once

#include <type_traits>

#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "device/epilogue/final_output.cuh"
#include "device/epilogue/params.h"
#include "device/epilogue/partial_output.cuh"
#include "device/epilogue/row_statistics.cuh"
#include "device/epilogue/tile_scheduler.cuh"

namespace fa {

template <EpilogueConfig kConfig>
struct EpilogueKernelTraits {
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kStages = kConfig.stages;
  static constexpr int kConsumerThreads = 2 * kBlockM;
  static constexpr int kPanels = kHeadDim / kAccPanelColumns;
  static constexpr int kPanelBytes = kBlockM * kAccPanelColumns * 4;
  static constexpr int kFirstBarrierId = 1;

  using OutputType = std::conditional_t<
      kConfig.out_dtype == DataType::f32,
      PartialOutput<kHeadDim, kBlockM, kConfig.column_order, 1, kFirstBarrierId>,
      FinalOutput<kConfig.out_dtype, kHeadDim, kBlockM, kConfig.column_order, 1, kFirstBarrierId>>;

  struct Smem {
    char acc[kStages][kPanels * kPanelBytes];
    float statistic[kStages][2][kBlockM];
    OutputTile tile[kStages];  // num_rows < 0: no more tiles
    uint64_t full[kStages];
    cutlass::arch::ClusterBarrier empty[kStages];
  };
};

// A position in the ring of stages: stage and the parity its barriers have there.
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <EpilogueConfig kConfig>
__device__ void epilogue_producer(const EpilogueParams& params,
                                  typename EpilogueKernelTraits<kConfig>::Smem& smem, int lane) {
  using Traits = EpilogueKernelTraits<kConfig>;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  const int num_panels = (params.output.head_dim + kAccPanelColumns - 1) / kAccPanelColumns;
  const int64_t heads_kv = params.heads_kv;
  TileScheduler<Traits::kBlockM> scheduler(params, lane);
  RingPosition<Traits::kStages> ring;
  bool more = true;
  while (more) {
    OutputTile tile;
    int sequence;
    more = scheduler.next(tile, sequence);
    smem.empty[ring.stage].wait(ring.phase ^ 1);
    uint64_t* const full = &smem.full[ring.stage];
    if (!more) tile.num_rows = -1;
    const int num_valid = more ? tile.num_valid : 0;
    const int64_t matrix = int64_t{sequence} * heads_kv + tile.head_kv;
    if (lane == 0) {
      smem.tile[ring.stage] = tile;
      if (num_valid > 0) {
        const int acc_matrix =
            static_cast<int>(params.batch_map.offset(kAcc, tile.batch) + matrix);
        FullBarrier::arrive_and_expect_tx(full, num_panels * Traits::kPanelBytes);
        // No evict-first hint: it costs 8 % (108 instead of 100 us for acc (4, 16, 8192, 128)).
        for (int panel = 0; panel < num_panels; ++panel) {
          cute::SM90_TMA_LOAD_3D::copy(&params.acc_tensor_map, full,
                                       static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL),
                                       smem.acc[ring.stage] + panel * Traits::kPanelBytes,
                                       panel * kAccPanelColumns, tile.row_begin, acc_matrix);
        }
      } else {
        cutlass::arch::ClusterBarrier::arrive(full);
      }
    }
    if (num_valid > 0) {
      for (int i = 0; i < 2 && params.statistic[i] != nullptr; ++i) {
        const float* const statistic =
            params.statistic[i] +
            (params.batch_map.offset(kStatistic0 + i, tile.batch) + matrix) * params.rows +
            tile.row_begin;
        for (int row = lane; row < num_valid; row += kWarpSize) {
          cute::SM80_CP_ASYNC_CACHEALWAYS<float>::copy(statistic[row],
                                                       smem.statistic[ring.stage][i][row]);
        }
      }
    }
    cutlass::arch::cpasync_barrier_arrive_noinc(full);
    ring.advance();
  }
  // Consumers signal every stage once more; leave only after that.
  for (int i = 0; i < Traits::kStages; ++i) {
    smem.empty[ring.stage].wait(ring.phase ^ 1);
    ring.advance();
  }
}

template <EpilogueConfig kConfig>
__device__ void epilogue_consumer(const EpilogueParams& params,
                                  typename EpilogueKernelTraits<kConfig>::Smem& smem, int thread) {
  using Traits = EpilogueKernelTraits<kConfig>;
  using Output = typename Traits::OutputType;
  for (RingPosition<Traits::kStages> ring;; ring.advance()) {
    cutlass::arch::ClusterBarrier::wait(&smem.full[ring.stage], ring.phase);
    const OutputTile tile = smem.tile[ring.stage];
    const ODone<1> o_done{smem.empty[ring.stage]};
    if (tile.num_rows < 0 || tile.num_valid == 0) {
      // All consumer threads arrive and wait: everyone has read the tile.
      cutlass::arch::NamedBarrier::sync(Traits::kConsumerThreads, Output::kMeeting);
      if (thread < Output::num_signalling_threads(params.output)) o_done.signal();
      if (tile.num_rows < 0) return;
      Output::store_empty(params.output, tile, thread);
      continue;
    }
    RowStatistics statistics[2];
    float lse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = accumulator_coordinate(thread, 2 * half).row;
      const float first = smem.statistic[ring.stage][0][row];
      statistics[half] =
          row >= tile.num_valid ? RowStatistics::outside()
          : params.statistic[1] == nullptr
              ? RowStatistics::normalised(first)
              : RowStatistics::unnormalised(first, smem.statistic[ring.stage][1][row]);
      lse[half] = statistics[half].lse;
    }
    char* const stage = smem.acc[ring.stage];
    float acc[Traits::kHeadDim / 2];
    // Panels innermost: they share an address up to a constant, which keeps registers low.
#pragma unroll
    for (int index = 0; index < kAccPanelColumns / 2; index += 2) {
      const TileCoordinate at = accumulator_coordinate(thread, index);
      const char* const source = stage + acc_offset_bytes(at.row, at.column, Traits::kBlockM);
      const RowStatistics& row = statistics[index / 2 % 2];
#pragma unroll
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        const float2 pair = *reinterpret_cast<const float2*>(source + panel * Traits::kPanelBytes);
        acc[panel * (kAccPanelColumns / 2) + index] = row.apply(pair.x);
        acc[panel * (kAccPanelColumns / 2) + index + 1] = row.apply(pair.y);
      }
    }
    Output::store_o(params.output, tile, acc, lse, stage, o_done, thread);
  }
}

// `Row` is a row of the kernel table: a type with the row's name and its config. (nvcc 13.0 cannot name a
// namespaced class as the template argument of a kernel itself, and profilers show the row's name.)
template <typename Row>
__global__ void __launch_bounds__(epilogue_num_threads(Row::kConfig),
                                  epilogue_blocks_per_sm(Row::kConfig))
    epilogue_kernel(const __grid_constant__ EpilogueParams params) {
  constexpr EpilogueConfig kConfig = Row::kConfig;
  using Traits = EpilogueKernelTraits<kConfig>;
  using Smem = typename Traits::Smem;
  static_assert(sizeof(Smem) == epilogue_smem_bytes(kConfig));
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / kWarpSize;

  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&params.acc_tensor_map);
    if (params.output.tma_store) cute::prefetch_tma_descriptor(&params.output.o_tensor_map);
    const int signalling = Traits::OutputType::num_signalling_threads(params.output);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      cutlass::arch::ClusterBarrier::init(&smem.full[stage], 1 + kWarpSize);
      smem.empty[stage].init(ODone<1>::arrivals(signalling));
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();

  if (warp == Traits::kConsumerThreads / kWarpSize) {
    epilogue_producer<kConfig>(params, smem, threadIdx.x % kWarpSize);
  } else {
    epilogue_consumer<kConfig>(params, smem, threadIdx.x);
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_EPILOGUE_KERNEL(dtype, head_dim, order, block_m, stages)                      \
  namespace fa {                                                                                  \
  struct epilogue_##dtype##_##head_dim##_##order##_##block_m##_##stages {                         \
    static constexpr EpilogueConfig kConfig{DataType::dtype, head_dim, ColumnOrder::order,        \
                                            block_m, stages};                                     \
  };                                                                                              \
  const void* epilogue_##dtype##_##head_dim##_##order##_##block_m##_##stages##_symbol() {         \
    return reinterpret_cast<const void*>(                                                         \
        &epilogue_kernel<epilogue_##dtype##_##head_dim##_##order##_##block_m##_##stages>);        \
  }                                                                                               \
  }
