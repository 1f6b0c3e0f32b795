// The stand-alone epilogue: fp32 accumulators and row statistics in global memory -> O and LSE. Shares
// output tiles and the fragment layout with the end of the fused forward, which stores from registers
// since its shared memory already has the next tile's loads (direct_output.cuh, partial_output.cuh).
//
// A CTA takes block_m rows of the output buffer, and each of its warps a tile of 16 of them. The
// kernel only moves bytes: several CTAs per multiprocessor keep loads in flight, and the hardware
// hands out rows as CTAs finish. (A persistent kernel with a producer warp and a ring of stages was
// 5 to 10 % slower: it starts slower, and its fixed share of tiles leaves multiprocessors with more
// bandwidth idle at the end.)
//
//   lane r < 16   where row r comes from | bulk copy of the row -> smem | the row's statistics
//   all lanes     wait | smem -> wgmma fragment layout, scaled | epilogue, O borrows acc's memory
//
// Rows are located one by one, so that packed sequences of any lengths share tiles and nothing but
// the rows that exist is read. A row in no sequence, or past the used part of one, is written as
// empty.
//
//   smem   | per warp, acc: 16 padded rows of fp32; then O | a barrier per warp |
#pragma once

#include <climits>

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "device/epilogue/bulk_output.cuh"
#include "device/epilogue/params.h"
#include "device/epilogue/row_statistics.cuh"

namespace fa {

template <EpilogueConfig kConfig>
struct EpilogueKernelTraits {
  static constexpr int kHeadDim = kConfig.head_dim;
  static constexpr int kWarps = kConfig.block_m / kRowsPerWarp;

  using Output = BulkOutput<kConfig.out_dtype, kHeadDim, kConfig.column_order>;

  struct Smem {
    char acc[kWarps][kRowsPerWarp * acc_pitch_bytes(kHeadDim)];
    uint64_t acc_arrived[kWarps];
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
  // Lanes without a row look where the last one does, and need no search of their own.
  params.output.qhead_per_khead(token, subhead,
                                tile.row_begin + min(row, max(tile.num_rows, 1) - 1));
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
  constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(sizeof(Smem) == epilogue_smem_bytes(kConfig));
  extern __shared__ __align__(16) char smem_bytes[];
  Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;

  // Heads fastest, so that the CTAs that run together complete whole rows of O.
  OutputTile tile;
  int row_block;
  params.row_blocks(tile.batch, row_block, params.heads_kv.divmod(tile.head_kv, blockIdx.x));
  tile.query_begin = 0;
  tile.row_begin = row_block * kConfig.block_m + warp * kRowsPerWarp;
  const int64_t rows_left =
      int64_t{params.seqlen} * params.output.qhead_per_khead.divisor - tile.row_begin;
  tile.num_rows = static_cast<int>(max(min(rows_left, int64_t{kRowsPerWarp}), int64_t{0}));

  // The lanes that own a row arrive, with the bytes of the row if it exists; all lanes wait; acc is in
  // shared memory.
  uint64_t* const acc_arrived = &smem.acc_arrived[warp];
  char* const acc_smem = smem.acc[warp];
  if (lane == 0) {
    Barrier::init(acc_arrived, kRowsPerWarp);
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();  // the barrier is initialised
  const int64_t source = source_row(params, tile, lane);
  RowStatistics statistics;  // of row `lane`
  if (source >= 0) {
    const int64_t rows = int64_t{params.seqlen_acc} * params.output.qhead_per_khead.divisor;
    const auto at = [&](EpilogueOperand operand) {
      return params.batch_map.offset(operand, tile.batch) * rows + source;
    };
    const int head_dim = params.output.head_dim;
    Barrier::arrive_and_expect_tx(acc_arrived, 4 * head_dim);
    // No evict-first hint: it costs 8 %.
    cute::SM90_BULK_COPY_G2S::copy(params.acc + at(kAcc) * head_dim, acc_arrived,
                                   acc_smem + acc_offset_bytes(lane, 0, kHeadDim), 4 * head_dim);
    const float first = params.statistic[0][at(kStatistic0)];
    statistics = params.statistic[1] == nullptr
                     ? RowStatistics::normalised(first)
                     : RowStatistics::unnormalised(first, params.statistic[1][at(kStatistic1)]);
  } else if (lane < kRowsPerWarp) {
    Barrier::arrive(acc_arrived);
  }
  if (!__any_sync(~0u, source >= 0)) {
    Output::store_empty(params.output, tile, lane);
    return;
  }
  RowStatistics held[2];  // of the two rows of the fragment
  float lse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = accumulator_coordinate(lane, 2 * half).row;
    held[half] = {__shfl_sync(~0u, statistics.scale, row), __shfl_sync(~0u, statistics.lse, row)};
    lse[half] = held[half].lse;
  }
  Barrier::wait(acc_arrived, 0);
  float acc[kHeadDim / 2];
#pragma unroll
  for (int index = 0; index < kHeadDim / 2; index += 2) {
    const TileCoordinate at = accumulator_coordinate(lane, index);
    const float2 pair =
        *reinterpret_cast<const float2*>(acc_smem + acc_offset_bytes(at.row, at.column, kHeadDim));
    acc[index] = held[index / 2 % 2].apply(pair.x);
    acc[index + 1] = held[index / 2 % 2].apply(pair.y);
  }
  Output::store_o(params.output, tile, acc, lse, acc_smem, lane);
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
