// dK and dV of a tile -> global memory: registers -> shared memory, on top of K and V -> 16-byte
// stores of whole rows. Each warpgroup stores its own 64 keys.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "device/backward/traits.cuh"
#include "device/epilogue/convert.cuh"

namespace fa {

template <BackwardConfig kConfig>
class KeyGradients {
  using Traits = BackwardTraits<kConfig>;
  static constexpr int kBlockN = Traits::kBlockN;

 public:
  __device__ KeyGradients(const BackwardParams& params, const BackwardTile& tile)
      : params_(params), tile_(tile) {}

  template <int kHeadDim>
  __device__ static void to_shared(const float (&values)[kHeadDim / 2], float scale, void* smem,
                                   int thread) {
    // One stmatrix stores 16 x 16 elements: lane l names row l % 16 and 8-column unit l / 16.
    const int row = thread / kWarpSize * 16 + thread % 16;
    const int unit = thread % kWarpSize / 16;
#pragma unroll
    for (int group = 0; group < kHeadDim / 16; ++group) {
      const float* const v = values + 8 * group;
      cute::SM90_U32x4_STSM_N::copy(
          pack<kConfig.dtype>(v[0] * scale, v[1] * scale),
          pack<kConfig.dtype>(v[2] * scale, v[3] * scale),
          pack<kConfig.dtype>(v[4] * scale, v[5] * scale),
          pack<kConfig.dtype>(v[6] * scale, v[7] * scale),
          *reinterpret_cast<cute::uint128_t*>(
              static_cast<char*>(smem) +
              output_offset_bytes(row, 16 * group + 8 * unit, kBlockN, kHeadDim)));
    }
  }

  template <int kHeadDim>
  __device__ void to_global(const void* smem, void* base, int head_dim, int thread) const {
    constexpr int kUnits = kHeadDim / 8;
    const int first = thread / kWarpgroupSize * kRowsPerWarpgroup;
#pragma unroll
    for (int i = 0; i < kRowsPerWarpgroup * kUnits / kWarpgroupSize; ++i) {
      const int index = i * kWarpgroupSize + thread % kWarpgroupSize;
      const int row = first + index / kUnits;
      const int column = index % kUnits * 8;
      if (row >= tile_.num_rows || column >= head_dim) continue;
      *vector(base, head_dim, row, column) = *reinterpret_cast<const uint4*>(
          static_cast<const char*>(smem) + output_offset_bytes(row, column, kBlockN, kHeadDim));
    }
  }

  // A tile whose keys no query sees.
  __device__ void zero(void* base, int head_dim, int thread) const {
    const int units = head_dim / 8;
    const int rows = min(tile_.num_rows, kBlockN);
    for (int i = thread; i < rows * units; i += Traits::kConsumerThreads) {
      *vector(base, head_dim, i / units, i % units * 8) = uint4{0, 0, 0, 0};
    }
  }

 private:
  __device__ uint4* vector(void* base, int head_dim, int row, int column) const {
    return reinterpret_cast<uint4*>(
        static_cast<uint16_t*>(base) +
        ((tile_.row_begin + row) * params_.heads_kv + tile_.head_kv) * head_dim + column);
  }

  const BackwardParams& params_;
  const BackwardTile& tile_;
};

}  // namespace fa
