// Bulk output: a warp's fp32 accumulator, 16 rows -> O through shared memory, and LSE.
//
//   O[row, :] = convert(acc[row, :])     acc normalised already, rows without keys 0
//
// Executed by each warp on its own. Reads registers, borrows 16 rows of shared memory that are the
// warp's, writes O and LSE once.
//
//   all lanes       meet | rows -> smem | fence | LSE -> global | meet
//   lane r < rows   bulk copy of row r -> global, wait until smem is read
//
// A row is copied by itself, so that dense, packed GQA and packed sequences, and columns that a
// narrower head dimension leaves out, need nothing but the row's address. (A TMA store of the tile
// through a tensor map is up to 0.7 % slower, 16-byte stores are 0.5 % slower for 16 bits and 2 % for
// fp32.)
//
// Shared memory: O's row r at the beginning of acc's row r.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/barrier.h"
#include "device/epilogue/convert.cuh"
#include "device/epilogue/output_tile.cuh"

namespace fa {

template <DataType kType, int kHeadDim, ColumnOrder kOrder>
struct BulkOutput {
  using Element = std::conditional_t<kType == DataType::f32, float, uint16_t>;

  static __device__ void store_o(const OutputParams& params, const OutputTile& tile,
                                 const float (&acc)[kHeadDim / 2], const float (&lse)[2],
                                 char* smem, int lane) {
    __syncwarp();  // the memory that O borrows is no longer read by any lane
    registers_to_smem(acc, smem, lane);
    cutlass::arch::fence_view_async_shared();
    store_lse(params, tile, lse, lane);
    __syncwarp();  // O is in shared memory
    if (lane < tile.num_rows) {
      cute::SM90_BULK_COPY_S2G::copy(smem + offset_bytes(lane, 0),
                                     o_row<Element>(params, tile, lane),
                                     size_bytes(kType) * params.head_dim);
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();  // shared memory has been read; O need not be visible
    }
  }

  static __device__ void store_empty(const OutputParams& params, const OutputTile& tile, int lane) {
    store_empty_tile<Element, kWarpSize>(params, tile, lane);
  }

 private:
  static __device__ int offset_bytes(int row, int column) {
    return acc_offset_bytes(row, column, kHeadDim, size_bytes(kType));
  }

  static __device__ void registers_to_smem(const float (&acc)[kHeadDim / 2], char* smem, int lane) {
    if constexpr (kType != DataType::f32 && kOrder == ColumnOrder::plain) {
      // One stmatrix stores 16 x 16 elements: lane l names row l % 16 and 8-column unit l / 16.
      char* const target = smem + offset_bytes(lane % 16, lane / 16 * 8);
#pragma unroll
      for (int column = 0; column < kHeadDim; column += 16) {
        const float* const a = acc + column / 2;
        cute::SM90_U32x4_STSM_N::copy(
            pack<kType>(a[0], a[1]), pack<kType>(a[2], a[3]), pack<kType>(a[4], a[5]),
            pack<kType>(a[6], a[7]),
            *reinterpret_cast<cute::uint128_t*>(target + offset_bytes(0, column)));
      }
    } else {
      const int q = lane % 4;
#pragma unroll
      for (int column = 0; column < kHeadDim; column += 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const a = acc + column / 2 + 2 * half;
          const int row = accumulator_coordinate(lane, 2 * half).row;
          if constexpr (kOrder == ColumnOrder::plain) {
            char* const target = smem + offset_bytes(row, column + 2 * q);
            *reinterpret_cast<float2*>(target) = float2{a[0], a[1]};
            *reinterpret_cast<float2*>(target + offset_bytes(0, 8)) = float2{a[4], a[5]};
          } else {
            // A 2 x 2 swap inside the thread leaves four contiguous columns of each row.
            char* const target = smem + offset_bytes(row, column + 4 * q);
            if constexpr (kType == DataType::f32) {
              *reinterpret_cast<float4*>(target) = float4{a[0], a[4], a[1], a[5]};
            } else {
              *reinterpret_cast<uint2*>(target) =
                  uint2{pack<kType>(a[0], a[4]), pack<kType>(a[1], a[5])};
            }
          }
        }
      }
    }
  }
};

}  // namespace fa
