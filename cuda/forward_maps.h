// Which tiles and which key blocks the forward visits, and in which order. Pure functions, so that
// the tests check them exhaustively on a CPU; plan and kernel call nothing else to find a tile or a
// block.
#pragma once

#include <cstdint>

#include "index_maps.h"

namespace fa {

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
  KeyBlocks blocks{of_first.begin / block_n, (of_last.end + block_n - 1) / block_n, 0, 0};
  blocks.full_begin = (of_last.begin + block_n - 1) / block_n;
  blocks.full_end = of_first.end > 0 ? of_first.end / block_n : 0;
  return blocks;
}

// ---- Order of tiles -----------------------------------------------------------------------------

// A launch's tiles: row blocks of every head of every batch index. Heads are taken in sections,
// whose keys and values stay in the L2 cache together; within a section all heads of one row block,
// then the next row block.
struct TileOrder {
  int row_blocks;
  int heads;          // heads of all batch indices, batch-major
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

}  // namespace fa
