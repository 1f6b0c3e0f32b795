// From accumulator fragments to 16-byte stores, without shared memory.
#pragma once

#include <cstdint>

namespace fa {

// Of four neighbouring groups of 8 columns, thread q of a quad holds columns 2q, 2q+1 of each, one
// register (a pair of 16-bit elements) per row. The transposition of these 4 x 4 registers within the
// quad leaves thread q with all of group q. Collective over the warp.
__device__ inline void transpose_in_quad(uint32_t (&x)[4], int q) {
  // Thread q's register i and thread i's register q change places, distance 1 and then 2.
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = (q & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t& low = x[i];
      uint32_t& high = x[i + distance];
      const uint32_t received = __shfl_xor_sync(~0u, upper ? low : high, distance);
      low = upper ? received : low;
      high = upper ? high : received;
    }
  }
}

}  // namespace fa
