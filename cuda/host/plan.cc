#include "host/plan.h"

#include <algorithm>

#include "host/plan_support.h"
#include "host/registry.h"

namespace fa {
namespace {

// The narrowest kernel of the table that holds the call's columns.
template <typename Kernels, typename Matches>
const auto& narrowest(const Kernels& kernels, int64_t head_dim, Matches matches) {
  auto best = kernels.end();
  for (auto kernel = kernels.begin(); kernel != kernels.end(); ++kernel) {
    if (kernel->config.head_dim < head_dim || !matches(kernel->config)) continue;
    if (best == kernels.end() || kernel->config.head_dim < best->config.head_dim) best = kernel;
  }
  if (best == kernels.end()) throw NotCovered("no kernel of the table covers this call");
  return *best;
}

}  // namespace

EpiloguePlan plan_epilogue(const EpilogueProblem& problem) {
  check_head_dim("head_dim", problem.head_dim);
  require(problem.qhead_per_khead >= 1, "qhead_per_khead", problem.qhead_per_khead, "1 or more");
  require(problem.column_order == ColumnOrder::plain || problem.head_dim % 16 == 0, "head_dim",
          problem.head_dim, "multiples of 16 with fp8_permuted_columns");
  for (const int64_t count :
       {problem.batch, problem.sequences, problem.rows, problem.seqlen * problem.qhead_per_khead}) {
    if (count > kInt32Max)
      throw NotCovered("batch, sequences and rows are counted in 31 bits each");
  }
  const EpilogueKernel& kernel =
      narrowest(epilogue_kernels(), problem.head_dim, [&](const EpilogueConfig& config) {
        return config.out_dtype == problem.out_dtype && config.column_order == problem.column_order;
      });
  EpiloguePlan plan;
  plan.config = kernel.config;
  plan.kernel = kernel.name;
  plan.built = kernel.symbol != nullptr;
  plan.row_blocks =
      static_cast<int>(ceil_div(problem.seqlen * problem.qhead_per_khead, plan.config.block_m));
  const int64_t grid = problem.batch * problem.heads_kv * plan.row_blocks;
  if (grid > kInt32Max) throw NotCovered("CTAs of the epilogue are counted in 31 bits");
  plan.grid = static_cast<int>(grid);
  plan.num_threads = epilogue_num_threads(plan.config);
  plan.smem_bytes = epilogue_smem_bytes(plan.config);
  return plan;
}

CombinePlan plan_combine(const CombineProblem& problem) {
  check_head_dim("head_dim", problem.head_dim);
  require(problem.num_splits >= 1 && problem.num_splits <= kCombineMaxSplits, "num_splits",
          problem.num_splits, "1 to 256");
  const CombineKernel& kernel =
      narrowest(combine_kernels(), problem.head_dim,
                [&](const CombineConfig& config) { return config.out_dtype == problem.out_dtype; });
  CombinePlan plan;
  plan.config = kernel.config;
  plan.kernel = kernel.name;
  plan.built = kernel.symbol != nullptr;
  for (const int64_t count : {problem.batch, problem.heads, problem.seqlen}) {
    if (count > kInt32Max) throw NotCovered("batch, heads and queries are counted in 31 bits each");
  }
  const auto tasks = [&](int queries) {
    return problem.batch * problem.heads * ceil_div(problem.seqlen, queries);
  };
  // Many queries make the kernel memory-bound; few, as of decode, leave nothing but latency, which
  // more warps with less work each shorten.
  constexpr int64_t kWarpsAtOnce = 132 * kCombineBlocksPerSm * kCombineWarps;
  const int few = combine_few_queries(plan.config.head_dim);
  plan.queries_per_warp = tasks(few) <= kWarpsAtOnce ? few : kCombineRowsPerWarp;
  plan.seqlen_blocks = static_cast<int>(ceil_div(problem.seqlen, plan.queries_per_warp));
  const int64_t num_tasks = tasks(plan.queries_per_warp);
  if (num_tasks > kInt32Max) throw NotCovered("tasks of the combine are counted in 31 bits");
  plan.num_tasks = static_cast<int>(num_tasks);
  plan.grid = static_cast<int>(ceil_div(plan.num_tasks, kCombineWarps));
  plan.num_threads = kCombineWarps * kWarpSize;
  plan.smem_bytes = combine_smem_bytes(static_cast<int>(problem.num_splits));
  return plan;
}

}  // namespace fa
