// Kernel parameters of the schedule of packed sequences.
#pragma once

#include "device/forward/params.h"

namespace fa {

struct ScheduleParams {
  BatchMap<kNumForwardOperands> batch_map;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;  // null: whole sequences
  const int32_t* seqused_k;
  Schedule schedule;
  int total_q;  // of the buffers, per batch index
  int total_k;
  int max_seqlen_q;
  int max_seqlen_k;
  int packed_heads;
  int rows_per_tile;
  int tiles_per_row_block;  // heads and splits of one sequence
};

}  // namespace fa
