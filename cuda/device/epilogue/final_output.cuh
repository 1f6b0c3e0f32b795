// Final output: one tile's fp32 accumulator -> 16-bit O through shared memory, and LSE.
//
//   O[row, :] = round(acc[row, :])     acc normalised already, rows without keys 0
//
// Executed by all threads of a CTA (2 per row). Reads registers, borrows kBlockM x kHeadDim 16-bit
// elements of shared memory, writes O and LSE once.
//
//   all threads   meet | stmatrix -> smem | fence, arrive | LSE -> global |
//   TMA path      last warp: wait | one lane: TMA store, wait until smem is read
//   predicated    wait | smem -> registers | 16-byte stores -> global
//
// Shared memory: panels of 64 (or 32, 16) columns, rows of one panel 128 (64, 32) bytes with TMA's
// swizzle, so that neither stmatrix nor the 16-byte reads have bank conflicts.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "device/epilogue/convert.cuh"
#include "device/epilogue/output_tile.cuh"

namespace fa {

template <DataType kType, int kHeadDim, int kBlockM, ColumnOrder kOrder, int kBarrierId>
struct FinalOutput {
  static constexpr int kNumThreads = 2 * kBlockM;
  static constexpr int kPanelColumns = output_panel_columns(kHeadDim);
  static constexpr int kNumPanels = kHeadDim / kPanelColumns;
  static constexpr int kPanelBytes = kBlockM * kPanelColumns * 2;
  // Named barriers of this struct: kBarrierId, all threads; kBarrierId + 1, O is in shared memory.
  static constexpr int kMeeting = kBarrierId;
  static constexpr int kOInSmem = kBarrierId + 1;

  static __device__ void store_o(const OutputParams& params, const OutputTile& tile,
                                 const float (&acc)[kHeadDim / 2], const float (&lse)[2],
                                 char* smem, int thread) {
    // All threads arrive and wait: the memory that O borrows is no longer read by any.
    cutlass::arch::NamedBarrier::sync(kNumThreads, kMeeting);
    registers_to_smem(acc, smem, thread);
    cutlass::arch::fence_view_async_shared();
    if (params.tma_store) {
      // All threads arrive, only the last warp waits (hence 32 more participants): O is in shared
      // memory.
      cutlass::arch::NamedBarrier::arrive(kNumThreads + kWarpSize, kOInSmem);
      store_lse(params, tile, lse, thread);
      if (thread / kWarpSize == kNumThreads / kWarpSize - 1) {
        cutlass::arch::NamedBarrier::sync(kNumThreads + kWarpSize, kOInSmem);
        if (cute::elect_one_sync()) tma_store(params, tile, smem);
      }
    } else {
      store_lse(params, tile, lse, thread);
      // All threads arrive and wait: O is in shared memory.
      cutlass::arch::NamedBarrier::sync(kNumThreads, kOInSmem);
      smem_to_global(params, tile, smem, thread);
    }
  }

  static __device__ void store_empty(const OutputParams& params, const OutputTile& tile,
                                     int thread) {
    store_empty_tile<uint16_t, kNumThreads>(params, tile, thread);
  }

 private:
  // Panels innermost in both orders: they share an address up to a constant.
  static __device__ void registers_to_smem(const float (&acc)[kHeadDim / 2], char* smem,
                                           int thread) {
    constexpr int kGroups = kPanelColumns / 16;  // of 16 columns, in a panel
    if constexpr (kOrder == ColumnOrder::plain) {
      // One stmatrix stores 16 x 16 elements: lane l names row l % 16 and 8-column unit l / 16.
      const int row = thread / kWarpSize * 16 + thread % 16;
      const int unit = thread % kWarpSize / 16;
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        char* const target =
            smem + output_offset_bytes(row, 16 * group + 8 * unit, kBlockM, kHeadDim);
#pragma unroll
        for (int panel = 0; panel < kNumPanels; ++panel) {
          const float* const a = acc + 8 * (panel * kGroups + group);
          cute::SM90_U32x4_STSM_N::copy(
              pack<kType>(a[0], a[1]), pack<kType>(a[2], a[3]), pack<kType>(a[4], a[5]),
              pack<kType>(a[6], a[7]),
              *reinterpret_cast<cute::uint128_t*>(target + panel * kPanelBytes));
        }
      }
    } else {
      // A 2 x 2 swap inside the thread leaves four contiguous columns of each row: 8-byte stores.
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = accumulator_coordinate(thread, 2 * half).row;
          const int column = 16 * group + 4 * (thread % 4);
          char* const target = smem + output_offset_bytes(row, column, kBlockM, kHeadDim);
#pragma unroll
          for (int panel = 0; panel < kNumPanels; ++panel) {
            const float* const a = acc + 8 * (panel * kGroups + group) + 2 * half;
            *reinterpret_cast<uint2*>(target + panel * kPanelBytes) =
                uint2{pack<kType>(a[0], a[4]), pack<kType>(a[1], a[5])};
          }
        }
      }
    }
  }

  // One thread: store every panel, return when shared memory has been read (not when O is visible).
  static __device__ void tma_store(const OutputParams& params, const OutputTile& tile, char* smem) {
#pragma unroll
    for (int panel = 0; panel < kNumPanels; ++panel) {
      if (panel * kPanelColumns >= params.head_dim) break;
      cute::SM90_TMA_STORE_4D::copy(&params.o_tensor_map, smem + panel * kPanelBytes,
                                    panel * kPanelColumns, tile.query_begin + tile.row_begin,
                                    tile.head_kv, tile.batch);
    }
    cute::tma_store_arrive();
    cute::tma_store_wait<0>();
  }

  // Eight (4, 2) threads per row of a panel; each reads all its vectors before the first store.
  static __device__ void smem_to_global(const OutputParams& params, const OutputTile& tile,
                                        const char* smem, int thread) {
    constexpr int kThreadsPerRow = kPanelColumns / 8;
    constexpr int kRowsPerPass = kNumThreads / kThreadsPerRow;
    constexpr int kPasses = kBlockM / kRowsPerPass;
    static_assert(kBlockM % kRowsPerPass == 0 && kPasses <= kThreadsPerRow);
    const int first_row = thread / kThreadsPerRow;
    const int column = thread % kThreadsPerRow * 8;
    uint4 vectors[kPasses][kNumPanels];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const char* const source =
          smem + output_offset_bytes(first_row + pass * kRowsPerPass, column, kBlockM, kHeadDim);
#pragma unroll
      for (int panel = 0; panel < kNumPanels; ++panel) {
        vectors[pass][panel] = *reinterpret_cast<const uint4*>(source + panel * kPanelBytes);
      }
    }
    // Thread p of a row's group divides for pass p; the group shares the pointers by shuffles.
    const uint64_t my_row = reinterpret_cast<uint64_t>(o_row<uint16_t>(
        params, tile, first_row + thread % kThreadsPerRow % kPasses * kRowsPerPass));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      uint16_t* const o =
          reinterpret_cast<uint16_t*>(__shfl_sync(0xffffffff, my_row, pass, kThreadsPerRow));
      if (first_row + pass * kRowsPerPass >= tile.num_rows) continue;
#pragma unroll
      for (int panel = 0; panel < kNumPanels; ++panel) {
        if (panel * kPanelColumns + column < params.head_dim) {
          // Cached in L2 only: 0.5 % faster for packed sequences.
          __stcg(reinterpret_cast<uint4*>(o + panel * kPanelColumns + column),
                 vectors[pass][panel]);
        }
      }
    }
  }
};

}  // namespace fa
