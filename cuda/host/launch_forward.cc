#include <algorithm>
#include <cfloat>
#include <cmath>

#include "device/schedule/params.h"
#include "host/launch_support.h"
#include "host/plan_support.h"
#include "host/registry.h"
#include "index_maps.h"

namespace fa {
namespace {

// The softmax takes its maximum over scores and scales by a positive number afterwards: a negative
// or vanishing scale moves into the score.
void set_scale(ForwardParams& params, float softmax_scale, float softcap) {
  if (softcap > 0.f) {
    params.transform = ScoreTransform::softcap;
    params.factor = softmax_scale / softcap;
    params.logit_unit = softcap;
  } else if (softmax_scale >= FLT_MIN) {
    params.transform = ScoreTransform::none;
    params.factor = 1.f;
    params.logit_unit = softmax_scale;
  } else {
    params.transform = ScoreTransform::multiply;
    params.factor = softmax_scale;
    params.logit_unit = 1.f;
  }
  params.logit_unit_log2 = params.logit_unit * kLog2E;
}

// Finds the packed sequences, if there are any, and resets the tile counter. (A memset would do for
// the counter alone, but the forward cannot start under one.)
void launch_schedule(const ForwardArguments& arguments, const ForwardPlan& plan,
                     const ForwardParams& forward, cudaStream_t stream) {
  ScheduleParams params = {forward, arguments.cu_seqlens_q, arguments.cu_seqlens_k};
  params.forward.schedule.workspace = arguments.workspace;
  for (const ScheduleKernel& kernel : schedule_kernels()) {
    if (plan.schedule_kernel != kernel.name) continue;
    launch_kernel(kernel.name, symbol_of(schedule_kernels(), kernel.name), 1,
                  schedule_num_threads(kernel.config, forward.schedule.num_segments), 0, &params,
                  stream);
  }
}

}  // namespace

void launch_forward(const ForwardArguments& arguments, cudaStream_t stream) {
  const ForwardProblem& problem = arguments.problem;
  const ForwardPlan plan = plan_forward(problem, check_device());
  if (plan.grid == 0) return;
  require(static_cast<int64_t>(arguments.workspace_size) >= problem.batch * plan.workspace_size,
          "workspace", static_cast<int64_t>(arguments.workspace_size),
          "what the plan says, or more");
  const void* const symbol = symbol_of(forward_kernels(), plan.kernel);
  const ForwardConfig& config = plan.config;
  const int64_t group = problem.qhead_per_khead;

  ForwardParams params = {};
  // Without a key no tile reads anything, and an empty buffer has no descriptor.
  if (problem.seqlen_k > 0) {
    const CUtensorMapDataType type = tensor_map_type(problem.dtype);
    constexpr int kBytes = 2;
    const int64_t q_query_stride = problem.heads_kv * group * problem.head_dim;
    const int panel = panel_columns(config.head_dim);
    const int box_group = plan.pack_gqa ? static_cast<int>(group) : 1;
    params.q_tensor_map = tensor_map<5>(
        plan.kernel, type, kBytes, arguments.q,
        {problem.head_dim, group, problem.seqlen_q, problem.heads_kv, arguments.batches[kQ]},
        {problem.head_dim, q_query_stride, group * problem.head_dim,
         problem.seqlen_q * q_query_stride},
        {panel, box_group, plan.rows_per_tile / box_group, 1, 1}, kBytes * panel);
    const auto keys_map = [&](const void* base, int64_t head_dim, int64_t batches,
                              int tile_columns) {
      const int64_t key_stride = problem.heads_kv * head_dim;
      const int columns = panel_columns(tile_columns);
      return tensor_map<4>(plan.kernel, type, kBytes, base,
                           {head_dim, problem.seqlen_k, problem.heads_kv, batches},
                           {key_stride, head_dim, problem.seqlen_k * key_stride},
                           {columns, config.block_n, 1, 1}, kBytes * columns);
    };
    params.k_tensor_map =
        keys_map(arguments.k, problem.head_dim, arguments.batches[kK], config.head_dim);
    params.v_tensor_map =
        keys_map(arguments.v, problem.head_dim_v, arguments.batches[kV], config.head_dim_v);
  }
  const int64_t num_splits = std::max(plan.num_splits, 1);
  params.output =
      output_params({arguments.o, arguments.lse, problem.batch * num_splits, problem.seqlen_q,
                     problem.heads_kv * group, problem.head_dim_v, plan.pack_gqa ? group : 1});
  params.batch_map = arguments.batch_map;
  params.order = plan.order;
  params.rows_per_tile = plan.rows_per_tile;
  params.heads = static_cast<int>(problem.heads_kv * (plan.pack_gqa ? 1 : group));
  params.qhead_per_khead = static_cast<int>(group);
  params.num_splits = static_cast<int>(num_splits);
  params.inner_batch = arguments.inner_batch;
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.seqlen_k = static_cast<int>(problem.seqlen_k);
  params.max_seqlen_q = plan.max_seqlen_q;
  params.max_seqlen_k = plan.max_seqlen_k;
  params.seqused_q = arguments.seqused_q;
  params.seqused_k = arguments.seqused_k;
  params.window_left = plan.window_left;
  params.window_right = plan.window_right;
  params.top_left = problem.top_left;
  params.keys_read_once = plan.keys_read_once;
  set_scale(params, problem.softmax_scale, problem.softcap);
  if (plan.dynamic) params.tile_counter = arguments.workspace + Schedule::kTileCounter;
  if (problem.has_cu_seqlens) {
    const int batch_segments = static_cast<int>(problem.sequences + 2);
    params.schedule = {arguments.workspace, static_cast<int>(problem.batch) * batch_segments,
                       batch_segments};
  } else {
    params.num_tiles = static_cast<int>(plan.num_tiles);
  }
  LaunchOrder order = LaunchOrder::after_previous;
  if (!plan.schedule_kernel.empty()) {
    launch_schedule(arguments, plan, params, stream);
    order = LaunchOrder::waits_itself;
  }
  launch(plan, symbol, params, stream, order);
}

}  // namespace fa
