#include "host/launch_support.h"
#include "host/registry.h"
#include "index_maps.h"

namespace fa {
namespace {

template <typename Kernels, typename Params>
void launch_part(const BackwardLaunch& part, const Kernels& kernels, const Params& params,
                 cudaStream_t stream) {
  if (part.grid == 0) return;
  launch_kernel(part.kernel, symbol_of(kernels, part.kernel), part.grid, part.num_threads,
                part.smem_bytes, &params, stream, LaunchOrder::after_previous, part.cluster);
}

}  // namespace

void launch_backward(const BackwardArguments& arguments, cudaStream_t stream) {
  const BackwardProblem& problem = arguments.problem;
  const BackwardPlan plan = plan_backward(problem, check_device());
  const BackwardConfig& config = plan.config;
  const int64_t group = problem.qhead_per_khead;
  const int64_t heads_q = problem.heads_kv * group;
  const int64_t element = size_bytes(problem.dtype);
  const int64_t query_rows = problem.batch * problem.seqlen_q * heads_q;
  const int64_t key_rows = problem.batch * problem.seqlen_k * problem.heads_kv;

  const bool nothing_visible = problem.seqlen_q == 0 || problem.seqlen_k == 0;
  // Packed, which rows belong to no sequence is known on the device only.
  if (problem.has_cu_seqlens || nothing_visible) {
    const auto zero = [&](void* target, int64_t rows, int64_t columns) {
      if (rows == 0) return;
      check(cudaMemsetAsync(target, 0, static_cast<size_t>(rows * columns * element), stream),
            "zeroing the gradients");
    };
    zero(arguments.dq, query_rows, problem.head_dim);
    zero(arguments.dk, key_rows, problem.head_dim);
    zero(arguments.dv, key_rows, problem.head_dim_v);
    if (nothing_visible || problem.sequences == 0 || problem.batch * problem.heads_kv == 0) return;
  }
  if (problem.batch * problem.heads_kv == 0) return;

  const Sequences sequences{arguments.cu_seqlens_q,
                            arguments.cu_seqlens_k,
                            arguments.seqused_q,
                            arguments.seqused_k,
                            static_cast<int>(problem.sequences),
                            static_cast<int>(problem.seqlen_q),
                            static_cast<int>(problem.seqlen_k)};
  const BackwardWorkspace workspace{arguments.statistics, arguments.dq_accum, plan.q_slots};

  if (plan.semaphores_in_use > 0) {
    check(cudaMemsetAsync(arguments.semaphores, 0,
                          static_cast<size_t>(plan.semaphores_in_use) * sizeof(int), stream),
          "resetting the semaphores");
  }

  PreprocessParams preprocess = {};
  preprocess.out = arguments.out;
  preprocess.dout = arguments.dout;
  preprocess.lse = arguments.lse;
  preprocess.dlse = arguments.dlse;
  preprocess.workspace = workspace;
  preprocess.batch_map = arguments.batch_map;
  preprocess.sequences = sequences;
  preprocess.heads = static_cast<int>(heads_q);
  preprocess.head_dim_v = static_cast<int>(problem.head_dim_v);
  preprocess.block_m = config.block_m;
  preprocess.dq_columns = config.head_dim;
  launch_part(plan.preprocess, preprocess_kernels(), preprocess, stream);

  BackwardParams params = {};
  const CUtensorMapDataType type = tensor_map_type(problem.dtype);
  constexpr int kBytes = 2;
  const auto queries_map = [&](const void* base, int64_t head_dim, int64_t batches, int panel) {
    const int64_t query_stride = heads_q * head_dim;
    return tensor_map<5>(
        plan.main.kernel, type, kBytes, base,
        {head_dim, group, problem.seqlen_q, problem.heads_kv, batches},
        {head_dim, query_stride, group * head_dim, problem.seqlen_q * query_stride},
        {panel, 1, config.block_m, 1, 1}, kBytes * panel);
  };
  const auto keys_map = [&](const void* base, int64_t head_dim, int64_t batches, int panel) {
    const int64_t key_stride = problem.heads_kv * head_dim;
    return tensor_map<4>(plan.main.kernel, type, kBytes, base,
                         {head_dim, problem.seqlen_k, problem.heads_kv, batches},
                         {key_stride, head_dim, problem.seqlen_k * key_stride},
                         {panel, config.keys_per_cta(), 1, 1}, kBytes * panel);
  };
  const int panel = backward_panel_columns(config, config.head_dim);
  const int panel_v = backward_panel_columns(config, config.head_dim_v);
  params.q_tensor_map =
      queries_map(arguments.q, problem.head_dim, arguments.batches[kBackwardQ], panel);
  params.dout_tensor_map =
      queries_map(arguments.dout, problem.head_dim_v, arguments.batches[kBackwardDout], panel_v);
  params.k_tensor_map =
      keys_map(arguments.k, problem.head_dim, arguments.batches[kBackwardK], panel);
  params.v_tensor_map =
      keys_map(arguments.v, problem.head_dim_v, arguments.batches[kBackwardV], panel_v);
  params.dk = arguments.dk;
  params.dv = arguments.dv;
  params.workspace = workspace;
  params.batch_map = arguments.batch_map;
  params.sequences = sequences;
  params.order = plan.order;
  params.split = plan.split;
  params.num_tiles = static_cast<int>(plan.num_tiles);
  // The postprocess writes dQ when the main kernel is done: until then its memory is free.
  params.partials = static_cast<float*>(arguments.dq);
  params.arrivals = arguments.semaphores + 1;
  params.tile_counter = plan.dynamic ? arguments.semaphores : nullptr;
  // The first semaphore is the tile counter.
  params.turns = problem.deterministic ? arguments.semaphores + 1 : nullptr;
  params.heads_kv = static_cast<int>(problem.heads_kv);
  params.qhead_per_khead = static_cast<int>(group);
  params.head_dim = static_cast<int>(problem.head_dim);
  params.head_dim_v = static_cast<int>(problem.head_dim_v);
  params.window_left = plan.window_left;
  params.window_right = plan.window_right;
  params.top_left = problem.top_left;
  params.softcapped = problem.softcap > 0.f;
  params.scale = problem.softmax_scale;
  params.scale_log2 = problem.softmax_scale * kLog2E;
  if (params.softcapped) {
    params.tanh_factor = problem.softmax_scale / problem.softcap;
    params.softcap_log2 = problem.softcap * kLog2E;
  }
  launch_part(plan.main, backward_kernels(), params, stream);

  PostprocessParams postprocess = {};
  postprocess.dq = arguments.dq;
  postprocess.workspace = workspace;
  postprocess.batch_map = arguments.batch_map;
  postprocess.sequences = sequences;
  postprocess.heads = static_cast<int>(heads_q);
  postprocess.head_dim = static_cast<int>(problem.head_dim);
  postprocess.scale = problem.softmax_scale;
  launch_part(plan.postprocess, postprocess_kernels(), postprocess, stream);
}

}  // namespace fa
