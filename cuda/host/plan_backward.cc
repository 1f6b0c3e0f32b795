#include "host/plan_backward.h"

#include <algorithm>

#include "host/plan_support.h"
#include "host/registry.h"

namespace fa {
namespace {

// Queries, dO and the accumulator of the heads that run at the same time should stay in L2 (50 MB)
// with room for the rest.
constexpr int64_t kL2BytesForQueries = 32 << 20;
// More short heads of keys would fit, but are slower together (benchmarks/README.md).
constexpr int64_t kMostHeadsTogether = 16;
constexpr int64_t kMostWideHeadsTogether = 8;

constexpr int kMostParts = 8;  // of a split tile
// Time of a part beside its blocks, and of adding one part up, in blocks of queries.
constexpr double kBlocksPerPart = 3;
constexpr double kBlocksPerAddition = 1;
// What splitting has to gain to be worth its extra kernel node, which resets the counters.
constexpr double kLeastGain = 0.01;

// Positions are compared as sums of three lengths in 32 bits.
constexpr int64_t kMaxLength = int64_t{1} << 29;

// Among the rows that hold the call's columns the narrowest; of these the largest block of queries,
// which has the most work between two barriers, or with a bounded window the smallest, which masks
// least.
const BackwardKernel& choose_kernel(const BackwardProblem& problem, bool bounded) {
  const BackwardKernel* best = nullptr;
  const auto columns = [](const BackwardKernel& kernel) {
    return kernel.config.head_dim + kernel.config.head_dim_v;
  };
  for (const BackwardKernel& kernel : backward_kernels()) {
    const BackwardConfig& config = kernel.config;
    if (config.dtype != problem.dtype || config.head_dim < problem.head_dim ||
        config.head_dim_v < problem.head_dim_v) {
      continue;
    }
    const bool better =
        best == nullptr || columns(kernel) < columns(*best) ||
        (columns(kernel) == columns(*best) &&
         (bounded ? config.block_m < best->config.block_m : config.block_m > best->config.block_m));
    if (better) best = &kernel;
  }
  if (best == nullptr) throw NotCovered("no backward kernel of the table covers this call");
  return *best;
}

// The row of another operation that goes with a backward row.
template <typename Kernels, typename Config>
BackwardLaunch matching(const Kernels& kernels, const Config& config) {
  for (const auto& kernel : kernels) {
    if (kernel.config == config) return {kernel.name, kernel.symbol != nullptr, 0, 0, 0};
  }
  throw NotCovered("the table has no kernel that goes with the backward's");
}

// Equal tiles, `takers` at a time: the last round is seldom full. Whether its tiles, or those of the
// last two rounds, end sooner in parts, of which there may be `most_parts`. `blocks`: of a tile.
TileParts split_last_tiles(int64_t tiles, int64_t takers, int64_t blocks, int64_t parts_per_tile,
                           int64_t most_parts) {
  TileParts best{static_cast<int>(tiles), 1};
  const double whole = static_cast<double>(ceil_div(tiles, takers) * blocks);
  double least = (1 - kLeastGain) * whole;
  const int64_t full_rounds = tiles / takers;
  for (int64_t rounds = std::max<int64_t>(0, full_rounds - 1); rounds <= full_rounds; ++rounds) {
    const int64_t split_tiles = tiles - rounds * takers;
    for (int parts = 2; parts <= parts_per_tile && split_tiles * parts <= most_parts; ++parts) {
      const double time = static_cast<double>(rounds * blocks) +
                          static_cast<double>(ceil_div(split_tiles * parts, takers)) *
                              (static_cast<double>(blocks) / parts + kBlocksPerPart) +
                          parts * kBlocksPerAddition;
      if (time < least) {
        least = time;
        best = {static_cast<int>(rounds * takers), parts};
      }
    }
  }
  return best;
}

}  // namespace

BackwardPlan plan_backward(const BackwardProblem& problem, const DeviceInfo& device) {
  check_head_dim("head_dim", problem.head_dim);
  check_head_dim("head_dim_v", problem.head_dim_v);
  require(problem.qhead_per_khead >= 1, "qhead_per_khead", problem.qhead_per_khead, "1 or more");
  require(problem.window_left >= -1, "window_left", problem.window_left, "-1 or more");
  require(problem.window_right >= -1, "window_right", problem.window_right, "-1 or more");
  require(problem.sequences >= 0 && (problem.has_cu_seqlens || problem.sequences == 1), "sequences",
          problem.sequences, "1, or with cu_seqlens 0 or more");
  if (problem.seqlen_q > kMaxLength || problem.seqlen_k > kMaxLength ||
      problem.sequences > kMaxLength) {
    throw NotCovered("sequences are counted in 29 bits");
  }
  BackwardPlan plan;
  const int64_t farthest = problem.seqlen_q + problem.seqlen_k;
  plan.window_left = clip_window(problem.window_left, farthest);
  plan.window_right = clip_window(problem.window_right, farthest);
  const bool bounded = plan.window_left >= 0 || plan.window_right >= 0;
  const BackwardKernel& kernel = choose_kernel(problem, bounded);
  const BackwardConfig& config = kernel.config;
  plan.config = config;
  const int ctas = backward_ctas(config.head_dim);
  plan.main = {kernel.name,
               kernel.symbol != nullptr,
               0,
               backward_num_threads(config),
               backward_smem_bytes(config),
               ctas};
  plan.preprocess = matching(preprocess_kernels(), PreprocessConfig{config.dtype});
  plan.preprocess.num_threads = kPreprocessThreads;
  const PostprocessConfig postprocess{config.dtype, config.head_dim, config.block_m};
  plan.postprocess = matching(postprocess_kernels(), postprocess);
  plan.postprocess.num_threads = kPostprocessThreads;
  plan.postprocess.smem_bytes = postprocess_smem_bytes(postprocess);

  const int64_t group = problem.qhead_per_khead;
  const int64_t heads = problem.batch * problem.heads_kv;
  const int64_t q_slots =
      num_slots(problem.seqlen_q, problem.sequences, config.block_m, problem.has_cu_seqlens);
  const int64_t k_slots =
      num_slots(problem.seqlen_k, problem.sequences, config.block_n, problem.has_cu_seqlens);
  plan.q_slots = static_cast<int>(q_slots);
  plan.dq_accum_size = std::max<int64_t>(1, group * q_slots * config.block_m * config.head_dim);
  plan.statistics_size = std::max<int64_t>(1, group * q_slots * 2 * config.block_m);
  const bool varlen = problem.has_cu_seqlens || problem.has_seqused_q || problem.has_seqused_k;
  const bool may_split = config.splits_tiles() && !bounded && !varlen && !problem.deterministic;
  // The tile counter, and with `deterministic` the turns of each block, or the arrivals of the warps
  // at each tile that is split.
  const int64_t arrivals_per_tile = ctas * kBackwardConsumerWarps;
  plan.semaphore_size =
      1 + (problem.deterministic ? group * q_slots * backward_turns_per_block(config)
           : may_split           ? k_slots * arrivals_per_tile
                                 : 0);
  plan.num_tiles = k_slots * heads;
  const int64_t query_tiles = q_slots * heads * group;
  const int64_t preprocess_grid =
      query_tiles * preprocess_parts(config.block_m, static_cast<int>(problem.head_dim_v));
  if (plan.num_tiles > kInt32Max / 2 || preprocess_grid > kInt32Max) {
    throw NotCovered("tiles are counted in 30 bits");
  }
  const int64_t bytes_per_head = std::max<int64_t>(
      1, group * problem.seqlen_q *
             (6 * problem.head_dim + size_bytes(problem.dtype) * problem.head_dim_v));
  // CTAs, or clusters, that take tiles.
  const int64_t most_takers = std::max(1, device.num_sms / ctas);
  plan.split = {static_cast<int>(plan.num_tiles), 1};
  if (may_split && plan.num_tiles > 0) {
    // Partial dK and dV lie where dQ will be, which is written last.
    const int64_t dq_bytes =
        heads * group * problem.seqlen_q * problem.head_dim * size_bytes(problem.dtype);
    const int64_t part_bytes = int64_t{config.block_n} * (config.head_dim + config.head_dim_v) * 4;
    plan.split = split_last_tiles(plan.num_tiles, most_takers, group * q_slots,
                                  std::min<int64_t>(kMostParts, q_slots), dq_bytes / part_bytes);
  }
  const int64_t split_tiles = plan.num_tiles - plan.split.first_split;
  plan.num_tiles += split_tiles * (plan.split.parts - 1);
  const int64_t takers = std::min(plan.num_tiles, most_takers);
  plan.main.grid = static_cast<int>(takers * ctas);
  // Without bounds the tiles of a head visit the same blocks at the same time. One head at a time is
  // best for L2; but tiles that add in order are one block behind one another, and only as many as
  // come from different heads can start at once.
  const int64_t section =
      bounded                 ? std::min(kL2BytesForQueries / bytes_per_head,
                         config.wide() ? kMostWideHeadsTogether : kMostHeadsTogether)
      : problem.deterministic ? ceil_div<int64_t>(takers, k_slots + 1)
                              : 1;
  plan.order.row_blocks = static_cast<int>(k_slots);
  plan.order.heads = static_cast<int>(heads);
  plan.order.section_heads =
      static_cast<int>(std::max<int64_t>(1, std::min(std::max<int64_t>(1, section), heads)));
  // With a causal mask the first keys are seen by the most queries. Additions in order go from the
  // last keys to the first (dq_turn.cuh), and so must the tiles.
  plan.order.last_first = problem.deterministic;
  plan.dynamic = problem.deterministic || (plan.num_tiles > takers && (bounded || varlen));
  plan.semaphores_in_use = problem.deterministic ? heads * plan.semaphore_size
                           : split_tiles > 0     ? 1 + split_tiles * arrivals_per_tile
                           : plan.dynamic        ? 1
                                                 : 0;
  // Without a key or a query the kernels have nothing to add up, but dQ (dK and dV) are written.
  plan.preprocess.grid = problem.seqlen_k > 0 ? static_cast<int>(preprocess_grid) : 0;
  plan.postprocess.grid = problem.seqlen_k > 0 ? static_cast<int>(query_tiles) : 0;
  if (problem.seqlen_q == 0) plan.main.grid = 0;
  return plan;
}

}  // namespace fa
