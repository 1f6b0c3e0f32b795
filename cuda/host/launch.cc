#include "host/launch_support.h"
#include "host/registry.h"

namespace fa {

void launch_epilogue(const EpilogueArguments& arguments, cudaStream_t stream) {
  const EpilogueProblem& problem = arguments.problem;
  const EpiloguePlan plan = plan_epilogue(problem);
  if (plan.grid == 0) return;
  check_device();
  const void* const symbol = symbol_of(epilogue_kernels(), plan.kernel);

  EpilogueParams params = {};
  params.output = output_params({arguments.o, arguments.lse, problem.batch, problem.seqlen,
                                 problem.heads_kv * problem.qhead_per_khead, problem.head_dim,
                                 problem.qhead_per_khead});
  params.batch_map = arguments.batch_map;
  params.acc = arguments.acc;
  params.statistic[0] = arguments.statistic[0];
  params.statistic[1] = arguments.statistic[1];
  params.cu_seqlens = arguments.cu_seqlens;
  params.seqused = arguments.seqused;
  params.heads_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_kv));
  params.row_blocks = cutlass::FastDivmod(plan.row_blocks);
  params.sequences = static_cast<int>(problem.sequences);
  params.seqlen_acc = static_cast<int>(problem.rows / problem.qhead_per_khead);
  params.seqlen = static_cast<int>(problem.seqlen);
  launch(plan, symbol, params, stream);
}

void launch_combine(const CombineArguments& arguments, cudaStream_t stream) {
  const CombineProblem& problem = arguments.problem;
  const CombinePlan plan = plan_combine(problem);
  if (plan.grid == 0) return;
  check_device();
  const void* const symbol = symbol_of(combine_kernels(), plan.kernel);

  CombineParams params = {};
  params.out_partial = arguments.out_partial;
  params.lse_partial = arguments.lse_partial;
  params.out = arguments.out;
  params.lse = arguments.lse;
  params.batch_map = arguments.batch_map;
  for (int operand = 0; operand < kNumCombineOperands; ++operand) {
    params.split_stride[operand] = arguments.split_stride[operand];
  }
  params.queries_per_warp = plan.queries_per_warp;
  params.num_tasks = plan.num_tasks;
  params.seqlen_blocks = cutlass::FastDivmod(plan.seqlen_blocks);
  params.heads = cutlass::FastDivmod(static_cast<int>(problem.heads));
  params.seqlen = static_cast<int>(problem.seqlen);
  params.head_dim = static_cast<int>(problem.head_dim);
  params.num_splits = static_cast<int>(problem.num_splits);
  launch(plan, symbol, params, stream, LaunchOrder::waits_itself);
}

}  // namespace fa
