// Kernel parameters of the backward: of the preprocess, the main kernel and the postprocess.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backward_maps.h"
#include "config.h"
#include "device/batch_map.h"

namespace fa {

// Operands in the batch map. The unit of a stride is a batch index of the operand for the arrays,
// an element for the descriptors. The arrays that the main kernel loads come first.
enum BackwardOperand {
  kBackwardQ,
  kBackwardK,
  kBackwardV,
  kBackwardDout,
  kBackwardOut,
  kBackwardLse,
  kBackwardDlse,
  kBackwardCuSeqlensQ,
  kBackwardCuSeqlensK,
  kBackwardSequsedQ,
  kBackwardSequsedK,
  kNumBackwardOperands
};

using BackwardBatchMap = BatchMap<kNumBackwardOperands>;

// The descriptors of all sequences; null where the call has none.
struct Sequences {
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;
  const int32_t* seqused_k;
  int num_sequences;
  int total_q;  // rows of the buffers
  int total_k;

  // Those of one batch index.
  FA_HOST_DEVICE Sequences of(const BackwardBatchMap& map, int batch) const {
    const auto at = [&](const int32_t* base, BackwardOperand operand) {
      return base == nullptr ? base : base + map.offset(operand, batch);
    };
    return {at(cu_seqlens_q, kBackwardCuSeqlensQ),
            at(cu_seqlens_k, kBackwardCuSeqlensK),
            at(seqused_q, kBackwardSequsedQ),
            at(seqused_k, kBackwardSequsedK),
            num_sequences,
            total_q,
            total_k};
  }
  FA_HOST_DEVICE Span queries(int sequence) const {
    return span_of(cu_seqlens_q, seqused_q, sequence, total_q);
  }
  FA_HOST_DEVICE Span keys(int sequence) const {
    return span_of(cu_seqlens_k, seqused_k, sequence, total_k);
  }
  FA_HOST_DEVICE bool packed() const { return cu_seqlens_q != nullptr; }
};

// Workspace of one query head: blocks of queries, numbered as slots.
//
//   statistics  (batch, head, slot, 2, block_m): LSE in base 2, +inf where the query sees nothing
//               or does not exist, so that its P is 0; delta = rowsum(dO * O) - dLSE
//   dq          (batch, head, slot, block_m * head_dim of the tile): order of dq_offset
struct BackwardWorkspace {
  float* statistics;
  float* dq;
  int q_slots;
};

struct PreprocessParams {
  const void* out;   // (batch, query, head, head_dim_v)
  const void* dout;  // likewise
  const float* lse;  // (batch, head, query)
  const float* dlse;
  BackwardWorkspace workspace;
  BackwardBatchMap batch_map;
  Sequences sequences;
  int heads;  // query heads per batch index
  int head_dim_v;
  int block_m;
  int dq_columns;  // of the accumulator: head_dim of the tile
};

struct PostprocessParams {
  void* dq;  // (batch, query, head, head_dim)
  BackwardWorkspace workspace;
  BackwardBatchMap batch_map;
  Sequences sequences;
  int heads;
  int head_dim;
  float scale;
};

struct BackwardParams {
  CUtensorMap q_tensor_map;     // (head_dim, group, query, head_kv, batch), boxes of block_m rows
  CUtensorMap dout_tensor_map;  // likewise
  CUtensorMap k_tensor_map;     // (head_dim, key, head_kv, batch), boxes of block_n keys
  CUtensorMap v_tensor_map;
  void* dk;  // (batch, key, head_kv, head_dim)
  void* dv;  // (batch, key, head_kv, head_dim_v)
  BackwardWorkspace workspace;
  BackwardBatchMap batch_map;
  Sequences sequences;
  TileOrder order;  // row blocks: slots of keys; heads: of keys, of all batch indices
  TileParts split;  // without `turns` and where all tiles are alike
  int num_tiles;    // with the parts of the split ones
  // Of the split tiles, (part number, CTA of the cluster, vector of dK's then dV's registers, thread,
  // 4): partial dK and dV.
  float* partials;
  int* arrivals;      // (split tile, CTA of the cluster, warp), 0 at the kernel's start
  int* tile_counter;  // null: CTA c takes tiles c, c + gridDim, ...; else 0 at the kernel's start.
                      // Never null with `turns`
  int* turns;  // (batch, head, slot, turn of the block), 0 at the kernel's start; null: dQ adds in
               // any order
  int heads_kv;  // per batch index
  int qhead_per_khead;
  int head_dim;
  int head_dim_v;
  int window_left;
  int window_right;
  bool top_left;
  bool softcapped;
  float scale;        // dK, of the sum of dS^T Q
  float scale_log2;   // logit in base 2 = q.k * scale_log2, or with a softcap
  float tanh_factor;  // tanh(q.k * tanh_factor) * softcap_log2
  float softcap_log2;
};

}  // namespace fa
