// The schedule of packed sequences: where each one lies, and in which order the forward visits
// them. Runs before the forward, in one CTA, so that nothing about the lengths is decided on the
// host.
//
//   1  segments, from cu_seqlens and seqused. Offsets count as the running maximum of what they are,
//      clipped to the buffer, so that sequences never overlap or leave it.
//   2  per class of work, the longest first: list its segments in their order, with the number of
//      tiles up to each
//
// Both walk over the segments in chunks, kItems neighbours per thread, with block-wide prefix scans.
//
//   reads cu_seqlens, seqused; writes the workspace (struct Schedule); a thread reads back in step 2
//   only what it wrote in step 1
#pragma once

#include "config.h"
#include "device/schedule/params.h"

namespace fa {

// Per segment a key that orders offsets within a batch index and restarts with the next one.
struct LargestOffset {
  static __device__ long long combine(long long a, long long b) { return a > b ? a : b; }
  static __device__ long long of(int batch, int offset) {
    return static_cast<long long>(batch) << 32 | offset;
  }
};

// Segments in the upper half, tiles in the lower.
struct Count {
  static __device__ long long combine(long long a, long long b) { return a + b; }
  static __device__ long long of(int segments, int tiles) {
    return static_cast<long long>(segments) << 32 | tiles;
  }
};

// Combination of the values (0 or more) of all threads before this one and of `carry`, to which it
// adds the values of all.
template <typename Operation, int kNumThreads>
__device__ long long exclusive_scan(long long value, long long& carry,
                                    long long (&smem)[kNumThreads / kWarpSize]) {
  constexpr int kWarps = kNumThreads / kWarpSize;
  static_assert(kWarps <= kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  const auto warp_scan = [&](long long x) {
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const long long before = __shfl_up_sync(~0u, x, distance);
      if (lane >= distance) x = Operation::combine(x, before);
    }
    return x;
  };
  value = warp_scan(value);
  __syncthreads();  // the sums of the last scan have been read
  if (lane == kWarpSize - 1) smem[threadIdx.x / kWarpSize] = value;
  __syncthreads();  // the sums of all warps are there
  const long long warps = warp_scan(lane < kWarps ? smem[lane] : 0);
  const int warp = threadIdx.x / kWarpSize;
  const long long before_warp = __shfl_sync(~0u, warps, (warp + kWarpSize - 1) % kWarpSize);
  long long result = __shfl_up_sync(~0u, value, 1);
  if (lane == 0) result = 0;
  if (warp > 0) result = Operation::combine(result, before_warp);
  result = Operation::combine(result, carry);
  carry = Operation::combine(carry, __shfl_sync(~0u, warps, kWarpSize - 1));
  return result;
}

template <typename Row>
__global__ void __launch_bounds__(Row::kConfig.num_threads, 1)
    schedule_kernel(const __grid_constant__ ScheduleParams params) {
  constexpr int kNumThreads = Row::kConfig.num_threads;
  constexpr int kItems = 4;
  constexpr int kChunk = kNumThreads * kItems;
  __shared__ long long sums[kNumThreads / kWarpSize];
  __shared__ unsigned classes;  // those that occur
  const Schedule& schedule = params.schedule;
  const int num_segments = schedule.num_segments;
  const int sequences = schedule.batch_segments - 2;
  if (threadIdx.x == 0) classes = 0;

  const auto tiles_of = [&](const Segment& segment) {
    return ceil_div(segment.num_queries * params.packed_heads, params.rows_per_tile) *
           params.tiles_per_row_block;
  };
  // Offset `index` of a batch index: 0 before the first sequence, the buffer's size at the end.
  const auto offset = [&](const int32_t* cu_seqlens, ForwardOperand operand, int batch, int index,
                          int total) {
    if (index == 0) return 0;
    if (index > sequences + 1) return total;
    return clip(__ldg(cu_seqlens + params.batch_map.offset(operand, batch) + index - 1), total);
  };
  const auto offset_q = [&](int batch, int index) {
    return offset(params.cu_seqlens_q, kForwardCuSeqlensQ, batch, index, params.total_q);
  };
  const auto offset_k = [&](int batch, int index) {
    return offset(params.cu_seqlens_k, kForwardCuSeqlensK, batch, index, params.total_k);
  };
  const auto used = [&](const int32_t* seqused, ForwardOperand operand, int batch, int sequence,
                        int length) {
    if (seqused == nullptr) return length;
    return clip(__ldg(seqused + params.batch_map.offset(operand, batch) + sequence), length);
  };

  unsigned my_classes = 0;
  long long carry_q = 0;
  long long carry_k = 0;
  for (int chunk = 0; chunk < num_segments; chunk += kChunk) {
    const int first = chunk + threadIdx.x * kItems;
    long long largest_q[kItems];
    long long largest_k[kItems];
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int batch = min(first + i, num_segments - 1) / schedule.batch_segments;
      const int index = min(first + i, num_segments - 1) - batch * schedule.batch_segments;
      largest_q[i] = LargestOffset::of(batch, offset_q(batch, index));
      largest_k[i] = LargestOffset::of(batch, offset_k(batch, index));
      if (i > 0) {
        largest_q[i] = LargestOffset::combine(largest_q[i], largest_q[i - 1]);
        largest_k[i] = LargestOffset::combine(largest_k[i], largest_k[i - 1]);
      }
    }
    const long long before_q =
        exclusive_scan<LargestOffset, kNumThreads>(largest_q[kItems - 1], carry_q, sums);
    const long long before_k =
        exclusive_scan<LargestOffset, kNumThreads>(largest_k[kItems - 1], carry_k, sums);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int number = first + i;
      if (number >= num_segments) break;
      const int batch = number / schedule.batch_segments;
      const int index = number - batch * schedule.batch_segments;
      Segment segment = {};
      segment.query_begin = static_cast<int>(LargestOffset::combine(largest_q[i], before_q));
      segment.num_queries = max(offset_q(batch, index + 1) - segment.query_begin, 0);
      if (index > 0 && index <= sequences) {
        segment.used_queries = used(params.seqused_q, kSequsedQ, batch, index - 1,
                                    min(segment.num_queries, params.max_seqlen_q));
        segment.key_begin = static_cast<int>(LargestOffset::combine(largest_k[i], before_k));
        segment.seqlen_k =
            used(params.seqused_k, kSequsedK, batch, index - 1,
                 min(max(offset_k(batch, index + 1) - segment.key_begin, 0), params.max_seqlen_k));
      }
      schedule.segments()[number] = segment;
      if (segment.num_queries > 0) my_classes |= 1u << work_class(segment.seqlen_k);
    }
  }
  __syncthreads();  // `classes` is initialised
  my_classes = __reduce_or_sync(~0u, my_classes);
  if (threadIdx.x % kWarpSize == 0) atomicOr(&classes, my_classes);
  __syncthreads();  // all classes are known

  long long carry = 0;
  for (int work = kWorkClasses - 1; work >= 0; --work) {
    if ((classes >> work & 1) == 0) continue;
    for (int chunk = 0; chunk < num_segments; chunk += kChunk) {
      const int first = chunk + threadIdx.x * kItems;
      long long count[kItems];
      long long sum = 0;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        count[i] = 0;
        if (first + i < num_segments) {
          const Segment& segment = schedule.segments()[first + i];
          if (segment.num_queries > 0 && work_class(segment.seqlen_k) == work) {
            count[i] = Count::of(1, tiles_of(segment));
          }
        }
        sum += count[i];
      }
      long long before = exclusive_scan<Count, kNumThreads>(sum, carry, sums);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (count[i] == 0) continue;
        const int place = static_cast<int>(before >> 32);
        before += count[i];
        schedule.tile_ends()[place] = static_cast<int>(before);
        schedule.numbers()[place] = first + i;
      }
    }
  }
  if (threadIdx.x == 0) {
    schedule.workspace[Schedule::kTileCounter] = 0;
    schedule.workspace[Schedule::kNumTiles] = static_cast<int>(carry);
    schedule.workspace[Schedule::kNumListed] = static_cast<int>(carry >> 32);
  }
}

}  // namespace fa

// Compiles one row of kernels.def.
#define INSTANTIATE_SCHEDULE_KERNEL(num_threads)                                    \
  namespace fa {                                                                    \
  struct schedule_##num_threads {                                                   \
    static constexpr ScheduleConfig kConfig{num_threads};                           \
  };                                                                                \
  const void* schedule_##num_threads##_symbol() {                                   \
    return reinterpret_cast<const void*>(&schedule_kernel<schedule_##num_threads>); \
  }                                                                                 \
  }
