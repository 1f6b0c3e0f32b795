// Which tiles and which key blocks the forward visits, and in which order. Pure functions, so that
// the tests check them exhaustively on a CPU; plan and kernel call nothing else to find a tile or a
// block.
#pragma once

#include <cstdint>

#include "index_maps.h"

namespace fa {

FA_HOST_DEVICE constexpr int clip(int value, int limit) {
  return value < 0 ? 0 : value < limit ? value : limit;
}

// ---- Keys a query sees --------------------------------------------------------------------------

// Query i sees key j where i + shift - left <= j <= i + shift + right and 0 <= j < seqlen_k.
struct Window {
  int left;   // -1: unbounded
  int right;  // -1: unbounded
  int shift;  // key on the diagonal of query 0: seqlen_k - seqlen_q bottom-right, 0 top-left
};

// Keys [begin, end); none where end <= begin.
struct KeyRange {
  int begin;
  int end;
};

FA_HOST_DEVICE constexpr KeyRange visible_keys(const Window& window, int seqlen_k, int query) {
  const int diagonal = query + window.shift;
  KeyRange range{0, seqlen_k};
  if (window.left >= 0 && diagonal - window.left > 0) range.begin = diagonal - window.left;
  if (window.right >= 0 && diagonal + window.right + 1 < seqlen_k) {
    range.end = diagonal + window.right + 1;
  }
  return range;
}

// A thread of a consumer warpgroup holds the columns 8 g and 8 g + 1, g = 0, 1, ..., of a row of S,
// counted from its first. How many of them, in this order, lie before `column`?
FA_HOST_DEVICE constexpr int score_elements_before(int column) {
  if (column <= 0) return 0;
  const int rest = column % 8;
  return column / 8 * 2 + (rest < 2 ? rest : 2);
}

// The lowest `count` bits of a word: none for a negative count, all from 32 on.
FA_HOST_DEVICE constexpr uint32_t lowest_bits(int count) {
  return count <= 0 ? 0 : ~uint32_t{0} >> (count < 32 ? 32 - count : 0);
}

// Key blocks [begin, end) that a tile visits, and among them [full_begin, full_end), where every
// query of the tile sees every key: the others need a mask.
struct KeyBlocks {
  int begin;
  int end;
  int full_begin;
  int full_end;

  FA_HOST_DEVICE constexpr bool empty() const { return end <= begin; }
  FA_HOST_DEVICE constexpr bool masked(int block) const {
    return block < full_begin || block >= full_end;
  }
};

// For the tile of queries first ... last (inclusive).
FA_HOST_DEVICE constexpr KeyBlocks key_blocks(const Window& window, int seqlen_k, int first,
                                              int last, int block_n) {
  const KeyRange of_first = visible_keys(window, seqlen_k, first);
  const KeyRange of_last = visible_keys(window, seqlen_k, last);
  // Both bounds grow with the query: the first query's begin and the last one's end span the tile.
  if (last < first || of_last.end <= of_first.begin) return {0, 0, 0, 0};
  KeyBlocks blocks{of_first.begin / block_n, ceil_div(of_last.end, block_n), 0, 0};
  blocks.full_begin = ceil_div(of_last.begin, block_n);
  blocks.full_end = of_first.end > 0 ? of_first.end / block_n : 0;
  return blocks;
}

// The share of split `split` in a tile's key blocks. Shares are equal up to rounding; the last ones
// may be smaller, or empty.
FA_HOST_DEVICE constexpr KeyBlocks split_blocks(KeyBlocks blocks, int split, int num_splits) {
  if (blocks.empty()) return {0, 0, 0, 0};
  const int share = ceil_div(blocks.end - blocks.begin, num_splits);
  const int begin = blocks.begin + split * share;
  if (begin >= blocks.end) return {0, 0, 0, 0};
  blocks.begin = begin;
  if (begin + share < blocks.end) blocks.end = begin + share;
  return blocks;
}

// Some rows of a tile, which would visit `own` if they were alone. What they visit of the tile's
// blocks: they leave out the last ones, of which they see no key, but not the first one, so that
// there is a block to begin with.
FA_HOST_DEVICE constexpr KeyBlocks share_of_rows(KeyBlocks tile, const KeyBlocks& own) {
  if (own.end < tile.end) tile.end = own.end > tile.begin ? own.end : tile.begin + 1;
  tile.full_begin = own.full_begin > tile.begin ? own.full_begin : tile.begin;
  tile.full_end = own.full_end;
  return tile;
}

// Where partial results of a split lie, in matrices of one batch index: the axis of the splits is
// outside the innermost batch axis, whose size is `inner_batch`.
FA_HOST_DEVICE constexpr int partial_batch(int batch, int split, int num_splits, int inner_batch) {
  const int outer = batch / inner_batch;
  return (outer * num_splits + split) * inner_batch + batch - outer * inner_batch;
}

// ---- Order of tiles -----------------------------------------------------------------------------

// Row blocks of every head. Heads are taken in sections, whose keys and values stay in the L2 cache
// together; within a section all heads of one row block, then the next row block. A head counts
// once for each split of its keys.
struct TileOrder {
  int row_blocks;
  int heads;          // dense: of all batch indices, batch-major; packed: of one sequence
  int section_heads;  // heads of a section; the last section may have fewer
  bool last_first;    // row blocks from the last to the first: with a causal mask, longest first
};

struct TilePosition {
  int row_block;
  int head;  // 0 ... heads - 1
};

FA_HOST_DEVICE constexpr TilePosition tile_position(const TileOrder& order, int tile) {
  const int section = tile / (order.section_heads * order.row_blocks);
  const int first_head = section * order.section_heads;
  const int left = order.heads - first_head;
  const int section_heads = left < order.section_heads ? left : order.section_heads;
  const int in_section = tile - first_head * order.row_blocks;
  const int row_block = in_section / section_heads;
  return {order.last_first ? order.row_blocks - 1 - row_block : row_block,
          first_head + in_section - row_block * section_heads};
}

// ---- Packed sequences ---------------------------------------------------------------------------

// The buffer of queries is cut into segments: for each batch index the rows before the first
// sequence, the sequences, and the rows past the last. Together they hold every row exactly once,
// whatever cu_seqlens says, so that every row is written.
struct Segment {
  int query_begin;   // in the buffer
  int num_queries;   // to be written
  int used_queries;  // of these, the first ones have a result; the others are empty rows
  int key_begin;
  int seqlen_k;
};

// Sequences are started from the longest class of keys to the shortest, so that the last tiles are
// short and all multiprocessors end together. A class spans a factor of two.
inline constexpr int kWorkClasses = 32;

FA_HOST_DEVICE constexpr int work_class(int seqlen_k) {
  constexpr int kKeys = 64;  // fewer cost the same
  int result = 0;
  for (int rest = ceil_div(seqlen_k, kKeys); rest > 0; rest /= 2) ++result;
  return result;
}

// What the schedule kernel leaves for the forward, in the workspace. A segment's number is its place
// in the buffers; the list holds the segments that have tiles, in the order of work.
//
//   | header | per place in the list: tiles up to its end | number | per number: first query | key |
struct Schedule {
  enum Header { kTileCounter, kNumTiles, kNumListed, kHeaderSize };

  int* workspace;
  int num_segments;    // of all batch indices; 0: a dense call
  int batch_segments;  // of one batch index: its sequences and 2

  FA_HOST_DEVICE bool packed() const { return num_segments > 0; }
  FA_HOST_DEVICE int* tile_ends() const { return workspace + kHeaderSize; }
  FA_HOST_DEVICE int* numbers() const { return tile_ends() + num_segments; }
  FA_HOST_DEVICE int* query_begins() const { return numbers() + num_segments; }
  FA_HOST_DEVICE int* key_begins() const { return query_begins() + num_segments; }

  // Integers per batch index that the workspace must have.
  static constexpr long long size(long long sequences) { return kHeaderSize + 4 * (sequences + 2); }
};

// A warp looks at the list through a window of 32 places, which moves on only, as a CTA's tiles come
// in ascending order. If the window at `base` ends before a tile, lane l looks at the end of the
// l-th window after it; of those that end past the tile the first holds it. No lane: further on.
FA_HOST_DEVICE constexpr int window_probe(int base, int lane, int count) {
  const int place = base + 32 * (lane + 2) - 1;
  return place < count ? place : count - 1;
}

FA_HOST_DEVICE constexpr int next_window(int base, int first_lane) {
  return base + 32 * (first_lane < 32 ? first_lane + 1 : 32);
}

}  // namespace fa
