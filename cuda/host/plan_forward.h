// What a forward call gets; see plan.h.
#pragma once

#include "forward_maps.h"
#include "host/plan.h"

namespace fa {

struct DeviceInfo {
  int num_sms = 132;
};

enum class PackGqa { automatic = -1, off = 0, on = 1 };

struct ForwardProblem {
  DataType dtype;
  int64_t batch = 1;  // product of the leading batch axes of the result
  int64_t heads_kv = 1;
  int64_t qhead_per_khead = 1;
  int64_t sequences = 1;  // packed in one batch index; 1 when dense
  int64_t seqlen_q = 0;   // tokens of a batch index: of all its sequences when packed
  int64_t seqlen_k = 0;
  int64_t max_seqlen_q = -1;  // packed: longer sequences are cut off; -1: the whole buffer
  int64_t max_seqlen_k = -1;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t window_left = -1;   // -1: unbounded
  int64_t window_right = -1;  // causal: 0
  bool top_left = false;      // alignment of the window
  bool has_cu_seqlens = false;
  bool has_seqused_q = false;
  bool has_seqused_k = false;
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0: none
  PackGqa pack_gqa = PackGqa::automatic;
  // 0: final results. 1 or more: partial results of so many splits of the keys. kChooseSplits: the
  // plan chooses between final results and 2 or more splits.
  int64_t num_splits = 0;
};

inline constexpr int64_t kChooseSplits = -1;

struct ForwardPlan {
  ForwardConfig config;
  std::string kernel;
  std::string schedule_kernel;  // finds packed sequences and resets the counter first; empty: none
  bool built;
  bool pack_gqa;      // the heads of a group share a tile's rows
  int num_splits;     // 0: final results
  int rows_per_tile;  // block_m, or with packed heads the whole groups in it
  int max_seqlen_q;   // no sequence counts for more
  int max_seqlen_k;
  int window_left;  // -1 where it excludes no key
  int window_right;
  bool dynamic;  // tiles differ in length: a counter on the device hands them out
  bool keys_read_once;
  TileOrder order;         // packed: its row_blocks differ from sequence to sequence
  int64_t num_tiles;       // packed: at most
  int64_t workspace_size;  // integers per batch index; of a struct Schedule
  int grid;                // 0: nothing to do, no launch
  int num_threads;
  int smem_bytes;
};

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceInfo& device);

}  // namespace fa
