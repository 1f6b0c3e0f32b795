// dK and dV of a tile -> global memory, straight from registers, so that the next K and V are on
// their way meanwhile. Each warp stores what it holds: whole rows of its warpgroup's own 64 keys, or
// half of the columns of the shared ones.
#pragma once

#include "device/backward/traits.cuh"
#include "device/epilogue/convert.cuh"
#include "device/quad_exchange.cuh"

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
  __device__ void store(const float (&values)[kHeadDim / kSharers / 2], float scale, void* base,
                        int head_dim, int thread) const {
    const int q = thread % 4;
    const int first_column = kSharers == 1 ? 0 : thread / kWarpgroupSize * (kHeadDim / kSharers);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = accumulator_coordinate(thread, 2 * half).row % kBlockN;
      uint4* const target = vector(base, head_dim, row, first_column + 8 * q);
#pragma unroll
      for (int column = 0; column < kHeadDim / kSharers; column += 32) {
        const float* const v = values + column / 2 + 2 * half;
        uint32_t group[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          group[i] = pack<kConfig.dtype>(v[4 * i] * scale, v[4 * i + 1] * scale);
        }
        transpose_in_quad(group, q);
        if (row < tile_.num_rows && first_column + column + 8 * q < head_dim) {
          target[column / 8] = uint4{group[0], group[1], group[2], group[3]};
        }
      }
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
