// Index maps between registers, shared memory and the arrays a user sees. Pure functions, so that
// the tests check each of them exhaustively on a CPU; kernels call nothing else to find an element.
#pragma once

#ifdef __CUDACC__
#define FA_HOST_DEVICE __host__ __device__
#define FA_NO_UNROLL _Pragma("unroll 1")
#else
#define FA_HOST_DEVICE
#define FA_NO_UNROLL
#endif

namespace fa {

template <typename A, typename B>
FA_HOST_DEVICE constexpr auto ceil_div(A a, B b) {
  return (a + b - 1) / b;
}

struct TileCoordinate {
  int row;
  int column;
};

// Element `index` (0 .. head_dim / 2) of the fp32 wgmma accumulator held by consumer thread
// `thread`. Register order: column within a pair, row half, group of 8 columns.
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

// TMA's shared-memory swizzle for rows of `span` bytes (128 or 64): permutes 16-byte units.
FA_HOST_DEVICE constexpr int swizzle(int byte_offset, int span) {
  return byte_offset ^ ((byte_offset >> 3) & (span - 16));
}

// Columns of one swizzled panel of a 16-bit tile, whose head dimension is a multiple of 32.
FA_HOST_DEVICE constexpr int panel_columns(int head_dim) { return head_dim % 64 == 0 ? 64 : 32; }

// Byte offset of (row, column) in a 16-bit tile: panels of block_m rows, each swizzled.
FA_HOST_DEVICE constexpr int panel_offset_bytes(int row, int column, int block_m, int head_dim) {
  const int panel = panel_columns(head_dim);
  const int span = 2 * panel;
  return column / panel * (block_m * span) + swizzle(row * span + column % panel * 2, span);
}

// The fp32 accumulator tile of the stand-alone epilogue: rows as in global memory, 32 bytes apart,
// so that the fragment reads (8 bytes from each of 4 rows per half warp) have no bank conflicts.
FA_HOST_DEVICE constexpr int acc_pitch_bytes(int head_dim) { return 4 * head_dim + 32; }

// Byte offset of (row, column) in it: of acc, and of O (elements of 2 or 4 bytes), whose row r
// takes the place of acc's row r.
FA_HOST_DEVICE constexpr int acc_offset_bytes(int row, int column, int head_dim,
                                              int element_bytes = 4) {
  return row * acc_pitch_bytes(head_dim) + element_bytes * column;
}

// The sequence that holds `token`: the b with offset(b) <= token < offset(b + 1), by binary search
// over num_sequences + 1 ascending offsets; -1 or num_sequences where there is none. Whatever the
// offsets are, the result satisfies the inequalities, so that a row found with it never lies
// outside the buffer.
template <typename Offset>
FA_HOST_DEVICE constexpr int find_sequence(const Offset& offset, int num_sequences, int token) {
  int low = 0;
  int high = num_sequences + 1;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (offset(middle) <= token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

}  // namespace fa
