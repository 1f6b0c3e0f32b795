// The config structs: what a plan answers at run time and the only template argument of a kernel at
// compile time. Also the few sizes that follow from a config and that host and device both need.
// No CUDA here.
#pragma once

#include "index_maps.h"

namespace fa {

enum class DataType { bf16, f16, f32 };

constexpr int size_bytes(DataType type) { return type == DataType::f32 ? 4 : 2; }

constexpr const char* name(DataType type) {
  return type == DataType::bf16 ? "bf16" : type == DataType::f16 ? "f16" : "f32";
}

// Order of the accumulator's columns: plain, or as the in-kernel transposition of fp8 V leaves
// them.
enum class ColumnOrder { plain, fp8 };

constexpr const char* name(ColumnOrder order) {
  return order == ColumnOrder::plain ? "plain" : "fp8";
}

inline constexpr float kLog2E = 1.44269504f;

inline constexpr int kWarpSize = 32;
inline constexpr int kWarpgroupSize = 128;
inline constexpr int kRowsPerWarp = 16;  // of a wgmma accumulator
inline constexpr int kRowsPerWarpgroup = 64;
inline constexpr int kMaxSmemBytes = 227 * 1024;  // of a CTA

// ---- Epilogue ------------------------------------------------------------------------------------

struct EpilogueConfig {
  DataType out_dtype;
  int head_dim;  // columns of the tile; the call's head_dim may be smaller
  ColumnOrder column_order;
  int block_m;  // rows of a CTA
  int blocks_per_sm;
  bool operator==(const EpilogueConfig&) const = default;
};

// The accumulator, and a barrier per warp.
constexpr int epilogue_smem_bytes(const EpilogueConfig& config) {
  return config.block_m * acc_pitch_bytes(config.head_dim) + config.block_m / kRowsPerWarp * 8;
}

constexpr int epilogue_num_threads(const EpilogueConfig& config) {
  return config.block_m / kRowsPerWarp * kWarpSize;
}

// ---- Combine -------------------------------------------------------------------------------------

struct CombineConfig {
  DataType out_dtype;
  int head_dim;  // columns of a row's thread group; the call's head_dim may be smaller
  bool operator==(const CombineConfig&) const = default;
};

inline constexpr int kCombineWarps = 8;        // each an independent worker
inline constexpr int kCombineRowsPerWarp = 4;  // at most; consecutive queries of one head
inline constexpr int kCombineBlocksPerSm = 4;
inline constexpr int kCombineMaxSplits = 256;

// Queries of a warp where there are few: as many as its lanes hold with 16 bytes each.
constexpr int combine_few_queries(int head_dim) {
  const int queries = kWarpSize * 4 / head_dim;
  return queries < 1 ? 1 : queries < kCombineRowsPerWarp ? queries : kCombineRowsPerWarp;
}

constexpr int combine_smem_bytes(int num_splits) {
  return kCombineWarps * kCombineRowsPerWarp * (num_splits + 1) * 4;
}

// ---- Schedule of packed sequences ----------------------------------------------------------------

struct ScheduleConfig {
  int max_threads;  // of the only CTA
  int items;        // segments per thread
  bool operator==(const ScheduleConfig&) const = default;
};

// No more threads than there is work for: few start and meet faster.
constexpr int schedule_num_threads(const ScheduleConfig& config, int num_segments) {
  const int warps = ceil_div(num_segments > 0 ? num_segments : 1, kWarpSize * config.items);
  return warps * kWarpSize < config.max_threads ? warps * kWarpSize : config.max_threads;
}

// ---- Forward ------------------------------------------------------------------------------------

// Where a tile's result goes: 16-bit O, or fp32 O of one split of the key axis.
enum class Output { final, partial };

constexpr const char* name(Output output) { return output == Output::final ? "final" : "partial"; }

struct ForwardConfig {
  DataType dtype;
  int head_dim;    // columns of Q and K in the tile; the call's may be fewer
  int head_dim_v;  // columns of V and O in the tile; the call's may be fewer
  Output output;
  int block_m;  // query rows of a tile
  int block_n;  // keys of a block
  int stages;   // of the rings of K and V
  bool operator==(const ForwardConfig&) const = default;
};

// Tiles that a CTA knows at a time: the one it works on and the next.
inline constexpr int kForwardTileSlots = 2;
inline constexpr int kForwardTileBytes = 160;
inline constexpr int kForwardWindowBytes = 8 * kWarpSize + 8;

// Full and empty barriers of K, V and Q per stage; of each tile slot full, empty and V's tail.
constexpr int forward_barrier_bytes(const ForwardConfig& config, int q_stages) {
  return 8 * (4 * config.stages + 2 * q_stages + 3 * kForwardTileSlots);
}

// First and last key of each row.
constexpr int forward_mask_bytes(const ForwardConfig& config) { return 8 * config.block_m; }

constexpr int forward_smem_bytes(const ForwardConfig& config, int q_stages) {
  const int q_bytes = q_stages * config.block_m * config.head_dim * 2;
  const int kv_bytes = config.stages * config.block_n * (config.head_dim + config.head_dim_v) * 2;
  // Rounded up to the alignment of the swizzled tiles, as the struct in shared memory is.
  return (q_bytes + kv_bytes + forward_mask_bytes(config) +
          forward_barrier_bytes(config, q_stages) + kForwardTileSlots * kForwardTileBytes +
          kForwardWindowBytes + 1023) /
         1024 * 1024;
}

// Two tiles' Q where there is room: that of the next one arrives early.
constexpr int forward_q_stages(const ForwardConfig& config) {
  return forward_smem_bytes(config, 2) <= kMaxSmemBytes ? 2 : 1;
}

constexpr int forward_smem_bytes(const ForwardConfig& config) {
  return forward_smem_bytes(config, forward_q_stages(config));
}

constexpr int forward_num_warpgroups(const ForwardConfig& config) {
  return config.block_m / kRowsPerWarpgroup;
}

// The consumer warpgroups and one more for the warps that keep them supplied.
constexpr int forward_num_threads(const ForwardConfig& config) {
  return (forward_num_warpgroups(config) + 1) * kWarpgroupSize;
}

// ---- Backward ------------------------------------------------------------------------------------

// CTAs that share a tile, a cluster: they add up dQ before it goes to global memory, and twice as many
// keys halve the additions there.
constexpr int backward_ctas(int head_dim) { return head_dim > 128 ? 2 : 1; }

struct BackwardConfig {
  DataType dtype;
  int head_dim;    // columns of Q, K, dQ, dK in the tile; the call's may be fewer
  int head_dim_v;  // columns of V, dO, dV in the tile; the call's may be fewer
  int block_m;     // queries of a block
  int block_n;     // keys of a tile
  int stages;      // of the rings of Q and dO

  // dK and dV of wide heads do not fit into the registers that own 64 keys: the warpgroups share 64
  // keys and split queries and columns, and a tile is the work of two CTAs. Otherwise the warpgroups
  // split the tile's keys.
  constexpr bool wide() const { return backward_ctas(head_dim) > 1; }
  constexpr int keys_per_cta() const { return block_n / backward_ctas(head_dim); }
  // Whether the last tiles of a launch may be split (TileParts). With 64 columns the code for it
  // changes the main loop's registers, which costs more than it gains.
  constexpr bool splits_tiles() const { return head_dim > 64; }
  bool operator==(const BackwardConfig&) const = default;
};

inline constexpr int kBackwardWarpgroups = 2;  // of a CTA
inline constexpr int kBackwardConsumerWarps = kBackwardWarpgroups * (kWarpgroupSize / kWarpSize);

inline constexpr int kBackwardTileBytes = 112;  // what a tile consists of

// Warpgroups that share a block of dQ.
constexpr int backward_dq_warpgroups(int head_dim) {
  return backward_ctas(head_dim) * kBackwardWarpgroups;
}

// Columns of a panel of an operand in shared memory: panels end where a warpgroup's share does.
constexpr int backward_panel_columns(const BackwardConfig& config, int head_dim) {
  return config.wide() ? panel_columns(head_dim / kBackwardWarpgroups) : 64;
}

// Counters that order the additions to a block of dQ: one where a single warp adds the block, one
// per warp where each adds the rows it holds.
constexpr int backward_turns_per_block(const BackwardConfig& config) {
  return config.wide() ? backward_ctas(config.head_dim) * kBackwardConsumerWarps : 1;
}

// Full and empty barriers of Q and dO per stage, of the two tiles, of K and V (empty together), of
// dQ per warpgroup where it goes through shared memory, otherwise of dS and of the other CTA's dS and
// K; the tile that is loaded, the next tile's number and its barriers; the tiles.
constexpr int backward_barrier_bytes(const BackwardConfig& config) {
  const int dq_barriers = config.wide() ? 4 : 2 * kBackwardWarpgroups;
  return 8 * (4 * config.stages + dq_barriers + 4 + 3 + 1 + 3) + 2 * kBackwardTileBytes;
}

constexpr int backward_smem_bytes(const BackwardConfig& config) {
  const int keys = config.keys_per_cta();
  // With a cluster also the other CTA's K, the columns of this one's dQ.
  const int kv_bytes =
      keys * (config.head_dim + config.head_dim_v + (config.wide() ? config.head_dim / 2 : 0)) * 2;
  const int stage_bytes = config.block_m * (config.head_dim + config.head_dim_v) * 2;
  // dS in two stages, or P, dS and the other CTA's dS.
  const int ds_bytes = (config.wide() ? 3 : 2) * config.block_m * keys * 2;
  const int dq_bytes = config.wide() ? 0 : config.block_m * config.head_dim * 4;
  // LSE and delta of each query of a stage, the queries that see each warpgroup's keys.
  const int statistics_bytes = config.stages * config.block_m * 8;
  const int mask_bytes = kBackwardWarpgroups * kRowsPerWarpgroup * 8;
  return (kv_bytes + config.stages * stage_bytes + ds_bytes + dq_bytes + statistics_bytes +
          mask_bytes + backward_barrier_bytes(config) + 1023) /
         1024 * 1024;
}

// The consumer warpgroups and one more for the producers, the scheduler and the adder of dQ.
constexpr int backward_num_threads(const BackwardConfig&) {
  return (kBackwardWarpgroups + 1) * kWarpgroupSize;
}

// What precedes the backward: delta and LSE of each query, dQ's accumulator zeroed.
struct PreprocessConfig {
  DataType dtype;
  bool operator==(const PreprocessConfig&) const = default;
};

inline constexpr int kPreprocessThreads = 256;
// Rows that a thread loads its parts of before it uses any.
inline constexpr int kPreprocessRowsPerThread = 4;

// Lanes that share a row of O and dO, with 16 bytes each.
FA_HOST_DEVICE constexpr int preprocess_lanes(int head_dim_v) {
  return head_dim_v <= 64 ? 8 : head_dim_v <= 128 ? 16 : 32;
}

// Rows of a CTA, of one block of queries.
FA_HOST_DEVICE constexpr int preprocess_rows(int block_m, int head_dim_v) {
  const int rows = kPreprocessRowsPerThread * kPreprocessThreads / preprocess_lanes(head_dim_v);
  return rows < block_m ? rows : block_m;
}

// CTAs of a block of queries.
FA_HOST_DEVICE constexpr int preprocess_parts(int block_m, int head_dim_v) {
  return ceil_div(block_m, preprocess_rows(block_m, head_dim_v));
}

// What follows it: dQ's accumulator -> dQ.
struct PostprocessConfig {
  DataType dtype;
  int head_dim;  // of the backward's tile
  int block_m;
  bool operator==(const PostprocessConfig&) const = default;
};

constexpr int postprocess_pitch_bytes(const PostprocessConfig& config) {
  return 2 * config.head_dim + 16;
}

constexpr int postprocess_smem_bytes(const PostprocessConfig& config) {
  return config.block_m * postprocess_pitch_bytes(config);
}

inline constexpr int kPostprocessThreads = kBackwardWarpgroups * kWarpgroupSize;

}  // namespace fa
