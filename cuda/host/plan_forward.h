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
  Output output = Output::final;
  int64_t batch = 1;  // product of the leading batch axes of the result
  int64_t heads_kv = 1;
  int64_t qhead_per_khead = 1;
  int64_t seqlen_q = 0;
  int64_t seqlen_k = 0;
  int64_t head_dim = 0;
  int64_t head_dim_v = 0;
  int64_t window_left = -1;   // -1: unbounded
  int64_t window_right = -1;  // causal: 0
  bool top_left = false;      // alignment of the window
  bool has_seqused_q = false;
  bool has_seqused_k = false;
  float softmax_scale = 1.f;
  float softcap = 0.f;  // 0: none
  PackGqa pack_gqa = PackGqa::automatic;
};

struct ForwardPlan {
  ForwardConfig config;
  std::string kernel;
  bool built;
  bool pack_gqa;    // the heads of a group share a tile's rows
  bool tma_store;   // otherwise O leaves through the predicated path
  int window_left;  // -1 where it excludes no key
  int window_right;
  bool dynamic;  // tiles differ in length: a counter on the device hands them out
  TileOrder order;
  int64_t num_tiles;
  int grid;  // 0: nothing to do, no launch
  int num_threads;
  int smem_bytes;
};

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceInfo& device);

}  // namespace fa
