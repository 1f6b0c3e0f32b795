// Kernel parameters of the forward.
#pragma once

#include <cuda.h>

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
  const int32_t* seqused_q;  // null: every query counts
  const int32_t* seqused_k;  // null: every key counts
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
  int max_seqlen_q;  // no sequence counts for more
  int max_seqlen_k;
  int window_left;
  int window_right;
  bool top_left;
  bool keys_read_once;  // by a single tile
  ScoreTransform transform;
  float factor;
  float logit_unit;
  float logit_unit_log2;  // logit_unit * log2(e)

  // The only sequence of a batch index of a dense call.
  FA_HOST_DEVICE Segment dense_segment(int batch) const {
    return {0, seqlen_q, used_queries(batch, 0, seqlen_q), 0, used_keys(batch, 0, seqlen_k)};
  }

  // Segment `index` of a batch index of a packed call: its queries; its keys.
  FA_HOST_DEVICE void find_queries(int batch, int index, Segment& segment) const {
    const int* const begins = schedule.query_begins() + batch * schedule.batch_segments + index;
    const bool last = index == schedule.batch_segments - 1;
    const int begin = begins[0];
    const int length = (last ? seqlen_q : begins[1]) - begin;
    segment.query_begin = begin;
    segment.num_queries = length;
    segment.used_queries = index == 0 || last ? 0 : used_queries(batch, index - 1, length);
  }
  FA_HOST_DEVICE void find_keys(int batch, int index, Segment& segment) const {
    const int* const begins = schedule.key_begins() + batch * schedule.batch_segments + index;
    const bool gap = index == 0 || index == schedule.batch_segments - 1;
    const int begin = begins[0];
    segment.key_begin = begin;
    segment.seqlen_k = gap ? 0 : used_keys(batch, index - 1, begins[1] - begin);
  }

 private:
  FA_HOST_DEVICE int used_queries(int batch, int sequence, int length) const {
    length = clip(length, max_seqlen_q);
    if (seqused_q == nullptr) return length;
    return clip(seqused_q[batch_map.offset(kSequsedQ, batch) + sequence], length);
  }
  FA_HOST_DEVICE int used_keys(int batch, int sequence, int length) const {
    length = clip(length, max_seqlen_k);
    if (seqused_k == nullptr) return length;
    return clip(seqused_k[batch_map.offset(kSequsedK, batch) + sequence], length);
  }
};

}  // namespace fa
