// The schedule of packed sequences: where each one lies, and in which order the forward visits
// them. Runs before the forward, in one CTA, so that nothing about the lengths is decided on the
// host.
//
//   1  where segments begin. Offsets count as the running maximum of what they are, clipped to the
//      buffer, so that sequences never overlap or leave it.
//   2  per class of work, the longest first: list its segments in their order, with the number of
//      tiles up to each
//
// Both walk over the segments in chunks with prefix scans. A warp holds kItems times 32 neighbours,
// item by item a lane each, so that all accesses are coalesced.
//
// Without segments it only resets the counter that hands out tiles.
//
//   reads cu_seqlens, seqused; writes the workspace (struct Schedule)
#pragma once

#include "config.h"
#include "device/schedule/params.h"

namespace fa {

// Per segment a key that orders offsets within a batch index and restarts with the next one.
struct LargestOffset {
  static __device__ long long of(int batch, int offset) {
    return static_cast<long long>(batch) << 32 | offset;
  }
  static __device__ long long combine(long long a, long long b) { return a > b ? a : b; }
};

// Segments in the upper half, tiles in the lower.
struct Count {
  static __device__ long long of(int segments, int tiles) {
    return static_cast<long long>(segments) << 32 | tiles;
  }
  static __device__ long long combine(long long a, long long b) { return a + b; }
};

template <typename Operation>
__device__ long long warp_scan(long long value) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const long long before = __shfl_up_sync(~0u, value, distance);
    if (threadIdx.x % kWarpSize >= distance) value = Operation::combine(value, before);
  }
  return value;
}

// Turns each value (0 or more) into the combination of `carry` and all values up to it, and `carry`
// into that of all. Collective over the CTA.
template <typename Operation, int kItems>
__device__ void inclusive_scan(long long (&values)[kItems], long long& carry,
                               long long (&warp_results)[kWarpSize]) {
  long long result = 0;  // of the warp
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    values[i] = Operation::combine(warp_scan<Operation>(values[i]), result);
    result = __shfl_sync(~0u, values[i], kWarpSize - 1);
  }
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  __syncthreads();  // the results of the last scan have been read
  if (lane == 0) warp_results[warp] = result;
  __syncthreads();  // the results of all warps are there
  const int num_warps = blockDim.x / kWarpSize;
  const long long all = warp_scan<Operation>(lane < num_warps ? warp_results[lane] : 0);
  const long long before = __shfl_sync(~0u, all, max(warp - 1, 0));
  const long long start = warp == 0 ? carry : Operation::combine(carry, before);
#pragma unroll
  for (int i = 0; i < kItems; ++i) values[i] = Operation::combine(values[i], start);
  carry = Operation::combine(carry, __shfl_sync(~0u, all, kWarpSize - 1));
}

template <typename Row>
__global__ void __launch_bounds__(Row::kConfig.max_threads, 1)
    schedule_kernel(const __grid_constant__ ScheduleParams params) {
  constexpr int kItems = Row::kConfig.items;
  __shared__ long long warp_results[kWarpSize];
  __shared__ unsigned classes;  // those that occur
  const ForwardParams& forward = params.forward;
  const Schedule& schedule = forward.schedule;
  const int num_segments = schedule.num_segments;
  const int chunk_size = blockDim.x * kItems;
  const int warp_begin = threadIdx.x / kWarpSize * (kWarpSize * kItems) + threadIdx.x % kWarpSize;
  if (threadIdx.x == 0) classes = 0;
  // The forward may be launched now; it waits for this kernel's end by itself.
  cudaTriggerProgrammaticLaunchCompletion();

  // 1
  const auto find_begins = [&](const int32_t* cu_seqlens, ForwardOperand operand, int total,
                               int* begins) {
    long long carry = 0;
    for (int chunk = 0; chunk < num_segments; chunk += chunk_size) {
      long long largest[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int number = min(chunk + warp_begin + i * kWarpSize, num_segments - 1);
        const int batch = number / schedule.batch_segments;
        const int index = number - batch * schedule.batch_segments;
        const int offset =
            index == 0 ? 0
                       : __ldg(cu_seqlens + forward.batch_map.offset(operand, batch) + index - 1);
        largest[i] = LargestOffset::of(batch, clip(offset, total));
      }
      inclusive_scan<LargestOffset>(largest, carry, warp_results);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const int number = chunk + warp_begin + i * kWarpSize;
        if (number < num_segments) begins[number] = static_cast<int>(largest[i]);
      }
    }
  };
  find_begins(params.cu_seqlens_q, kForwardCuSeqlensQ, forward.seqlen_q, schedule.query_begins());
  find_begins(params.cu_seqlens_k, kForwardCuSeqlensK, forward.seqlen_k, schedule.key_begins());
  __syncthreads();  // the begins, read by other threads, have been written

  // 2
  int tiles[kItems];
  int work[kItems];  // class; -1 where there is no row
  const auto look_at_chunk = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int number = chunk + warp_begin + i * kWarpSize;
      work[i] = -1;
      if (number >= num_segments) continue;
      const int batch = number / schedule.batch_segments;
      const int index = number - batch * schedule.batch_segments;
      Segment segment;
      forward.find_queries(batch, index, segment);
      forward.find_keys(batch, index, segment);
      if (segment.num_queries == 0) continue;
      const int rows = segment.num_queries * forward.output.qhead_per_khead.divisor;
      tiles[i] = ceil_div(rows, forward.rows_per_tile) * forward.order.heads;
      work[i] = work_class(segment.seqlen_k);
    }
  };
  unsigned my_classes = 0;
  for (int chunk = 0; chunk < num_segments; chunk += chunk_size) {
    look_at_chunk(chunk);
#pragma unroll
    for (int i = 0; i < kItems; ++i) my_classes |= work[i] < 0 ? 0u : 1u << work[i];
  }
  my_classes = __reduce_or_sync(~0u, my_classes);
  if (threadIdx.x % kWarpSize == 0) atomicOr(&classes, my_classes);
  __syncthreads();  // all classes are known

  const bool one_chunk = num_segments <= chunk_size;
  long long carry = 0;
  for (unsigned left = classes; left != 0;) {
    const int current = 31 - __clz(left);
    left ^= 1u << current;
    for (int chunk = 0; chunk < num_segments; chunk += chunk_size) {
      if (!one_chunk) look_at_chunk(chunk);
      long long counts[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        counts[i] = work[i] == current ? Count::of(1, tiles[i]) : 0;
      }
      inclusive_scan<Count>(counts, carry, warp_results);
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        if (work[i] != current) continue;
        const int place = static_cast<int>(counts[i] >> 32) - 1;
        schedule.tile_ends()[place] = static_cast<int>(counts[i]);
        schedule.numbers()[place] = chunk + warp_begin + i * kWarpSize;
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
#define INSTANTIATE_SCHEDULE_KERNEL(max_threads, items)                                       \
  namespace fa {                                                                              \
  struct schedule_##max_threads##_##items {                                                   \
    static constexpr ScheduleConfig kConfig{max_threads, items};                              \
  };                                                                                          \
  const void* schedule_##max_threads##_##items##_symbol() {                                   \
    return reinterpret_cast<const void*>(&schedule_kernel<schedule_##max_threads##_##items>); \
  }                                                                                           \
  }
