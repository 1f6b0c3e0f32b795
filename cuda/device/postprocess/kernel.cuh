// The accumulator of dQ -> dQ: times the scale, rounded to 16 bits.
//
// One CTA per block of queries of one head: registers hold what the backward's consumer threads had
// (dq_offset, dq_coordinate), shared memory turns it into rows, 16-byte stores write whole rows.
// Rows past a sequence's end are 0; packed, they are zero before the kernel starts.
#pragma once

#include "device/backward/params.h"
#include "device/epilogue/convert.cuh"

namespace fa {

template <typename Row>
__global__ void __launch_bounds__(kPostprocessThreads)
    postprocess_kernel(const __grid_constant__ PostprocessParams params) {
  constexpr PostprocessConfig kConfig = Row::kConfig;
  constexpr int kBlockM = kConfig.block_m;
  constexpr int kHeadDim = kConfig.head_dim;
  constexpr int kPitch = postprocess_pitch_bytes(kConfig);
  constexpr int kWarpgroups = backward_dq_warpgroups(kHeadDim);
  constexpr int kCount = kBlockM * kHeadDim / kPostprocessThreads;
  constexpr int kCountPerThread = kBlockM * kHeadDim / (kWarpgroups * kWarpgroupSize);
  constexpr DqSplit kSplit = dq_split(kBlockM, kWarpgroups);
  extern __shared__ __align__(16) char smem[];
  const int slots = params.workspace.q_slots;
  // The heads that the backward finished last come first: part of theirs is still in L2.
  const int block = gridDim.x - 1 - blockIdx.x;
  const int head_of_all = block / slots;
  const int batch = head_of_all / params.heads;
  const int head = head_of_all - batch * params.heads;
  const int thread = threadIdx.x;
  const Sequences sequences = params.sequences.of(params.batch_map, batch);
  const SlotPosition slot = slot_position(sequences.cu_seqlens_q, sequences.num_sequences,
                                          sequences.total_q, block - head_of_all * slots, kBlockM);
  if (slot.sequence < 0) return;
  const Span queries = sequences.queries(slot.sequence);
  const int used_rows = queries.length - slot.row_begin;
  const int num_rows =
      min(sequences.packed() ? used_rows : sequences.total_q - slot.row_begin, kBlockM);
  if (num_rows <= 0) return;

  if (used_rows > 0) {
    const float* const source = params.workspace.dq + int64_t{block} * (kBlockM * kHeadDim);
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      // Of a cluster's consumer threads each thread here stands for one in each CTA.
      const int consumer = thread + i / kCountPerThread * kPostprocessThreads;
      const int index = i % kCountPerThread;
      const float4 values = *reinterpret_cast<const float4*>(
          source + dq_offset(consumer, index, kBlockM, kHeadDim, kWarpgroups));
      const float v[4] = {values.x * params.scale, values.y * params.scale, values.z * params.scale,
                          values.w * params.scale};
#pragma unroll
      for (int pair = 0; pair < 4; pair += 2) {
        const TileCoordinate at =
            dq_coordinate(consumer, index + pair, kBlockM, kHeadDim, kWarpgroups);
        const uint32_t packed = pack<kConfig.dtype>(v[pair], v[pair + 1]);
        char* const target = smem + at.row * kPitch + at.column * 2;
        if constexpr (kSplit == DqSplit::transposed) {
          *reinterpret_cast<uint16_t*>(target) = static_cast<uint16_t>(packed);
          *reinterpret_cast<uint16_t*>(target + kPitch) = static_cast<uint16_t>(packed >> 16);
        } else {
          *reinterpret_cast<uint32_t*>(target) = packed;
        }
      }
    }
  }
  __syncthreads();
  const int units = params.head_dim / 8;
  uint4* const dq =
      static_cast<uint4*>(params.dq) +
      ((static_cast<int64_t>(batch) * sequences.total_q + queries.begin + slot.row_begin) *
           params.heads +
       head) *
          units;
  constexpr int kUnits = kHeadDim / 8;
  for (int i = thread; i < num_rows * kUnits; i += kPostprocessThreads) {
    const int row = i / kUnits;
    const int unit = i % kUnits;
    if (unit >= units) continue;
    dq[static_cast<int64_t>(row) * params.heads * units + unit] =
        row < used_rows ? *reinterpret_cast<const uint4*>(smem + row * kPitch + unit * 16)
                        : uint4{0, 0, 0, 0};
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_POSTPROCESS_KERNEL(dtype, head_dim, block_m)                    \
  namespace fa {                                                                    \
  struct postprocess_##dtype##_##head_dim##_##block_m {                             \
    static constexpr PostprocessConfig kConfig{DataType::dtype, head_dim, block_m}; \
  };                                                                                \
  const void* postprocess_##dtype##_##head_dim##_##block_m##_symbol() {             \
    return reinterpret_cast<const void*>(                                           \
        &postprocess_kernel<postprocess_##dtype##_##head_dim##_##block_m>);         \
  }                                                                                 \
  }
