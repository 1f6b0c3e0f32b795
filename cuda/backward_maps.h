// Which blocks the backward visits, where a sequence's blocks lie in the workspace, and how the
// accumulator of dQ is arranged. Pure functions, so that the tests check them exhaustively on a
// CPU; plan and kernels call nothing else to find a block or an element.
#pragma once

#include <cstdint>

#include "forward_maps.h"

namespace fa {

// ---- Queries that see a key ---------------------------------------------------------------------

// Queries [begin, end); none where end <= begin.
struct QueryRange {
  int begin;
  int end;
};

FA_HOST_DEVICE constexpr QueryRange visible_queries(const Window& window, int seqlen_q,
                                                    int seqlen_k, int key) {
  if (key >= seqlen_k) return {0, 0};
  const int diagonal = key - window.shift;
  QueryRange range{0, seqlen_q};
  if (window.right >= 0 && diagonal - window.right > 0) range.begin = diagonal - window.right;
  if (window.left >= 0 && diagonal + window.left + 1 < seqlen_q) {
    range.end = diagonal + window.left + 1;
  }
  return range;
}

// The queries that see any key at all.
FA_HOST_DEVICE constexpr QueryRange seeing_queries(const Window& window, int seqlen_q,
                                                   int seqlen_k) {
  if (seqlen_k <= 0) return {0, 0};
  QueryRange range{0, seqlen_q};
  if (window.right >= 0 && window.shift + window.right < 0) {
    range.begin = -(window.shift + window.right);
  }
  if (window.left >= 0 && seqlen_k + window.left - window.shift < seqlen_q) {
    range.end = seqlen_k + window.left - window.shift;
  }
  return range;
}

// Query blocks [begin, end) that a block of keys visits, and among them [full_begin, full_end),
// where every query before the sequence's end sees every key: the others need a mask.
struct QueryBlocks {
  int begin;
  int end;
  int full_begin;
  int full_end;

  FA_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
  FA_HOST_DEVICE constexpr bool masked(int block) const {
    return block < full_begin || block >= full_end;
  }
};

// For the block of keys first ... first + block_n - 1, which may reach past the sequence's end.
FA_HOST_DEVICE constexpr QueryBlocks query_blocks(const Window& window, int seqlen_q, int seqlen_k,
                                                  int first, int block_m, int block_n) {
  const bool whole = first + block_n <= seqlen_k;
  const int last = (whole ? first + block_n : seqlen_k) - 1;
  if (last < first) return {0, 0, 0, 0};
  const QueryRange of_first = visible_queries(window, seqlen_q, seqlen_k, first);
  const QueryRange of_last = visible_queries(window, seqlen_q, seqlen_k, last);
  // Both bounds grow with the key: the first key's begin and the last one's end span the block.
  if (of_last.end <= of_first.begin) return {0, 0, 0, 0};
  QueryBlocks blocks{of_first.begin / block_m, (of_last.end + block_m - 1) / block_m, 0, 0};
  if (!whole) return blocks;
  blocks.full_begin = (of_last.begin + block_m - 1) / block_m;
  // Queries past the sequence's end have P = 0 without a mask.
  blocks.full_end = of_first.end >= seqlen_q ? blocks.end
                    : of_first.end > 0       ? of_first.end / block_m
                                             : 0;
  return blocks;
}

// Tiles of equal length seldom fill the last round of all CTAs. The last ones may therefore be split
// by queries: each part takes the place of a tile, and the parts' dK and dV are added up
// (device/backward/partial_gradients.cuh).
struct TileParts {
  int first_split;  // tiles before it are whole
  int parts;        // of each of the others
};

// Number `number` of a launch: a tile, and which of its parts; `part_number` counts the parts of all
// split tiles, and is -1 with a whole tile.
struct TilePart {
  int tile;
  int part;
  int part_number;
};

FA_HOST_DEVICE constexpr TilePart tile_part(const TileParts& split, int number) {
  if (number < split.first_split) return {number, 0, -1};
  const int part_number = number - split.first_split;
  const int of_split = part_number / split.parts;
  return {split.first_split + of_split, part_number - of_split * split.parts, part_number};
}

// The part's share of the tile's blocks, of which there are less than 2^31 / parts.
FA_HOST_DEVICE constexpr QueryBlocks blocks_of_part(const QueryBlocks& blocks, int part,
                                                    int parts) {
  const auto cut = [&](int n) { return blocks.begin + (blocks.end - blocks.begin) * n / parts; };
  QueryBlocks share{cut(part), cut(part + 1), blocks.full_begin, blocks.full_end};
  if (share.full_begin < share.begin) share.full_begin = share.begin;
  if (share.full_end > share.end) share.full_end = share.end;
  return share;
}

// The last block of keys that visits query block `block`, of those that visit it: the largest n with
// begin <= block < end of query_blocks(n * block_n).
FA_HOST_DEVICE constexpr int last_visitor(const Window& window, int seqlen_q, int seqlen_k,
                                          int block, int block_m, int block_n) {
  const int past = block * block_m + block_m;
  const int last_query = (past < seqlen_q ? past : seqlen_q) - 1;
  return (visible_keys(window, seqlen_k, last_query).end - 1) / block_n;
}

// ---- Sequences and the workspace ----------------------------------------------------------------

// A sequence's rows in the buffer of its operand.
struct Span {
  int begin;
  int length;
};

// From the descriptors, whatever they hold: never outside [0, total). `cu_seqlens`, `seqused`: null
// without.
FA_HOST_DEVICE constexpr Span span_of(const int32_t* cu_seqlens, const int32_t* seqused,
                                      int sequence, int total) {
  Span span{0, total};
  if (cu_seqlens != nullptr) {
    const int begin = cu_seqlens[sequence];
    const int end = cu_seqlens[sequence + 1];
    span.begin = begin < 0 ? 0 : begin < total ? begin : total;
    const int clamped_end = end < total ? end : total;
    span.length = clamped_end > span.begin ? clamped_end - span.begin : 0;
  }
  if (seqused != nullptr) {
    const int used = seqused[sequence];
    span.length = used < 0 ? 0 : used < span.length ? used : span.length;
  }
  return span;
}

// Sequences are cut into blocks of `block` rows, each sequence from its own first row, and the
// blocks of all sequences of an operand are numbered: a sequence that begins at row r of the buffer
// has its first block at number r / block + sequence. Sequences that do not overlap have no number
// in common, and some numbers have no block.
FA_HOST_DEVICE constexpr int64_t num_slots(int64_t total, int64_t sequences, int block,
                                           bool packed) {
  return packed ? total / block + sequences : (total + block - 1) / block;
}

FA_HOST_DEVICE constexpr int first_slot(int begin, int sequence, int block) {
  return begin / block + sequence;
}

// The sequence that block number `slot` belongs to and its first row in it. Sequence -1: none.
struct SlotPosition {
  int sequence;
  int row_begin;
};

FA_HOST_DEVICE constexpr SlotPosition slot_position(const int32_t* cu_seqlens, int num_sequences,
                                                    int total, int slot, int block) {
  if (cu_seqlens == nullptr) return {0, slot * block};
  const auto first = [&](int sequence) {
    const int begin = cu_seqlens[sequence];
    return first_slot(begin < 0 ? 0 : begin < total ? begin : total, sequence, block);
  };
  const int sequence = find_sequence(first, num_sequences, slot);
  if (sequence < 0 || sequence >= num_sequences) return {-1, 0};
  return {sequence, (slot - first(sequence)) * block};
}

// ---- The accumulator of dQ ----------------------------------------------------------------------

// How the warpgroups share a block of dQ: by rows of 64 queries, by columns, by rows and, the
// warpgroups of a CTA having half of the columns, by columns; or, where the rows are no multiple of
// 64, transposed and by columns.
enum class DqSplit { rows, columns, rows_and_columns, transposed };

FA_HOST_DEVICE constexpr DqSplit dq_split(int block_m, int warpgroups) {
  return block_m == 64 * warpgroups       ? DqSplit::rows
         : block_m == 64                  ? DqSplit::columns
         : 2 * block_m == 64 * warpgroups ? DqSplit::rows_and_columns
                                          : DqSplit::transposed;
}

// Row and column of register `index` of consumer thread `thread`, with a cluster of all its CTAs.
FA_HOST_DEVICE constexpr TileCoordinate dq_coordinate(int thread, int index, int block_m,
                                                      int head_dim, int warpgroups) {
  const int warpgroup = thread / 128;
  const TileCoordinate at = accumulator_coordinate(thread % 128, index);
  switch (dq_split(block_m, warpgroups)) {
    case DqSplit::rows:
      return {at.row + 64 * warpgroup, at.column};
    case DqSplit::columns:
      return {at.row, at.column + head_dim / warpgroups * warpgroup};
    case DqSplit::rows_and_columns: {
      const int rows = warpgroups / 2;
      return {at.row + 64 * (warpgroup % rows), at.column + head_dim / 2 * (warpgroup / rows)};
    }
    default: {
      // A warpgroup holds head_dim / (64 * warpgroups) slices of 64 columns, one after the other.
      const int slice = index / (block_m / 2);
      const TileCoordinate in_slice = accumulator_coordinate(thread % 128, index % (block_m / 2));
      return {in_slice.column, in_slice.row + 64 * slice + head_dim / warpgroups * warpgroup};
    }
  }
}

// Where it lies in the block's memory: as the threads write it, 16 bytes each, side by side.
FA_HOST_DEVICE constexpr int dq_offset(int thread, int index, int block_m, int head_dim,
                                       int warpgroups) {
  const int per_warpgroup = block_m * head_dim / warpgroups;
  return thread / 128 * per_warpgroup + index / 4 * 512 + thread % 128 * 4 + index % 4;
}

}  // namespace fa
