// Kernel parameters of the forward.
#pragma once

#include "device/batch_map.h"
#include "device/epilogue/output_params.h"
#include "forward_maps.h"

namespace fa {

// Operands in the batch map. The unit of a stride is a batch index of the operand for q, k, v (the
// last coordinate of its tensor map), an element for the others.
enum ForwardOperand {
  kQ,
  kK,
  kV,
  kForwardCuSeqlensQ,
  kForwardCuSeqlensK,
  kSequsedQ,
  kSequsedK,
  kNumForwardOperands
};

// What happens to q.k before the softmax; the logit is score * logit_unit, logit_unit >= 0.
enum class ScoreTransform {
  none,      // score = q.k
  multiply,  // score = q.k * factor: for a scale that is negative or 0
  softcap,   // score = tanh(q.k * factor)
};

// Dense: one sequence per batch index. Packed: its sequences are found through the schedule, and
// the buffers' sizes only bound them.
struct ForwardParams {
  CUtensorMap
      q_tensor_map;  // (head_dim, group, query, head_kv, batch), boxes of rows_per_tile rows
  CUtensorMap k_tensor_map;  // (head_dim, key, head_kv, batch), boxes of block_n keys
  CUtensorMap v_tensor_map;
  OutputParams output;
  BatchMap<kNumForwardOperands> batch_map;
  const int32_t* seqused_q;  // dense; null: every query counts
  const int32_t* seqused_k;  // dense; null: every key counts
  Schedule schedule;
  TileOrder order;
  int num_tiles;      // dense
  int* tile_counter;  // null: CTA c takes tiles c, c + gridDim, ...; else 0 at the start of the
                      // kernel
  int rows_per_tile;  // block_m, or less: as many whole groups as it holds when rows are packed
  int heads;          // per batch index, as tiles count them: of keys when packed, else of queries
  int qhead_per_khead;  // of the call; output.qhead_per_khead is 1 unless rows are packed
  int num_splits;       // of the key axis
  int inner_batch;      // size of the innermost batch axis, see partial_batch
  int seqlen_q;         // of the buffers
  int seqlen_k;
  int window_left;
  int window_right;
  bool top_left;
  bool keys_read_once;  // by a single tile
  ScoreTransform transform;
  float factor;
  float logit_unit;
  float logit_unit_log2;  // logit_unit * log2(e)

  // Sequence of a batch index of a dense call.
  FA_HOST_DEVICE Segment dense_segment(int batch) const {
    return {0, seqlen_q, length(seqused_q, kSequsedQ, batch, seqlen_q), 0,
            length(seqused_k, kSequsedK, batch, seqlen_k)};
  }

 private:
  FA_HOST_DEVICE int length(const int32_t* seqused, ForwardOperand operand, int batch,
                            int whole) const {
    return seqused == nullptr ? whole : clip(seqused[batch_map.offset(operand, batch)], whole);
  }
};

}  // namespace fa
