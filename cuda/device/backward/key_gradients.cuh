// dK and dV of a tile -> global memory: registers -> shared memory, on top of K and V -> 16-byte
// stores. Each warpgroup stores what it holds: whole rows of its own 64 keys, or half of the columns of
// the shared ones.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "device/backward/traits.cuh"
#include "device/epilogue/convert.cuh"

namespace fa {

template <BackwardConfig kConfig>
class KeyGradients {
  using Traits = BackwardTraits<kConfig>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kSharers = Traits::kWide ? Traits::kWarpgroups : 1;  // of a row

 public:
  __device__ KeyGradients(const BackwardParams& params, const BackwardTile& tile)
      : params_(params), tile_(tile) {}

  template <int kHeadDim>
  __device__ static void to_shared(const float (&values)[kHeadDim / kSharers / 2], float scale,
                                   void* smem, int thread) {
    // One stmatrix stores 16 x 16 elements: lane l names row l % 16 and 8-column unit l / 16.
    const int row = (thread / kWarpSize * 16 + thread % 16) % kBlockN;
    const int column = first_column<kHeadDim>(thread) + thread % kWarpSize / 16 * 8;
#pragma unroll
    for (int group = 0; group < kHeadDim / kSharers / 16; ++group) {
      const float* const v = values + 8 * group;
      cute::SM90_U32x4_STSM_N::copy(
          pack<kConfig.dtype>(v[0] * scale, v[1] * scale),
          pack<kConfig.dtype>(v[2] * scale, v[3] * scale),
          pack<kConfig.dtype>(v[4] * scale, v[5] * scale),
          pack<kConfig.dtype>(v[6] * scale, v[7] * scale),
          *reinterpret_cast<cute::uint128_t*>(
              static_cast<char*>(smem) +
              output_offset_bytes(row, 16 * group + column, kBlockN, kHeadDim)));
    }
  }

  template <int kHeadDim>
  __device__ void to_global(const void* smem, void* base, int head_dim, int thread) const {
    constexpr int kUnits = kHeadDim / kSharers / 8;
    const int first_row = thread / kWarpgroupSize * kRowsPerWarpgroup % kBlockN;
#pragma unroll
    for (int i = 0; i < kRowsPerWarpgroup * kUnits / kWarpgroupSize; ++i) {
      const int index = i * kWarpgroupSize + thread % kWarpgroupSize;
      const int row = first_row + index / kUnits;
      const int column = first_column<kHeadDim>(thread) + index % kUnits * 8;
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
  template <int kHeadDim>
  __device__ static int first_column(int thread) {
    return kSharers == 1 ? 0 : thread / kWarpgroupSize * (kHeadDim / kSharers);
  }

  __device__ uint4* vector(void* base, int head_dim, int row, int column) const {
    return reinterpret_cast<uint4*>(
        static_cast<uint16_t*>(base) +
        ((tile_.row_begin + row) * params_.heads_kv + tile_.head_kv) * head_dim + column);
  }

  const BackwardParams& params_;
  const BackwardTile& tile_;
};

}  // namespace fa
