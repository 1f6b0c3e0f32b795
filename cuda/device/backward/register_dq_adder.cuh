// dQ of a block of wide heads, from a consumer warp's registers to the accumulator in global memory: no
// shared memory is left to pass it through. Reductions of 16 bytes per lane, 512 bytes side by side per
// warp (dq_offset). Nobody waits for them: the next kernel finds them complete.
//
// With `turns` each consumer warp has a turn of its own in each block, for the queries it holds: see
// dq_turn.cuh.
#pragma once

#include "device/backward/dq_turn.cuh"
#include "device/registers.cuh"

namespace fa {

template <BackwardConfig kConfig>
class RegisterDqAdder {
  static constexpr int kBlockElements = kConfig.block_m * kConfig.head_dim;

 public:
  // `thread`: a consumer thread of the cluster, see dq_coordinate.
  __device__ RegisterDqAdder(const BackwardParams& params, int thread)
      : params_(params), thread_(thread) {}

  __device__ bool ordered() const { return params_.turns != nullptr; }

  // Registers [kBegin, kEnd) of the thread's part of block `block` of the workspace.
  template <int kBegin, int kEnd, int kCount>
  __device__ void add(const float (&dq)[kCount], int block) const {
    float* const target = params_.workspace.dq + static_cast<int64_t>(block) * kBlockElements +
                          dq_offset(opaque(thread_), kBegin, kConfig.block_m, kConfig.head_dim,
                                    backward_dq_warpgroups(kConfig.head_dim));
#pragma unroll
    for (int i = kBegin; i < kEnd; i += 4) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(target + (i - kBegin) * kWarpgroupSize), "f"(dq[i]), "f"(dq[i + 1]),
                     "f"(dq[i + 2]), "f"(dq[i + 3])
                   : "memory");
    }
  }

  // `query_block`: of the tile, block number `block` of the workspace. All lanes look, so that each
  // one's additions come after what it has read.
  __device__ bool has_turn(const BackwardTile& tile, int query_block, int block) const {
    const int before = tiles_before(tile, query_block, kConfig.block_m, kConfig.block_n);
    return load_acquire(turn(block)) == before;
  }

  __device__ void wait_for_turn(const BackwardTile& tile, int query_block, int block) const {
    while (!has_turn(tile, query_block, block)) {
    }
  }

  // The release of one lane holds for the additions of all, which the warp's barrier puts before it. It
  // takes until they are performed: the later after them, the less.
  __device__ void pass_turn(int block) const {
    __syncwarp();
    if (opaque(thread_) % kWarpSize != 0) return;
    increment_release(turn(block));
  }

 private:
  __device__ int* turn(int block) const {
    return params_.turns + static_cast<int64_t>(block) * backward_turns_per_block(kConfig) +
           opaque(thread_) / kWarpSize;
  }

  const BackwardParams& params_;
  const int thread_;
};

}  // namespace fa
