// What a backward call gets; see plan.h.
#pragma once

#include "backward_maps.h"
#include "host/plan_forward.h"

namespace fa {

struct BackwardProblem {
  DataType dtype;
  int64_t batch = 1;  // product of the leading batch axes of the results
  int64_t heads_kv = 1;
  int64_t qhead_per_khead = 1;
  int64_t sequences = 1;  // 1 unless packed
  int64_t seqlen_q = 0;   // packed: rows of the buffer
  int64_t seqlen_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t window_left = -1;   // -1: unbounded
  int64_t window_right = -1;  // causal: 0
  bool top_left = false;      // alignment of the window
  bool has_cu_seqlens = false;
  bool has_seqused_q = false;
  bool has_seqused_k = false;
  bool deterministic = false;
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0: none
};

// One of the three launches.
struct BackwardLaunch {
  std::string kernel;
  bool built;
  int grid;  // 0: nothing to do, no launch
  int num_threads;
  int smem_bytes;
  int cluster = 1;  // CTAs of one; the grid is a multiple
};

struct BackwardPlan {
  BackwardConfig config;
  BackwardLaunch preprocess;
  BackwardLaunch main;
  BackwardLaunch postprocess;
  int window_left;  // -1 where it excludes no key
  int window_right;
  bool dynamic;  // tiles differ in length or wait for each other: a counter hands them out
  TileOrder order;
  TileParts split;    // `first_split`: num_tiles where no tile is split
  int64_t num_tiles;  // with the parts of the split ones
  int q_slots;        // blocks of queries of a head in the workspace
  // Elements of the workspaces per batch index and key head. The accumulator of dQ is as large as Q
  // in fp32, rounded up to whole blocks of block_m rows and tile columns, packed with one more block
  // per sequence.
  int64_t dq_accum_size;
  int64_t statistics_size;
  int64_t semaphore_size;
  // Of all batch indices and heads together, so many have to be 0 before the main kernel starts.
  int64_t semaphores_in_use;
};

BackwardPlan plan_backward(const BackwardProblem& problem, const DeviceInfo& device);

}  // namespace fa
