// The stand-alone epilogue: fp32 accumulators and row statistics in global memory -> O and LSE,
// through the same epilogue code that ends the fused forward.
//
// One CTA per tile of kBlockM rows of the output buffer, two threads per row. The kernel only moves
// bytes: several CTAs per multiprocessor keep loads in flight, and the hardware hands out tiles as
// CTAs finish. (A persistent kernel with a producer warp and a ring of stages was 5 to 10 % slower:
// it starts slower, and its fixed share of tiles leaves multiprocessors with more bandwidth idle at
// the end.)
//
//   thread r < kBlockM   where row r comes from | bulk copy of the row -> smem | statistics -> smem
//   all threads          wait | smem -> wgmma fragment layout, scaled | epilogue, O borrows acc's memory
//
// Rows are located one by one, so that packed sequences of any lengths share tiles and nothing but
// the rows that exist is read. A row in no sequence, or past the used part of one, is written as
// empty.
//
//   smem   | acc: kBlockM padded rows of fp32; then O | scale, lse per row | barrier |
#pragma once

#include <climits>
#include <type_traits>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "device/epilogue/final_output.cuh"
#include "device/epilogue/params.h"
#include "device/epilogue/partial_output.cuh"
#include "device/epilogue/row_statistics.cuh"

namespace fa {

template <EpilogueConfig kConfig>
struct EpilogueKernelTraits {
  static constexpr int kBlockM = kConfig.block_m;
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kFirstBarrierId = 1;

  using Output = std::conditional_t<
      kConfig.out_dtype == DataType::f32, PartialOutput<kHeadDim, kBlockM, kConfig.column_order>,
      FinalOutput<kConfig.out_dtype, kHeadDim, kBlockM, kConfig.column_order, kFirstBarrierId>>;

  struct Smem {
    char acc[kBlockM * acc_pitch_bytes(kHeadDim)];
    float scale[kBlockM];
    float lse[kBlockM];
    uint64_t acc_arrived;
  };
};

// The sequence that holds `token`, as find_sequence, and its first token. Collective over the warp:
// the first lane's is looked for 32 offsets at a time, so that with few sequences one load passes
// before those of acc; only lanes with tokens outside it look for their own.
__device__ inline int find_sequence_in_warp(const int32_t* cu_seqlens, int num_sequences, int token,
                                            int& begin) {
  const int first_token = __shfl_sync(~0u, token, 0);
  const int lane = threadIdx.x % kWarpSize;
  int low = 0;  // offsets that may be the sequence's first or last
  int count = num_sequences + 1;
  while (count > kWarpSize) {
    const int step = ceil_div(count, kWarpSize);
    const int probe = low + min(lane * step, count - 1);
    const int passed = __popc(__ballot_sync(~0u, __ldg(cu_seqlens + probe) <= first_token));
    const int skipped = min(max(passed - 1, 0) * step, count - 1);
    low += skipped;
    count = min(step + 1, count - skipped);
  }
  const int offset = lane < count ? __ldg(cu_seqlens + low + lane) : INT_MAX;
  const int at = __popc(__ballot_sync(~0u, offset <= first_token)) - 1;
  begin = __shfl_sync(~0u, offset, max(at, 0));
  const int end = __shfl_sync(~0u, offset, min(at + 1, kWarpSize - 1));
  const bool known = at >= 0 && at + 1 < count;  // both ends of the sequence
  if (known && begin <= token && token < end) return low + at;
  const int sequence =
      find_sequence([&](int i) { return __ldg(cu_seqlens + i); }, num_sequences, token);
  if (sequence >= 0) begin = __ldg(cu_seqlens + sequence);
  return sequence;
}

// The row of acc, and of the statistics, that becomes row `row` of the tile; -1 if there is none.
// Collective over the warp.
__device__ inline int64_t source_row(const EpilogueParams& params, const OutputTile& tile,
                                     int row) {
  int token, subhead;
  params.output.qhead_per_khead(token, subhead, tile.row_begin + row);
  int sequence = 0;
  if (params.cu_seqlens != nullptr) {
    const int32_t* const cu_seqlens =
        params.cu_seqlens + params.batch_map.offset(kCuSeqlens, tile.batch);
    int begin;
    sequence = find_sequence_in_warp(cu_seqlens, params.sequences, token, begin);
    if (sequence < 0 || sequence >= params.sequences) return -1;
    token -= max(begin, 0);
  }
  int length = params.seqlen_acc;
  if (params.seqused != nullptr) {
    length = min(length,
                 __ldg(params.seqused + params.batch_map.offset(kSeqused, tile.batch) + sequence));
  }
  if (token >= length || row >= tile.num_rows) return -1;
  const int64_t rows = int64_t{params.seqlen_acc} * params.output.qhead_per_khead.divisor;
  return (int64_t{sequence} * params.heads_kv.divisor + tile.head_kv) * rows +
         int64_t{token} * params.output.qhead_per_khead.divisor + subhead;
}

// `Row` is a row of the kernel table: a type with the row's name and its config. (nvcc 13.0 cannot
// name a namespaced class as the template argument of a kernel itself, and profilers show the row's
// name.)
template <typename Row>
__global__ void __launch_bounds__(epilogue_num_threads(Row::kConfig), Row::kConfig.blocks_per_sm)
    epilogue_kernel(const __grid_constant__ EpilogueParams params) {
  constexpr EpilogueConfig kConfig = Row::kConfig;
  using Traits = EpilogueKernelTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Output = typename Traits::Output;
  using Barrier = cutlass::arch::ClusterTransactionBarrier;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(sizeof(Smem) == epilogue_smem_bytes(kConfig));
  extern __shared__ __align__(1024) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x;

  // Heads fastest, so that the CTAs that run together complete whole rows of O.
  OutputTile tile;
  int row_block;
  params.row_blocks(tile.batch, row_block, params.heads_kv.divmod(tile.head_kv, blockIdx.x));
  tile.query_begin = 0;
  tile.row_begin = row_block * kBlockM;
  const int64_t rows_left =
      int64_t{params.seqlen} * params.output.qhead_per_khead.divisor - tile.row_begin;
  tile.num_rows = static_cast<int>(min(rows_left, int64_t{kBlockM}));

  if (thread == 0) {
    // The kBlockM threads that own a row arrive, with the bytes of the row if it exists; all
    // threads wait; acc is in shared memory.
    Barrier::init(&smem.acc_arrived, kBlockM);
    cutlass::arch::fence_barrier_init();
    if (params.output.tma_store) cute::prefetch_tma_descriptor(&params.output.o_tensor_map);
  }
  const int64_t source = thread < kBlockM ? source_row(params, tile, thread) : -1;
  __syncthreads();  // all threads: the barrier is initialised

  if (thread < kBlockM) {
    RowStatistics statistics;
    if (source >= 0) {
      const int64_t rows = int64_t{params.seqlen_acc} * params.output.qhead_per_khead.divisor;
      const auto at = [&](EpilogueOperand operand) {
        return params.batch_map.offset(operand, tile.batch) * rows + source;
      };
      const int head_dim = params.output.head_dim;
      Barrier::arrive_and_expect_tx(&smem.acc_arrived, 4 * head_dim);
      // No evict-first hint: it costs 8 %.
      cute::SM90_BULK_COPY_G2S::copy(params.acc + at(kAcc) * head_dim, &smem.acc_arrived,
                                     smem.acc + acc_offset_bytes(thread, 0, kHeadDim),
                                     4 * head_dim);
      const float first = params.statistic[0][at(kStatistic0)];
      statistics = params.statistic[1] == nullptr
                       ? RowStatistics::normalised(first)
                       : RowStatistics::unnormalised(first, params.statistic[1][at(kStatistic1)]);
    } else {
      Barrier::arrive(&smem.acc_arrived);
    }
    smem.scale[thread] = statistics.scale;
    smem.lse[thread] = statistics.lse;
  }
  // All threads: scale and lse of every row are in shared memory; is there any row?
  if (!__syncthreads_or(source >= 0)) {
    Output::store_empty(params.output, tile, thread);
    return;
  }
  RowStatistics statistics[2];
  float lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_coordinate(thread, 2 * half).row;
    statistics[half] = {smem.scale[row], smem.lse[row]};
    lse[half] = statistics[half].lse;
  }
  Barrier::wait(&smem.acc_arrived, 0);
  float acc[kHeadDim / 2];
#pragma unroll
  for (int index = 0; index < kHeadDim / 2; index += 2) {
    const TileCoordinate at = accumulator_coordinate(thread, index);
    const float2 pair =
        *reinterpret_cast<const float2*>(smem.acc + acc_offset_bytes(at.row, at.column, kHeadDim));
    acc[index] = statistics[index / 2 % 2].apply(pair.x);
    acc[index + 1] = statistics[index / 2 % 2].apply(pair.y);
  }
  if constexpr (size_bytes(kConfig.out_dtype) == 2) {
    Output::store_o(params.output, tile, acc, lse, smem.acc, thread);
  } else {
    Output::store_o(params.output, tile, acc, lse, thread);
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)               \
  namespace fa {                                                                                  \
  struct epilogue_##dtype##_##head_dim##_##order##_##block_m##_##blocks_per_sm {                  \
    static constexpr EpilogueConfig kConfig{DataType::dtype, head_dim, ColumnOrder::order,        \
                                            block_m, blocks_per_sm};                              \
  };                                                                                              \
  const void* epilogue_##dtype##_##head_dim##_##order##_##block_m##_##blocks_per_sm##_symbol() {  \
    return reinterpret_cast<const void*>(                                                         \
        &epilogue_kernel<epilogue_##dtype##_##head_dim##_##order##_##block_m##_##blocks_per_sm>); \
  }                                                                                               \
  }
