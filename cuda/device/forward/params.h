// Kernel parameters of the forward.
#pragma once

#include "device/batch_map.h"
#include "device/epilogue/output_params.h"
#include "forward_maps.h"

namespace fa {

// Operands in the batch map. The unit of a stride is a batch index of the operand for q, k, v (the
// last coordinate of its tensor map), an element for the lengths.
enum ForwardOperand { kQ, kK, kV, kSequsedQ, kSequsedK, kNumForwardOperands };

// What happens to q.k before the softmax; the logit is score * logit_unit, logit_unit >= 0.
enum class ScoreTransform {
  none,      // score = q.k
  multiply,  // score = q.k * factor: for a scale that is negative or 0
  softcap,   // score = tanh(q.k * factor)
};

struct ForwardParams {
  CUtensorMap q_tensor_map;  // (head_dim, group, query, head_kv, batch), boxes of block_m rows
  CUtensorMap k_tensor_map;  // (head_dim, key, head_kv, batch), boxes of block_n keys
  CUtensorMap v_tensor_map;
  OutputParams output;
  BatchMap<kNumForwardOperands> batch_map;
  const int32_t* seqused_q;  // null: every query counts
  const int32_t* seqused_k;  // null: every key counts
  TileOrder order;
  int num_tiles;
  int* tile_counter;  // null: CTA c takes tiles c, c + gridDim, ...; else 0 at the start of the
                      // kernel
  int heads;          // per batch index, as tiles count them: of keys when packed, else of queries
  int qhead_per_khead;  // of the call; output.qhead_per_khead is 1 unless rows are packed
  int seqlen_q;
  int seqlen_k;
  int window_left;
  int window_right;
  bool top_left;
  ScoreTransform transform;
  float factor;
  float logit_unit;
  float logit_unit_log2;  // logit_unit * log2(e)

  FA_HOST_DEVICE int seqlen_q_of(int batch) const {
    return length(seqused_q, kSequsedQ, batch, seqlen_q);
  }
  FA_HOST_DEVICE int seqlen_k_of(int batch) const {
    return length(seqused_k, kSequsedK, batch, seqlen_k);
  }

 private:
  FA_HOST_DEVICE int length(const int32_t* seqused, ForwardOperand operand, int batch,
                            int whole) const {
    if (seqused == nullptr) return whole;
    const int used = seqused[batch_map.offset(operand, batch)];
    return used < 0 ? 0 : used < whole ? used : whole;
  }
};

}  // namespace fa
