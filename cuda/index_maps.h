// Index maps between registers, shared memory and the arrays a user sees. Pure functions, so that the
// tests check each of them exhaustively on a CPU; kernels call nothing else to find an element.
#pragma once

#include "config.h"

#ifdef __CUDACC__
#define FA_HOST_DEVICE __host__ __device__
#else
#define FA_HOST_DEVICE
#endif

namespace fa {

struct TileCoordinate {
  int row;
  int column;
};

// Element `index` (0 .. head_dim / 2) of the fp32 wgmma accumulator held by consumer thread `thread`.
// Register order: column within a pair, row half, group of 8 columns.
FA_HOST_DEVICE constexpr TileCoordinate accumulator_coordinate(int thread, int index) {
  const int warp = thread / 32;
  const int lane = thread % 32;
  return {16 * warp + lane / 4 + 8 * ((index / 2) % 2),
          8 * (index / 4) + 2 * (lane % 4) + index % 2};
}

// The output column that accumulator column `column` holds, for the fp8 column order.
FA_HOST_DEVICE constexpr int fp8_output_column(int column) {
  const int group = column / 16 * 16;
  const int n = column % 16;
  return group + 2 * (n % 8) + n / 8;
}

// TMA's shared-memory swizzle for rows of `span` bytes (128, 64 or 32): permutes 16-byte units.
FA_HOST_DEVICE constexpr int swizzle(int byte_offset, int span) {
  return byte_offset ^ ((byte_offset >> 3) & (span - 16));
}

// Columns of one swizzled panel of the 16-bit output tile: the widest of 64, 32, 16 that divides it.
FA_HOST_DEVICE constexpr int output_panel_columns(int head_dim) {
  return head_dim % 64 == 0 ? 64 : head_dim % 32 == 0 ? 32 : 16;
}

// Byte offset of (row, column) in the 16-bit output tile: panels of block_m rows, each swizzled.
FA_HOST_DEVICE constexpr int output_offset_bytes(int row, int column, int block_m, int head_dim) {
  const int panel = output_panel_columns(head_dim);
  const int span = 2 * panel;
  return column / panel * (block_m * span) + swizzle(row * span + column % panel * 2, span);
}

// Byte offset of (row, column) in a stage of the fp32 accumulator tile: panels of 32 columns.
inline constexpr int kAccPanelColumns = 32;

FA_HOST_DEVICE constexpr int acc_offset_bytes(int row, int column, int block_m) {
  constexpr int kSpan = 4 * kAccPanelColumns;
  return column / kAccPanelColumns * (block_m * kSpan) +
         swizzle(row * kSpan + column % kAccPanelColumns * 4, kSpan);
}

}  // namespace fa
