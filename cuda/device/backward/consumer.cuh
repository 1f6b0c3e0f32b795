// What the main loops of both kinds of tile share: a thread's arithmetic on its elements of S^T and
// dP^T, their way into shared memory, and zeros where an operand has rows that do not count.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "device/backward/traits.cuh"
#include "device/epilogue/convert.cuh"
#include "device/forward/softmax.cuh"

namespace fa {

// Volatile, so that the compiler keeps many of them in order instead of in registers.
__device__ inline float log2_in_order(float x) {
  float y;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <BackwardConfig kConfig>
class BackwardConsumer {
 protected:
  using Traits = BackwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Ring = typename Traits::Ring;
  using Element = typename Traits::Element;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using NamedBarrier = cutlass::arch::NamedBarrier;
  static constexpr DataType kType = kConfig.dtype;
  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kCountS = Traits::kScoreColumns / 2;

  __device__ BackwardConsumer(const BackwardParams& params, Smem& smem, int thread)
      : params_(params), smem_(smem), thread_(thread) {}

  // One lane per warp: what the warp's wgmma read is free.
  __device__ void release(uint64_t* empty, int stage) const {
    if (thread_ % kWarpSize == 0) EmptyBarrier::arrive(&empty[stage]);
  }

  // The query blocks of a tile, those of each head of its group.
  struct Walk {
    int block;            // of the sequence
    int workspace_block;  // its number in the workspace
    int left;             // blocks, with this one

    __device__ Walk(const BackwardTile& tile, int heads)
        : block(uniform(tile.blocks.begin)),
          workspace_block(uniform(static_cast<int>(tile.query_block)) + block),
          left((uniform(tile.blocks.end) - block) * heads) {}

    // By `count` blocks of one head, to one of the same head.
    __device__ void advance_in_head(int count = 1) {
      left -= count;
      block += count;
      workspace_block += count;
    }

    // By `count` blocks of one head. False: there is no next.
    __device__ bool advance(const QueryBlocks& blocks, int q_slots, int count = 1) {
      advance_in_head(count);
      if (left == 0) return false;
      if (block == blocks.end) {
        block = blocks.begin;
        workspace_block += q_slots - (blocks.end - block);
      }
      return true;
    }
  };

  // ---- Rows that do not count ---------------------------------------------------------------------

  // Zeroes rows [begin, end) of a tile of kRows rows. Every warpgroup does it for itself, so that
  // none waits for another; all write the same zeros. The swizzle stays within a row.
  template <int kRows, int kPanelColumns, int kElements>
  __device__ void zero_rows(Element (&tile)[kElements], int begin, int end) const {
    constexpr int kRowBytes = kPanelColumns * 2;
    constexpr int kPanelBytes = kRows * kRowBytes;
    FA_NO_UNROLL
    for (int panel = 0; panel < kElements * 2; panel += kPanelBytes) {
      FA_NO_UNROLL
      for (int byte = max(begin, 0) * kRowBytes + thread_ % kWarpgroupSize * 16;
           byte < min(end, kRows) * kRowBytes; byte += kWarpgroupSize * 16) {
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + panel + byte) = uint4{0, 0, 0, 0};
      }
    }
  }

  // Past the sequence's end there may be anything, and 0 * NaN is NaN.
  __device__ void zero_keys(const BackwardTile& tile) const {
    const int valid_keys = tile.keys.length - tile.key_begin;
    if constexpr (Traits::kWide) {
      const int peer_valid_keys = tile.keys.length - (tile.key_begin ^ kBlockN);
      if (min(valid_keys, peer_valid_keys) >= kBlockN) return;
      zero_rows<kBlockN, Traits::kPanelColumns>(smem_.peer_k, peer_valid_keys, kBlockN);
    } else {
      if (valid_keys >= kBlockN) return;
    }
    zero_rows<kBlockN, Traits::kPanelColumns>(smem_.k, valid_keys, kBlockN);
    zero_rows<kBlockN, Traits::kPanelColumnsV>(smem_.v, valid_keys, kBlockN);
    meet_warpgroup();
  }

  struct BlockRange {
    int begin, end;

    __device__ bool contains(int block) const { return block >= begin && block < end; }
  };

  // The query blocks of which every query counts.
  static __device__ BlockRange whole_blocks(const QueryRange& valid) {
    return {uniform(ceil_div(max(valid.begin, 0), kBlockM)), uniform(valid.end / kBlockM)};
  }

  // The query blocks of which every query counts and sees every key, if there is no softcap: the
  // main loops have a loop of their own for these.
  __device__ BlockRange plain_blocks(const QueryBlocks& blocks, const BlockRange& whole) const {
    return {uniform(max(blocks.full_begin, whole.begin)),
            params_.softcapped ? 0 : uniform(min(blocks.full_end, whole.end))};
  }

  __device__ void zero_q(const BackwardTile& tile, const BlockRange& whole, int block,
                         int stage) const {
    if (!whole.contains(block)) [[unlikely]] {
      zero_queries<Traits::kPanelColumns>(smem_.q[stage], tile, block);
    }
  }

  __device__ void zero_dout(const BackwardTile& tile, const BlockRange& whole, int block,
                            int stage) const {
    if (!whole.contains(block)) [[unlikely]] {
      zero_queries<Traits::kPanelColumnsV>(smem_.dout[stage], tile, block);
    }
  }

  // ---- Arithmetic ---------------------------------------------------------------------------------

  // LSE or delta of the queries of a thread's columns, 8 g + 2 (lane % 4) and the next one.
  using Statistics = float2[kCountS / 4];

  // `of_block`: of the first column's query.
  __device__ void load_statistics(const float* of_block, Statistics& values) const {
#pragma unroll
    for (int g = 0; g < kCountS / 4; ++g) {
      values[g] = *reinterpret_cast<const float2*>(of_block + 8 * g + 2 * (thread_ % 4));
    }
  }

  // The same, but the load stays where it is written: the compiler moves a C++ load behind the GEMM,
  // where it would wait until the tensor cores have read their operands.
  __device__ void load_in_order(const float* of_block, Statistics& values) const {
    const uint32_t address = cute::cast_smem_ptr_to_uint(of_block + 2 * (thread_ % 4));
#pragma unroll
    for (int g = 0; g < kCountS / 4; ++g) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(values[g].x), "=f"(values[g].y)
                   : "r"(address + 32 * g));
    }
  }

  // Spread over the warp: values[i] is that of column 32 i + lane.
  template <int kColumns>
  __device__ void load_spread(const float* of_block, float (&values)[kColumns / 32]) const {
    const uint32_t address = cute::cast_smem_ptr_to_uint(of_block + thread_ % kWarpSize);
#pragma unroll
    for (int i = 0; i < kColumns / 32; ++i) {
      asm volatile("ld.shared.f32 %0, [%1];" : "=f"(values[i]) : "r"(address + 128 * i));
    }
  }

  // What load_statistics gives from column `first` on. Collective over the warp.
  template <int kRegisters>
  __device__ void gather(const float (&spread)[kRegisters], int first, Statistics& values) const {
#pragma unroll
    for (int g = 0; g < kCountS / 4; ++g) {
      const int column = first + 8 * g;
      const int lane = column % 32 + 2 * (thread_ % 4);
      values[g].x = __shfl_sync(~0u, spread[column / 32], lane);
      values[g].y = __shfl_sync(~0u, spread[column / 32], lane + 1);
    }
  }

  // S^T -> P^T. kSoftcap: there may be one.
  template <bool kSoftcap>
  __device__ void exponentiate(float (&scores)[kCountS], const Statistics& lse) const {
    const bool softcapped = kSoftcap && params_.softcapped;
    if (softcapped) [[unlikely]] {
      // tanh(x) = 1 - 2 / (1 + e^2x): an absolute error near 1e-7, where tanh.approx has 5e-4.
      const float factor = 2.f * kLog2E * params_.tanh_factor;
#pragma unroll
      for (int i = 0; i < kCountS; ++i) {
        scores[i] = fmaf(-2.f, __fdividef(1.f, 1.f + exp2_approx(scores[i] * factor)), 1.f);
      }
    }
    const float scale = softcapped ? params_.softcap_log2 : params_.scale_log2;
#pragma unroll
    for (int g = 0; g < kCountS / 4; ++g) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const s = scores + 4 * g + 2 * half;
        s[0] = exp2_approx(fmaf(s[0], scale, -lse[g].x));
        s[1] = exp2_approx(fmaf(s[1], scale, -lse[g].y));
      }
    }
  }

  // dP^T -> dS^T without the scale. `lse` is read again with a softcap.
  template <bool kSoftcap>
  __device__ void multiply_ds(const float (&p)[kCountS], float (&dp)[kCountS],
                              const Statistics& delta, const float* lse) const {
#pragma unroll
    for (int g = 0; g < kCountS / 4; ++g) {
#pragma unroll
      for (int i = 4 * g; i < 4 * g + 4; ++i) {
        dp[i] = p[i] * (dp[i] - (i % 2 == 0 ? delta[g].x : delta[g].y));
      }
    }
    if (kSoftcap && params_.softcapped) [[unlikely]] {
      // The derivative 1 - tanh^2, with the tanh that P came from: rare enough to find it again.
      const float factor = 1.f / params_.softcap_log2;
#pragma unroll
      for (int g = 0; g < kCountS / 4; ++g) {
        const float2 of_columns = *reinterpret_cast<const float2*>(lse + 8 * g + 2 * (thread_ % 4));
#pragma unroll
        for (int i = 4 * g; i < 4 * g + 4; ++i) {
          const float tanh =
              (log2_in_order(p[i]) + (i % 2 == 0 ? of_columns.x : of_columns.y)) * factor;
          dp[i] = p[i] == 0.f ? 0.f : dp[i] * fmaf(-tanh, tanh, 1.f);
        }
      }
    }
  }

  static __device__ void convert(const float (&values)[kCountS], uint32_t (&packed)[kCountS / 2]) {
#pragma unroll
    for (int i = 0; i < kCountS / 2; ++i) {
      packed[i] = pack<kType>(values[2 * i], values[2 * i + 1]);
    }
  }

  // P^T or dS^T -> shared memory, turned: rows of queries, panels of 64 keys. One stmatrix stores
  // 16 queries x 16 keys: lane l names query l % 8 + 8 (l / 16) and 8-key unit l / 8 % 2.
  __device__ void store_turned(const uint32_t (&packed)[kCountS / 2], Element* target,
                               int first_query) const {
    store_turned(packed, reinterpret_cast<char*>(target) + turned_offset(opaque(thread_)) +
                             first_query * kSwizzledRowBytes);
  }

  // Where the thread's first vector lies in a block.
  static __device__ int turned_offset(int thread) {
    const int lane = thread % kWarpSize;
    const int query = lane % 8 + lane / 16 * 8;
    const int key = (thread / kWarpSize * 16 + lane / 8 % 2 * 8) % kBlockN;
    return static_cast<int>(panel_offset_bytes(query, key, kBlockM, kBlockN));
  }

  static __device__ void store_turned(const uint32_t (&packed)[kCountS / 2], char* at) {
#pragma unroll
    for (int i = 0; i < kCountS / 8; ++i) {
      cute::SM90_U16x8_STSM_T::copy(
          packed[4 * i], packed[4 * i + 1], packed[4 * i + 2], packed[4 * i + 3],
          *reinterpret_cast<cute::uint128_t*>(at + i * 16 * kSwizzledRowBytes));
    }
  }

  const BackwardParams& params_;
  Smem& smem_;
  const int thread_;
  Ring ring_;  // the block of Q and dO to be multiplied next

  static constexpr int kSwizzledRowBytes = 128;

 private:
  template <int kPanelColumns, int kElements>
  __device__ void zero_queries(Element (&queries)[kElements], const BackwardTile& tile,
                               int block) const {
    zero_rows<kBlockM, kPanelColumns>(queries, 0, tile.valid.begin - block * kBlockM);
    if (tile.valid.end < block * kBlockM + kBlockM) {
      zero_rows<kBlockM, kPanelColumns>(queries, tile.valid.end - block * kBlockM, kBlockM);
    }
    meet_warpgroup();
  }

  // The threads of the warpgroup arrive and wait: what they zeroed is there for wgmma.
  __device__ void meet_warpgroup() const {
    cutlass::arch::fence_view_async_shared();
    NamedBarrier::sync(kWarpgroupSize,
                       Traits::kWarpgroupBarrier + opaque(thread_) / kWarpgroupSize);
  }
};

}  // namespace fa
