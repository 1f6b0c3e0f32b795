// dK and dV of a tile that is split by queries (TileParts): each part leaves its sums in global memory,
// and the one that comes last adds all of them, in the order of the parts, whoever is last, and
// stores what a whole tile would.
//
//   part 0   | blocks 0 ... n | partial -> memory | arrive
//   part 1   | blocks n ... m | partial -> memory | arrive: the last | all parts -> dK, dV -> store
//
// Each warp does so on its own, with a counter of its own: it holds the same elements in every part.
// The counters are 0 when the kernel starts. The partial sums lie where the postprocess will write
// dQ: the plan splits no more tiles than fit.
#pragma once

#include "device/backward/traits.cuh"

namespace fa {

template <BackwardConfig kConfig, int kCountDk, int kCountDv>
class PartialGradients {
  using Traits = BackwardTraits<kConfig>;

 public:
  __device__ PartialGradients(const BackwardParams& params, int part_number, int thread)
      : params_(params),
        part_number_(part_number),
        split_tile_(part_number / params.split.parts),
        thread_(thread) {}

  // Whether this warp is the last one of its tile, and has to store what `sum_dk` and `sum_dv` find.
  __device__ bool leave(const float (&dk)[kCountDk], const float (&dv)[kCountDv]) const {
    write(dk, 0);
    write(dv, kCountDk / 4);
    int before = 0;
    // Every lane's sums are there before the warp's arrival is.
    __syncwarp();
    if (thread_ % kWarpSize == 0) {
      __threadfence();
      const int arrival = (split_tile_ * Traits::kCtas + cta()) * Traits::kConsumerWarps;
      before = atomicAdd(params_.arrivals + arrival + thread_ / kWarpSize, 1);
    }
    if (__shfl_sync(~0u, before, 0) != params_.split.parts - 1) return false;
    // And the others' before the loads of what they left.
    __threadfence();
    __syncwarp();
    return true;
  }

  __device__ void sum_dk(float (&dk)[kCountDk]) const { sum(dk, 0); }
  __device__ void sum_dv(float (&dv)[kCountDv]) const { sum(dv, kCountDk / 4); }

 private:
  static __device__ int cta() { return Traits::kCtas == 1 ? 0 : cluster_rank(); }

  // The thread's vector `i`, of four registers, of part `number`.
  __device__ float4* vector(int number, int i) const {
    constexpr int kVectors = (kCountDk + kCountDv) / 4;
    const int64_t first = (static_cast<int64_t>(number) * Traits::kCtas + cta()) * kVectors;
    return reinterpret_cast<float4*>(params_.partials) + (first + i) * Traits::kConsumerThreads +
           thread_;
  }

  template <int kCount>
  __device__ void write(const float (&values)[kCount], int first) const {
    float4* const target = vector(part_number_, first);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const float* const v = values + 4 * i;
      __stcg(target + i * Traits::kConsumerThreads, float4{v[0], v[1], v[2], v[3]});
    }
  }

  template <int kCount>
  __device__ void sum(float (&values)[kCount], int first) const {
#pragma unroll
    for (float& value : values) value = 0.f;
    FA_NO_UNROLL
    for (int part = 0; part < params_.split.parts; ++part) {
      const float4* const source = vector(split_tile_ * params_.split.parts + part, first);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float4 added = __ldcg(source + i * Traits::kConsumerThreads);
        values[4 * i] += added.x;
        values[4 * i + 1] += added.y;
        values[4 * i + 2] += added.z;
        values[4 * i + 3] += added.w;
      }
    }
  }

  const BackwardParams& params_;
  const int part_number_;
  const int split_tile_;
  const int thread_;
};

}  // namespace fa
