#include "host/plan_forward.h"

#include <algorithm>

#include "host/plan_support.h"
#include "host/registry.h"

namespace fa {
namespace {

// Keys and values of the heads that run at the same time should stay in L2 (50 MB) with room for
// the rest.
constexpr int64_t kL2BytesForKeys = 32 << 20;

// Positions are compared as sums of two lengths in 32 bits.
constexpr int64_t kMaxLength = int64_t{1} << 30;

// Among the rows that hold the call's columns the narrowest; of these the largest block of keys,
// which has the most work between two barriers, or with a bounded window the smallest, which masks
// least.
const ForwardKernel& choose_kernel(const ForwardProblem& problem, bool bounded) {
  const ForwardKernel* best = nullptr;
  const auto columns = [](const ForwardKernel& kernel) {
    return kernel.config.head_dim + kernel.config.head_dim_v;
  };
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& config = kernel.config;
    if (config.dtype != problem.dtype || config.output != problem.output ||
        config.head_dim < problem.head_dim || config.head_dim_v < problem.head_dim_v) {
      continue;
    }
    const bool better =
        best == nullptr || columns(kernel) < columns(*best) ||
        (columns(kernel) == columns(*best) &&
         (bounded ? config.block_n < best->config.block_n : config.block_n > best->config.block_n));
    if (better) best = &kernel;
  }
  if (best == nullptr) throw NotCovered("no forward kernel of the table covers this call");
  return *best;
}

bool choose_packing(const ForwardProblem& problem, int block_m) {
  const int64_t group = problem.qhead_per_khead;
  // A tile takes whole groups, one box of the tensor map.
  if (group == 1 || block_m % group != 0 || problem.pack_gqa == PackGqa::off) return false;
  if (problem.pack_gqa == PackGqa::on) return true;
  // Packed O takes the slower predicated path: pack where it saves a tenth of the tiles.
  const int64_t unpacked = group * ceil_div(problem.seqlen_q, block_m);
  const int64_t packed = ceil_div(problem.seqlen_q * group, block_m);
  return 10 * packed <= 9 * unpacked;
}

}  // namespace

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  check_head_dim("head_dim", problem.head_dim);
  check_head_dim("head_dim_v", problem.head_dim_v);
  require(problem.qhead_per_khead >= 1, "qhead_per_khead", problem.qhead_per_khead, "1 or more");
  require(problem.window_left >= -1, "window_left", problem.window_left, "-1 or more");
  require(problem.window_right >= -1, "window_right", problem.window_right, "-1 or more");
  if (problem.seqlen_q * problem.qhead_per_khead > kMaxLength || problem.seqlen_k > kMaxLength) {
    throw NotCovered("sequences are counted in 30 bits");
  }
  ForwardPlan plan;
  // A window that reaches past any position bounds nothing.
  const int64_t farthest = problem.seqlen_q + problem.seqlen_k;
  const auto clip = [&](int64_t window) {
    return window > farthest ? -1 : static_cast<int>(window);
  };
  plan.window_left = clip(problem.window_left);
  plan.window_right = clip(problem.window_right);
  const bool bounded = plan.window_left >= 0 || plan.window_right >= 0;
  const ForwardKernel& kernel = choose_kernel(problem, bounded);
  plan.config = kernel.config;
  plan.kernel = kernel.name;
  plan.built = kernel.symbol != nullptr;
  plan.pack_gqa = choose_packing(problem, plan.config.block_m);
  plan.tma_store = plan.config.output == Output::final && !plan.pack_gqa && !problem.has_seqused_q;

  const int64_t group = problem.qhead_per_khead;
  const int64_t rows = problem.seqlen_q * (plan.pack_gqa ? group : 1);
  const int64_t heads = problem.batch * problem.heads_kv * (plan.pack_gqa ? 1 : group);
  const int64_t row_blocks = ceil_div(rows, plan.config.block_m);
  plan.num_tiles = row_blocks * heads;
  if (plan.num_tiles > kInt32Max / 2) throw NotCovered("tiles are counted in 30 bits");
  // Without a causal mask all tiles are alike, and the fewest heads at a time are best for the
  // cache. With one, many heads' tiles from the longest to the shortest keep the multiprocessors
  // even.
  const bool longest_last = plan.window_right >= 0 && plan.window_left < 0;
  const int64_t bytes_per_head = std::max<int64_t>(
      1, problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size_bytes(problem.dtype));
  const int64_t group_heads = plan.pack_gqa ? 1 : group;
  const int64_t section = longest_last
                              ? std::max<int64_t>(1, kL2BytesForKeys / bytes_per_head) * group_heads
                              : group_heads;
  plan.order.row_blocks = static_cast<int>(row_blocks);
  plan.order.heads = static_cast<int>(heads);
  plan.order.section_heads = static_cast<int>(std::max<int64_t>(1, std::min(section, heads)));
  plan.order.last_first = longest_last;
  plan.grid = static_cast<int>(std::min<int64_t>(plan.num_tiles, device.num_sms));
  plan.dynamic =
      plan.num_tiles > plan.grid && (bounded || problem.has_seqused_q || problem.has_seqused_k);
  plan.num_threads = forward_num_threads(plan.config);
  plan.smem_bytes = forward_smem_bytes(plan.config);
  return plan;
}

}  // namespace fa
