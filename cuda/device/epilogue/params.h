// Kernel parameters of the stand-alone epilogue.
#pragma once

#include "device/batch_map.h"
#include "device/epilogue/output_params.h"

namespace fa {

// Operands in the batch map. The unit of a stride is a (sequences, heads_kv, ...) slice for acc and the
// statistics, expressed in matrices of acc (rows x head_dim) and rows' vectors alike; an element for the
// descriptors.
enum EpilogueOperand { kAcc, kStatistic0, kStatistic1, kCuSeqlens, kSeqused, kNumEpilogueOperands };

struct EpilogueParams {
  CUtensorMap acc_tensor_map;  // acc seen as (head_dim, rows, matrix)
  OutputParams output;
  BatchMap<kNumEpilogueOperands> batch_map;
  // Normalised: statistic[0] is lse, statistic[1] null. Otherwise row_max and row_sum.
  const float* statistic[2];
  const int32_t* cu_seqlens;  // null: dense, one sequence per batch index
  const int32_t* seqused;     // null: every row of a sequence counts
  int batch;
  int heads_kv;
  int sequences;
  int rows;    // of acc per sequence and head, packed
  int seqlen;  // queries of the output buffer
};

}  // namespace fa
