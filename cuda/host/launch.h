// The only launches: a plan and the call's pointers in, kernel parameters and TMA descriptors made,
// the kernel put on the stream. Nothing here allocates, synchronises, prints or reads device
// memory.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>

#include "device/backward/params.h"
#include "device/batch_map.h"
#include "device/combine/params.h"
#include "device/epilogue/params.h"
#include "device/forward/params.h"
#include "host/plan.h"
#include "host/plan_backward.h"
#include "host/plan_forward.h"

namespace fa {

// What only the device could tell; the message carries the kernel's name and CUDA's own text.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct EpilogueArguments {
  EpilogueProblem problem;
  const float* acc;
  const float* statistic[2];  // lse, null; or row_max, row_sum
  const int32_t* cu_seqlens;  // null without
  const int32_t* seqused;     // null without
  void* o;
  float* lse;
  BatchMap<kNumEpilogueOperands> batch_map;
};

void launch_epilogue(const EpilogueArguments& arguments, cudaStream_t stream);

struct CombineArguments {
  CombineProblem problem;
  const float* out_partial;
  const float* lse_partial;
  void* out;
  float* lse;
  BatchMap<kNumCombineOperands> batch_map;
  int64_t split_stride[kNumCombineOperands];
};

void launch_combine(const CombineArguments& arguments, cudaStream_t stream);

struct ForwardArguments {
  ForwardProblem problem;
  const void* q;
  const void* k;
  const void* v;
  const int32_t* cu_seqlens_q;  // null when dense
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;  // null without
  const int32_t* seqused_k;  // null without
  void* o;
  float* lse;
  int* workspace;
  size_t workspace_size;  // integers
  int inner_batch;        // size of the innermost batch axis
  BatchMap<kNumForwardOperands> batch_map;
  int64_t batches[3];  // batch indices that q, k, v hold
};

void launch_forward(const ForwardArguments& arguments, cudaStream_t stream);

struct BackwardArguments {
  BackwardProblem problem;
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const void* dout;
  const float* lse;
  const float* dlse;
  const int32_t* cu_seqlens_q;  // null without
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_q;
  const int32_t* seqused_k;
  void* dq;
  void* dk;
  void* dv;
  // Workspaces, sized as the plan says.
  float* dq_accum;
  float* statistics;
  int* semaphores;
  BackwardBatchMap batch_map;
  int64_t batches[4];  // batch indices that q, k, v, dout hold
};

void launch_backward(const BackwardArguments& arguments, cudaStream_t stream);

// Test hook: the next launch asks for more shared memory than any device has.
void fail_next_launch();

}  // namespace fa
