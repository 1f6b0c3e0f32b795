#include "host/plan_forward.h"

#include <algorithm>
#include <array>

#include "host/plan_support.h"
#include "host/registry.h"

namespace fa {
namespace {

// Keys and values of the heads that run at the same time should stay in L2 (50 MB) with room for
// the rest. At D 256 twice as many heads are faster from 4,096 keys on all the same, and slower with
// 1,024 (benchmarks/README.md; not measured between).
constexpr int64_t kL2BytesForKeys = 32 << 20;
constexpr int64_t kBytesForWideLongKeys = 64 << 20;
constexpr int64_t kWideColumns = 384;  // of a key and its value; more are wide
constexpr int64_t kLongKeys = 4096;
// Heads of keys: at D 64 and 1,024 keys 64 together are faster than the 128 that would fit.
constexpr int64_t kMostHeadsTogether = 64;

// Positions are compared as sums of two lengths in 32 bits.
constexpr int64_t kMaxLength = int64_t{1} << 30;

// Rows of the tile for few queries: one warpgroup.
constexpr int64_t kFewRows = kRowsPerWarpgroup;

// What the call's lengths can be at most.
struct Bounds {
  int64_t seqlen_q;  // of a sequence
  int64_t seqlen_k;
  int64_t farthest_left;  // from any query to a key on its left
  int64_t farthest_right;
  int window_left;  // -1 where it excludes no key
  int window_right;

  bool windowed() const { return window_left >= 0 || window_right >= 0; }
};

Bounds bounds_of(const ForwardProblem& problem) {
  const auto longest = [&](int64_t total, int64_t max_seqlen) {
    return problem.has_cu_seqlens && max_seqlen >= 0 ? std::min(total, max_seqlen) : total;
  };
  Bounds bounds;
  bounds.seqlen_q = longest(problem.seqlen_q, problem.max_seqlen_q);
  bounds.seqlen_k = longest(problem.seqlen_k, problem.max_seqlen_k);
  bounds.farthest_left = (problem.top_left ? bounds.seqlen_q : bounds.seqlen_k) - 1;
  bounds.farthest_right = (problem.top_left ? bounds.seqlen_k : bounds.seqlen_q) - 1;
  bounds.window_left = clip_window(problem.window_left, bounds.farthest_left);
  bounds.window_right = clip_window(problem.window_right, bounds.farthest_right);
  return bounds;
}

// Among the rows that hold the call's columns the narrowest; of these the one for as many query
// rows; of these the largest tile, which loads and multiplies most per key block.
const ForwardKernel& choose_kernel(const ForwardProblem& problem, Output output, bool few_rows) {
  const auto worse = [&](const ForwardConfig& config) {
    return std::array{config.head_dim + config.head_dim_v,
                      (config.block_m == kFewRows) == few_rows ? 0 : 1, -config.block_m};
  };
  const ForwardKernel* best = nullptr;
  for (const ForwardKernel& kernel : forward_kernels()) {
    const ForwardConfig& config = kernel.config;
    if (config.dtype != problem.dtype || config.output != output ||
        config.head_dim < problem.head_dim || config.head_dim_v < problem.head_dim_v) {
      continue;
    }
    if (best == nullptr || worse(config) < worse(best->config)) best = &kernel;
  }
  if (best == nullptr) throw NotCovered("no forward kernel of the table covers this call");
  return *best;
}

// Rows of a tile when heads are packed: whole groups, one box of the tensor map; 0 if none fits.
int64_t packed_rows(int64_t block_m, int64_t group) { return block_m / group * group; }

bool choose_packing(const ForwardProblem& problem, const Bounds& bounds, int block_m) {
  const int64_t group = problem.qhead_per_khead;
  if (group == 1 || group > block_m || problem.pack_gqa == PackGqa::off) return false;
  if (problem.pack_gqa == PackGqa::on) return true;
  // A packed tile holds whole groups only, and its rows cost divisions: pack where it saves a tenth of
  // the tiles.
  const int64_t unpacked = group * ceil_div(bounds.seqlen_q, block_m);
  const int64_t packed = ceil_div(bounds.seqlen_q * group, packed_rows(block_m, group));
  return 10 * packed <= 9 * unpacked;
}

// Tiles of one split. What cuts packed sequences into tiles is known on the device only: here, as
// if all but the last tile of each were full.
int64_t expected_tiles(const ForwardProblem& problem, const Bounds& bounds, int64_t heads,
                       int64_t packed_heads, int64_t rows_per_tile) {
  if (!problem.has_cu_seqlens) {
    return problem.batch * heads * ceil_div(problem.seqlen_q * packed_heads, rows_per_tile);
  }
  const int64_t longest = ceil_div(bounds.seqlen_q * packed_heads, rows_per_tile);
  return problem.batch * heads *
         std::min(problem.sequences * longest,
                  problem.sequences + problem.seqlen_q * packed_heads / rows_per_tile);
}

// The smallest number of splits whose waves of tiles are nearly as full as those of any: see
// kernels.md for where it comes from.
int64_t choose_splits(const ForwardProblem& problem, const Bounds& bounds, int64_t tiles,
                      const ForwardConfig& config, int num_sms) {
  constexpr int64_t kMaxSplits = 128;
  const auto reach = [](int64_t window, int64_t farthest) {
    return window >= 0 ? window : farthest;
  };
  const int64_t keys = std::min(
      bounds.seqlen_k, reach(bounds.window_left, bounds.farthest_left) +
                           reach(bounds.window_right, bounds.farthest_right) + config.block_m);
  const int64_t blocks = ceil_div(keys, config.block_n);
  constexpr int64_t kFewKeys = 512;
  if (tiles == 0 || 10 * tiles >= 8 * num_sms || keys <= kFewKeys) return 1;
  // Partial results may take twice the memory of the final ones and 64 MiB.
  constexpr int64_t kFreeBytes = 64 << 20;
  const int64_t rows =
      problem.batch * problem.heads_kv * problem.qhead_per_khead * problem.seqlen_q;
  const int64_t partial_bytes = rows * 4 * (problem.head_dim_v + 1);
  const int64_t final_bytes = rows * (size_bytes(problem.dtype) * problem.head_dim_v + 4);
  const int64_t affordable = (2 * final_bytes + kFreeBytes) / partial_bytes;
  const int64_t most = std::min({kMaxSplits, blocks, affordable});
  const auto efficiency = [&](int64_t splits) {
    const int64_t count = tiles * splits;
    return static_cast<double>(count) / static_cast<double>(ceil_div(count, num_sms) * num_sms);
  };
  // More splits that leave the longest share as long gain nothing.
  const auto eligible = [&](int64_t splits) {
    return splits == 1 || ceil_div(blocks, splits) != ceil_div(blocks, splits - 1);
  };
  double best = 0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    if (eligible(splits)) best = std::max(best, efficiency(splits));
  }
  // The fewest that come close: merging costs as well. (65,536 keys, 8 heads: 14 splits, 0.85 of the
  // best, take 72 us, 16 take 68.)
  for (int64_t splits = 1; splits < most; ++splits) {
    if (eligible(splits) && efficiency(splits) >= 0.95 * best) return splits;
  }
  return std::max<int64_t>(most, 1);
}

// Items that a thread does not need cost as much time as those it does: the fewest with which the
// CTA looks at all segments at once.
const ScheduleKernel& choose_schedule(int64_t num_segments) {
  const std::vector<ScheduleKernel>& kernels = schedule_kernels();
  for (const ScheduleKernel& kernel : kernels) {
    if (int64_t{kernel.config.max_threads} * kernel.config.items >= num_segments) return kernel;
  }
  return kernels.back();
}

}  // namespace

ForwardPlan plan_forward(const ForwardProblem& problem, const DeviceInfo& device) {
  check_head_dim("head_dim", problem.head_dim);
  check_head_dim("head_dim_v", problem.head_dim_v);
  require(problem.qhead_per_khead >= 1, "qhead_per_khead", problem.qhead_per_khead, "1 or more");
  require(problem.window_left >= -1, "window_left", problem.window_left, "-1 or more");
  require(problem.window_right >= -1, "window_right", problem.window_right, "-1 or more");
  require(problem.num_splits >= kChooseSplits && problem.num_splits <= kCombineMaxSplits,
          "num_splits", problem.num_splits, "-1 to 256");
  if (problem.seqlen_q * problem.qhead_per_khead > kMaxLength || problem.seqlen_k > kMaxLength) {
    throw NotCovered("sequences are counted in 30 bits");
  }
  const Bounds bounds = bounds_of(problem);
  const int64_t group = problem.qhead_per_khead;
  ForwardPlan plan;
  plan.max_seqlen_q = static_cast<int>(bounds.seqlen_q);
  plan.max_seqlen_k = static_cast<int>(bounds.seqlen_k);
  plan.window_left = bounds.window_left;
  plan.window_right = bounds.window_right;

  // Tiles of final and partial results are alike.
  const Output output = problem.num_splits > 0 ? Output::partial : Output::final;
  const int full_block_m = choose_kernel(problem, output, false).config.block_m;
  plan.pack_gqa = choose_packing(problem, bounds, full_block_m);
  const int64_t packed_heads = plan.pack_gqa ? group : 1;
  // A tile holds at least one query's packed heads, also where no sequence has a query.
  const bool few_rows = std::max<int64_t>(bounds.seqlen_q, 1) * packed_heads <= kFewRows;
  const ForwardKernel* kernel = &choose_kernel(problem, output, few_rows);
  plan.num_splits = static_cast<int>(problem.num_splits);
  const auto rows_per_tile = [&] {
    const int block_m = kernel->config.block_m;
    return plan.pack_gqa ? packed_rows(block_m, group) : block_m;
  };
  const int64_t heads = problem.heads_kv * (plan.pack_gqa ? 1 : group);
  if (problem.num_splits == kChooseSplits) {
    const int64_t tiles = expected_tiles(problem, bounds, heads, packed_heads, rows_per_tile());
    const int64_t splits = choose_splits(problem, bounds, tiles, kernel->config, device.num_sms);
    plan.num_splits = splits == 1 ? 0 : static_cast<int>(splits);
    if (splits > 1) {
      kernel = &choose_kernel(problem, Output::partial, few_rows);
    }
  }
  plan.config = kernel->config;
  plan.kernel = kernel->name;
  plan.built = kernel->symbol != nullptr;
  plan.rows_per_tile = static_cast<int>(rows_per_tile());

  const int64_t splits = std::max(plan.num_splits, 1);
  int64_t row_blocks = ceil_div(problem.seqlen_q * packed_heads, plan.rows_per_tile);
  int64_t order_heads = heads * splits;
  const auto add_schedule = [&](int64_t num_segments) {
    const ScheduleKernel& schedule = choose_schedule(num_segments);
    plan.schedule_kernel = schedule.name;
    plan.built = plan.built && schedule.symbol != nullptr;
  };
  plan.workspace_size = Schedule::kHeaderSize;
  if (problem.has_cu_seqlens) {
    add_schedule(problem.batch * (problem.sequences + 2));
    plan.workspace_size = Schedule::size(problem.sequences);
    // Each segment may end with a tile that is not full.
    row_blocks += problem.sequences + 2;
    if (problem.batch * (problem.sequences + 2) > kInt32Max / 2) {
      throw NotCovered("packed sequences are counted in 30 bits");
    }
  } else {
    order_heads *= problem.batch;
  }
  plan.num_tiles = problem.batch * heads * splits * row_blocks;
  if (problem.seqlen_q == 0) plan.num_tiles = 0;
  if (plan.num_tiles > kInt32Max / 2) throw NotCovered("tiles are counted in 30 bits");

  // Without a causal mask all tiles are alike, and the fewest heads at a time are best for the
  // cache. With one, many heads' tiles from the longest to the shortest keep the multiprocessors
  // even.
  const bool longest_last = plan.window_right >= 0 && plan.window_left < 0;
  const int64_t bytes_per_head = std::max<int64_t>(
      1, bounds.seqlen_k * (problem.head_dim + problem.head_dim_v) * size_bytes(problem.dtype));
  const int64_t group_heads = plan.pack_gqa ? 1 : group;
  const bool wide_and_long =
      problem.head_dim + problem.head_dim_v > kWideColumns && bounds.seqlen_k >= kLongKeys;
  const int64_t bytes_together = wide_and_long ? kBytesForWideLongKeys : kL2BytesForKeys;
  const int64_t section =
      longest_last ? std::clamp<int64_t>(bytes_together / bytes_per_head, 1, kMostHeadsTogether) *
                         group_heads
                   : group_heads;
  plan.order.row_blocks = static_cast<int>(row_blocks);
  plan.order.heads = static_cast<int>(order_heads);
  plan.order.section_heads =
      static_cast<int>(std::max<int64_t>(1, std::min(section * splits, order_heads)));
  plan.order.last_first = longest_last;
  plan.keys_read_once = bounds.seqlen_q * packed_heads <= plan.rows_per_tile && group_heads == 1;
  plan.grid = static_cast<int>(std::min<int64_t>(plan.num_tiles, device.num_sms));
  plan.dynamic = problem.has_cu_seqlens ||
                 (plan.num_tiles > plan.grid &&
                  (bounds.windowed() || problem.has_seqused_q || problem.has_seqused_k));
  if (plan.dynamic && !problem.has_cu_seqlens) add_schedule(0);
  plan.num_threads = forward_num_threads(plan.config);
  plan.smem_bytes = forward_smem_bytes(plan.config);
  return plan;
}

}  // namespace fa
