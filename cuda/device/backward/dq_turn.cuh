// The order in which the tiles of a head add to a block of dQ, where results must be the same bits
// from run to run: descending keys, so that with a causal mask a tile has added to a block before
// the tile of lower keys, which starts at an earlier block, comes there.
//
//   who zeroes    the memset before the kernel: every turn is 0
//   who waits     whoever adds a block's part, until the part's turn is the number of tiles of higher
//                 keys that visit the block
//   who passes    it adds 1 when its own additions are complete in global memory
//
// Tiles are handed out with ascending numbers, in a head in descending order of keys, and a CTA works
// on its tiles in ascending order. Of all tiles that are not done the one with the lowest number is
// therefore in work, and whom it would wait for is done: there is always one that goes on.
#pragma once

#include "device/backward/tile.cuh"

namespace fa {

__device__ inline int tiles_before(const BackwardTile& tile, int block, int block_m, int block_n) {
  return last_visitor(tile.window, tile.queries.length, tile.keys.length, block, block_m, block_n) -
         tile.key_begin / block_n;
}

__device__ inline int load_acquire(const int* address) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void increment_release(int* address) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" : : "l"(address) : "memory");
}

}  // namespace fa
