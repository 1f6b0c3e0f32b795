// Finds the tiles of the stand-alone epilogue, in the producer warp, from lengths on the device.
//
// CTA c takes tiles c, c + gridDim, c + 2 gridDim, ... of a fixed order: batch, sequence, row block, head
// (fastest, so that the CTAs that run together complete whole rows of O).
//
// Dense: tile = ((batch * row_blocks) + row_block) * heads_kv + head.
//
// Varlen: the output buffer of one batch index is cut into spans 0 .. S + 1: the gap before the first
// sequence, the S sequences, the gap after the last. With e_s = clip(max(cu_seqlens[0..s]), 0, seqlen)
// and e_{S+1} = seqlen, span s is [e_{s-1}, e_s): whatever cu_seqlens holds, spans are disjoint and cover
// the buffer. The warp walks all spans in groups of 32, a lane each, with a running maximum and a
// prefix sum of tiles over the lanes. A CTA's tiles only go up, so each group is visited once.
#pragma once

#include "device/epilogue/output_tile.cuh"
#include "device/epilogue/params.h"

namespace fa {

template <int kBlockM>
class TileScheduler {
 public:
  __device__ TileScheduler(const EpilogueParams& params, int lane)
      : params_(params), lane_(lane), next_tile_(blockIdx.x) {}

  // The CTA's next tile and the number of its sequence; false when there is none. Warp-uniform.
  __device__ bool next(OutputTile& tile, int& sequence) {
    const bool found = params_.cu_seqlens ? next_varlen(tile, sequence) : next_dense(tile, sequence);
    next_tile_ += gridDim.x;
    return found;
  }

 private:
  __device__ int group_size() const { return params_.output.qhead_per_khead.divisor; }

  __device__ void set_rows(OutputTile& tile, int row_block, int num_rows, int num_valid) const {
    tile.row_begin = row_block * kBlockM;
    tile.num_rows = min(num_rows - tile.row_begin, kBlockM);
    tile.num_valid = max(min(num_valid - tile.row_begin, kBlockM), 0);
  }

  __device__ bool next_dense(OutputTile& tile, int& sequence) const {
    const int row_blocks = (params_.rows - 1) / kBlockM + 1;
    const int64_t row = next_tile_ / params_.heads_kv;
    tile.head_kv = static_cast<int>(next_tile_ - row * params_.heads_kv);
    if (row >= int64_t{params_.batch} * row_blocks) return false;
    tile.batch = static_cast<int>(row / row_blocks);
    int num_valid = params_.rows;
    if (params_.seqused) {
      const int used = params_.seqused[params_.batch_map.offset(kSeqused, tile.batch)];
      num_valid = min(max(used, 0), params_.seqlen) * group_size();
    }
    sequence = 0;
    tile.query_begin = 0;
    set_rows(tile, static_cast<int>(row - int64_t{tile.batch} * row_blocks), params_.rows, num_valid);
    return true;
  }

  __device__ bool next_varlen(OutputTile& tile, int& sequence) {
    while (next_tile_ >= group_tiles_end_) {
      if (!advance_group()) return false;
    }
    // The span of the tile is the first whose inclusive prefix exceeds the tile's number.
    const int owner = __ffs(__ballot_sync(~0u, tiles_end_ > next_tile_)) - 1;
    const int64_t index = next_tile_ - __shfl_sync(~0u, tiles_end_ - num_tiles_, owner);
    const int row_block = static_cast<int>(index / params_.heads_kv);
    tile.head_kv = static_cast<int>(index - int64_t{row_block} * params_.heads_kv);
    tile.batch = __shfl_sync(~0u, batch_, owner);
    tile.query_begin = __shfl_sync(~0u, begin_, owner);
    sequence = __shfl_sync(~0u, span_, owner) - 1;
    set_rows(tile, row_block, __shfl_sync(~0u, num_rows_, owner), __shfl_sync(~0u, num_valid_, owner));
    return true;
  }

  // Loads the next 32 spans; false when none is left.
  __device__ bool advance_group() {
    const int64_t spans_per_batch = int64_t{params_.sequences} + 2;
    if (next_span_ >= int64_t{params_.batch} * spans_per_batch) return false;
    const int64_t index = next_span_ + lane_;
    batch_ = static_cast<int>(index / spans_per_batch);
    span_ = static_cast<int>(index - batch_ * spans_per_batch);
    const bool exists = batch_ < params_.batch;
    int end = params_.seqlen;
    if (exists && span_ <= params_.sequences) {
      const int offset = params_.cu_seqlens[params_.batch_map.offset(kCuSeqlens, batch_) + span_];
      end = min(max(offset, 0), params_.seqlen);
    }
    // Running maximum that starts anew with each batch index, which is the key's upper half.
    int64_t key = int64_t{batch_} << 32 | end;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, key, step);
      if (lane_ >= step) key = max(key, other);
    }
    key = max(key, last_key_);
    int64_t previous_key = __shfl_up_sync(~0u, key, 1);
    if (lane_ == 0) previous_key = last_key_;
    last_key_ = __shfl_sync(~0u, key, kWarpSize - 1);
    if (exists && key >> 32 == batch_) end = static_cast<int>(key & 0xffffffff);
    begin_ = span_ == 0 ? 0 : static_cast<int>(previous_key & 0xffffffff);

    num_rows_ = exists ? (end - begin_) * group_size() : 0;
    num_valid_ = 0;
    if (exists && span_ >= 1 && span_ <= params_.sequences) {
      num_valid_ = min(num_rows_, params_.rows);
      if (params_.seqused) {
        const int used =
            params_.seqused[params_.batch_map.offset(kSeqused, batch_) + span_ - 1];
        num_valid_ = min(num_valid_, min(max(used, 0), params_.seqlen) * group_size());
      }
    }
    num_tiles_ = int64_t{(num_rows_ + kBlockM - 1) / kBlockM} * params_.heads_kv;
    tiles_end_ = num_tiles_;
#pragma unroll
    for (int step = 1; step < kWarpSize; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, tiles_end_, step);
      if (lane_ >= step) tiles_end_ += other;
    }
    tiles_end_ += group_tiles_end_;
    group_tiles_end_ = __shfl_sync(~0u, tiles_end_, kWarpSize - 1);
    next_span_ += kWarpSize;
    return true;
  }

  const EpilogueParams& params_;
  const int lane_;
  int64_t next_tile_;
  // Varlen: the group's spans, one per lane, and what the groups before it add up to.
  int64_t next_span_ = 0;
  int64_t group_tiles_end_ = 0;
  int64_t last_key_ = 0;
  int64_t num_tiles_ = 0;
  int64_t tiles_end_ = 0;  // inclusive prefix sum over all spans so far
  int batch_ = 0;
  int span_ = 0;
  int begin_ = 0;
  int num_rows_ = 0;
  int num_valid_ = 0;
};

}  // namespace fa
