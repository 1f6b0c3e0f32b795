// Kernel parameters of the stand-alone epilogue.
#pragma once

#include "device/batch_map.h"
#include "device/epilogue/output_params.h"

namespace fa {

// Operands in the batch map. Strides are counted in matrices of acc (rows x head_dim), in rows'
// vectors of the statistics, of which there are as many, and in elements of the descriptors.
enum EpilogueOperand { kAcc, kStatistic0, kStatistic1, kCuSeqlens, kSeqused, kNumEpilogueOperands };

struct EpilogueParams {
  OutputParams output;
  BatchMap<kNumEpilogueOperands> batch_map;
  const float* acc;  // (batch, sequences, heads_kv, rows, head_dim)
  // Normalised: statistic[0] is lse, statistic[1] null. Otherwise row_max and row_sum.
  const float* statistic[2];  // (batch, sequences, heads_kv, rows)
  const int32_t* cu_seqlens;  // null: dense, one sequence per batch index
  const int32_t* seqused;     // null: every row of a sequence counts
  cutlass::FastDivmod heads_kv;
  cutlass::FastDivmod row_blocks;  // CTAs along the rows of the output buffer
  int sequences;
  int seqlen_acc;  // queries of a sequence that acc holds; rows = seqlen_acc * qhead_per_khead
  int seqlen;      // queries of the output buffer
};

}  // namespace fa
