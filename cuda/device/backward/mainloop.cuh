// The main loop of one consumer warpgroup: 64 keys of the tile against the query blocks of every
// head of the group. S^T, dP^T, dQ, dK and dV in registers; P^T and dS^T as the A operand of dV and
// dK straight from registers; dS through shared memory for dQ, which needs all keys of the tile.
//
//   S^T = K Q^T   P = 2^(S - LSE)   dV += P^T dO
//   dP^T = V dO^T   dS = P * (dP - delta)   dK += dS^T Q   dQ = dS K, added in global memory
//
//   tensor cores    | S^T | dP^T | dV       | dQ | dK         |
//   this warpgroup        | P    | dS -> smem    | dQ -> smem |
//
// The exponentials run under dP^T, dS under dV, the hand-over of dQ under dK. Where registers allow
// a block of 128 queries, S^T and dP^T of its second half run under the first half's exponentials
// and dS as well.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "device/backward/traits.cuh"
#include "device/epilogue/convert.cuh"
#include "device/forward/softmax.cuh"

namespace fa {

// Volatile, so that the compiler keeps many of them in order instead of in registers.
__device__ inline float log2_approx(float x) {
  float y;
  asm volatile("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

template <BackwardConfig kConfig>
class BackwardMainloop {
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
  static constexpr int kParts = Traits::kParts;
  static constexpr int kPartM = kBlockM / kParts;
  static constexpr int kCountS = kPartM / 2;
  static constexpr int kCountDq = kBlockM * Traits::kHeadDim / Traits::kConsumerThreads;

 public:
  static constexpr int kCountDk = Traits::kHeadDim / 2;
  static constexpr int kCountDv = Traits::kHeadDimV / 2;

  __device__ BackwardMainloop(const BackwardParams& params, Smem& smem, int thread)
      : params_(params), smem_(smem), thread_(thread) {}

  // Fragments of dK, without the scale, and dV.
  __device__ void run(const BackwardTile& tile, float (&dk)[kCountDk], float (&dv)[kCountDv]) {
    using namespace cute;
    const int warpgroup = cutlass::canonical_warp_group_idx();
    const auto rows_of_keys = [&](auto layout, Element* memory) {
      constexpr int kColumns = decltype(size<1>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout)(_, _, _0{}),
                        Shape<_64, Int<kColumns>>{}, make_coord(warpgroup, 0));
    };
    const auto thread_scores = typename Traits::MmaScores{}.get_slice(0);
    const auto thread_dp = typename Traits::MmaDp{}.get_slice(0);
    const auto thread_dv = typename Traits::MmaDv{}.get_slice(0);
    const auto thread_dk = typename Traits::MmaDk{}.get_slice(0);
    const auto thread_dq = typename Traits::MmaDq{}.get_slice(0);
    const auto r_k =
        thread_scores.partition_fragment_A(rows_of_keys(typename Traits::LayoutK{}, smem_.k));
    const auto r_v =
        thread_dp.partition_fragment_A(rows_of_keys(typename Traits::LayoutV{}, smem_.v));
    // Part `part` of a block's queries, of all stages.
    const auto part_of_rows = [&](auto layout, Element* memory, int part) {
      constexpr int kColumns = decltype(size<1>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout),
                        Shape<Int<kPartM>, Int<kColumns>, Int<Traits::kStages>>{},
                        make_coord(part, 0, 0));
    };
    const auto part_of_columns = [&](auto layout, Element* memory, int part) {
      constexpr int kColumns = decltype(size<0>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout),
                        Shape<Int<kColumns>, Int<kPartM>, Int<Traits::kStages>>{},
                        make_coord(0, part, 0));
    };
    const auto s_ds = make_tensor(make_smem_ptr(smem_.ds[0]), typename Traits::LayoutDs{});
    const auto s_kt = make_tensor(make_smem_ptr(smem_.k), typename Traits::LayoutKt{})(_, _, _0{});
    float scores[kParts][kCountS];  // S^T, then P^T
    float dp[kParts][kCountS];      // dP^T, then dS^T
    float dq[kCountDq];
    uint32_t p16[kParts][kCountS / 2];
    uint32_t ds16[kParts][kCountS / 2];
    auto r_dk = make_tensor(make_rmem_ptr(dk),
                            Layout<Shape<Shape<_2, _2, Int<Traits::kHeadDim / 8>>, _1, _1>>{});
    auto r_dv = make_tensor(make_rmem_ptr(dv),
                            Layout<Shape<Shape<_2, _2, Int<Traits::kHeadDimV / 8>>, _1, _1>>{});
    const auto as_operand = [](uint32_t(&packed)[kCountS / 2]) {
      return make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(packed)),
                         Layout<Shape<Shape<_2, _2, _2>, _1, Int<kPartM / 16>>>{});
    };

    const auto multiply_scores = [&](int part, int stage) {
      const auto r_q = thread_scores.partition_fragment_B(
          part_of_rows(typename Traits::LayoutQ{}, smem_.q[0], part));
      issue_gemm_ss<kType>(r_k, r_q(_, _, _, stage), scores[part]);
    };
    const auto multiply_dp = [&](int part, int stage) {
      const auto r_dout = thread_dp.partition_fragment_B(
          part_of_rows(typename Traits::LayoutDout{}, smem_.dout[0], part));
      issue_gemm_ss<kType>(r_v, r_dout(_, _, _, stage), dp[part]);
    };
    const auto multiply_dv = [&](int part, int stage) {
      const auto r_doutt = thread_dv.partition_fragment_B(
          part_of_columns(typename Traits::LayoutDoutt{}, smem_.dout[0], part));
      issue_gemm_rs<typename Traits::MmaDv>(as_operand(p16[part]), r_doutt(_, _, _, stage), r_dv);
    };
    const auto multiply_dk = [&](int part, int stage) {
      const auto r_qt = thread_dk.partition_fragment_B(
          part_of_columns(typename Traits::LayoutQt{}, smem_.q[0], part));
      issue_gemm_rs<typename Traits::MmaDk>(as_operand(ds16[part]), r_qt(_, _, _, stage), r_dk);
    };
    const auto multiply_dq = [&](int stage) {
      if constexpr (Traits::kDqSplit == DqSplit::transposed) {
        const auto r_a = thread_dq.partition_fragment_A(
            local_tile(s_kt, Shape<_64, Int<kBlockN>>{}, make_coord(warpgroup, 0)));
        const auto r_b = thread_dq.partition_fragment_B(s_ds);
        issue_gemm_ss<kType, true, false>(r_a, r_b(_, _, _, stage), dq);
      } else {
        constexpr bool kRows = Traits::kDqSplit == DqSplit::rows;
        const auto r_a = thread_dq.partition_fragment_A(
            local_tile(s_ds, Shape<_64, Int<kBlockN>, Int<Traits::kStages>>{},
                       make_coord(kRows ? warpgroup : 0, 0, 0)));
        const auto r_b = thread_dq.partition_fragment_B(
            local_tile(s_kt, Shape<_64, Int<kBlockN>>{}, make_coord(kRows ? 0 : warpgroup, 0)));
        issue_gemm_ss<kType, false, true>(r_a(_, _, _, stage), r_b, dq);
      }
    };

    smem_.mask.prepare(tile, thread_);
#pragma unroll
    for (int i = 0; i < kCountDk; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kCountDv; ++i) dv[i] = 0.f;
    // What a block needs of the tile is read from shared memory each time: registers are scarce.
    int block = tile.blocks.begin;
    int left = (tile.blocks.end - block) * params_.qhead_per_khead;

    FullBarrier::wait(&smem_.k_full, tile.phase);
    FullBarrier::wait(&smem_.v_full, tile.phase);
    const int valid_keys = tile.keys.length - tile.key_begin;
    // Past the sequence's end there may be anything, and 0 * NaN is NaN.
    if (valid_keys < kBlockN) {
      zero_rows<kBlockN>(smem_.k, valid_keys, kBlockN);
      zero_rows<kBlockN>(smem_.v, valid_keys, kBlockN);
      // The other warpgroup's rows of K are read as well, for dQ, but not before dS is written.
      meet_warpgroup();
    }

    FA_NO_UNROLL
    while (true) {
      const Ring ring = ring_;
      const int stage = uniform(ring.stage);
      FullBarrier::wait(&smem_.q_full[ring.stage], ring.phase);
      if (cut(tile, block)) zero_queries(smem_.q[ring.stage], tile, block);
      multiply_scores(0, stage);
      FullBarrier::wait(&smem_.dout_full[ring.stage], ring.phase);
      if (cut(tile, block)) zero_queries(smem_.dout[ring.stage], tile, block);
      multiply_dp(0, stage);

      const float* const lse = smem_.statistics[ring.stage];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Younger than S^T of the part: its dP^T, the pairs of later parts, dV of earlier ones.
        if (part == 0) {
          warpgroup_wait<1>();
        } else {
          warpgroup_wait<2>();
        }
        fence_registers(scores[part]);
        if (part == 0) {
          if constexpr (kParts == 2) {
            multiply_scores(1, stage);
            multiply_dp(1, stage);
          }
        }
        exponentiate(scores[part], lse + part * kPartM);
        if (tile.blocks.masked(block)) {
          smem_.mask.apply(scores[part], block * kBlockM + part * kPartM, thread_);
        }
        if constexpr (Traits::kDvBeforeDs) {
          convert(scores[part], p16[part]);
          multiply_dv(part, stage);
        }
        // Younger than dP^T of the part: the pairs of later parts, dV of this and earlier ones.
        constexpr int kDv = Traits::kDvBeforeDs ? 1 : 0;
        if (part == 0) {
          warpgroup_wait<2 * (kParts - 1) + kDv>();
        } else {
          warpgroup_wait<2 * kDv>();
        }
        fence_registers(dp[part]);
        multiply_ds(scores[part], dp[part], lse + part * kPartM);
        if constexpr (!Traits::kDvBeforeDs) {
          convert(scores[part], p16[part]);
          multiply_dv(part, stage);
        }
        convert(dp[part], ds16[part]);
        store_ds(ds16[part], ring.stage, part);
      }
      cutlass::arch::fence_view_async_shared();
      // All consumer threads arrive and wait: dS of the block is in shared memory.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kDsWritten);
      multiply_dq(stage);
#pragma unroll
      for (int part = 0; part < kParts; ++part) multiply_dk(part, stage);

      warpgroup_wait<1 + kParts>();
      fence_registers(dv);
      release(smem_.dout_empty, ring.stage);
      warpgroup_wait<kParts>();
      fence_registers(dq);
      hand_over_dq(dq);
      warpgroup_wait<0>();
      fence_registers(dk);
      release(smem_.q_empty, ring.stage);
      ring_.advance();
      if (--left == 0) break;
      if (++block == tile.blocks.end) block = tile.blocks.begin;
    }
  }

 private:
  // One lane per warp: what the warp's wgmma read is free.
  __device__ void release(uint64_t* empty, int stage) const {
    if (thread_ % kWarpSize == 0) EmptyBarrier::arrive(&empty[stage]);
  }

  // Zeroes rows [begin, end) of a tile of kRows rows. Every warpgroup does it for itself, so that
  // none waits for another; all write the same zeros. The swizzle stays within a row.
  template <int kRows, int kElements>
  __device__ void zero_rows(Element (&tile)[kElements], int begin, int end) const {
    constexpr int kRowBytes = Traits::kPanelColumns * 2;
    constexpr int kPanelBytes = kRows * kRowBytes;
    for (int panel = 0; panel < kElements * 2; panel += kPanelBytes) {
      FA_NO_UNROLL
      for (int byte = max(begin, 0) * kRowBytes + thread_ % kWarpgroupSize * 16;
           byte < min(end, kRows) * kRowBytes; byte += kWarpgroupSize * 16) {
        *reinterpret_cast<uint4*>(reinterpret_cast<char*>(tile) + panel + byte) = uint4{0, 0, 0, 0};
      }
    }
  }

  // Are there queries in the block whose Q and dO do not count?
  static __device__ bool cut(const BackwardTile& tile, int block) {
    return block * kBlockM < tile.valid.begin || block * kBlockM + kBlockM > tile.valid.end;
  }

  template <int kElements>
  __device__ void zero_queries(Element (&queries)[kElements], const BackwardTile& tile,
                               int block) const {
    zero_rows<kBlockM>(queries, 0, tile.valid.begin - block * kBlockM);
    if (tile.valid.end < block * kBlockM + kBlockM) {
      zero_rows<kBlockM>(queries, tile.valid.end - block * kBlockM, kBlockM);
    }
    meet_warpgroup();
  }

  // The threads of the warpgroup arrive and wait: what they zeroed is there for wgmma.
  __device__ void meet_warpgroup() const {
    cutlass::arch::fence_view_async_shared();
    NamedBarrier::sync(kWarpgroupSize,
                       Traits::kWarpgroupBarrier + opaque(thread_) / kWarpgroupSize);
  }

  // Statistics of columns 8 g + 2 (lane % 4) and the next one.
  __device__ float2 statistics(const float* of_block, int g) const {
    return *reinterpret_cast<const float2*>(of_block + 8 * g + 2 * (thread_ % 4));
  }

  // S^T -> P^T.
  __device__ void exponentiate(float (&scores)[kCountS], const float* lse) const {
    if (params_.softcapped) {
      // tanh(x) = 1 - 2 / (1 + e^2x): an absolute error near 1e-7, where tanh.approx has 5e-4.
      const float factor = 2.f * kLog2E * params_.tanh_factor;
#pragma unroll
      for (int i = 0; i < kCountS; ++i) {
        scores[i] = fmaf(-2.f, __fdividef(1.f, 1.f + exp2_approx(scores[i] * factor)), 1.f);
      }
    }
    const float scale = params_.softcapped ? params_.softcap_log2 : params_.scale_log2;
#pragma unroll
    for (int g = 0; g < kPartM / 8; ++g) {
      const float2 of_columns = statistics(lse, g);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const s = scores + 4 * g + 2 * half;
        s[0] = exp2_approx(fmaf(s[0], scale, -of_columns.x));
        s[1] = exp2_approx(fmaf(s[1], scale, -of_columns.y));
      }
    }
  }

  // dP^T -> dS^T without the scale.
  __device__ void multiply_ds(const float (&p)[kCountS], float (&dp)[kCountS],
                              const float* lse) const {
#pragma unroll
    for (int g = 0; g < kPartM / 8; ++g) {
      const float2 delta = statistics(lse + kBlockM, g);
#pragma unroll
      for (int i = 4 * g; i < 4 * g + 4; ++i) {
        dp[i] = p[i] * (dp[i] - (i % 2 == 0 ? delta.x : delta.y));
      }
    }
    if (params_.softcapped) {
      // The derivative 1 - tanh^2, with the tanh that P came from: rare enough to find it again.
      const float factor = 1.f / params_.softcap_log2;
#pragma unroll
      for (int g = 0; g < kPartM / 8; ++g) {
        const float2 of_columns = statistics(lse, g);
#pragma unroll
        for (int i = 4 * g; i < 4 * g + 4; ++i) {
          const float tanh =
              (log2_approx(p[i]) + (i % 2 == 0 ? of_columns.x : of_columns.y)) * factor;
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

  // dS^T -> dS: query rows of 64 keys, one panel for each warpgroup's keys. One stmatrix stores 16
  // queries x 16 keys, transposed: lane l names query l % 8 + 8 (l / 16) and 8-key unit l / 8 % 2.
  __device__ void store_ds(const uint32_t (&ds16)[kCountS / 2], int stage, int part) const {
    const int thread = opaque(thread_);
    const int lane = thread % kWarpSize;
    const int query = lane % 8 + lane / 16 * 8;
    const int key = thread / kWarpSize * 16 + lane / 8 % 2 * 8;
    char* const target = reinterpret_cast<char*>(smem_.ds[stage]) +
                         output_offset_bytes(part * kPartM + query, key, kBlockM, kBlockN);
#pragma unroll
    for (int i = 0; i < kPartM / 16; ++i) {
      cute::SM90_U16x8_STSM_T::copy(
          ds16[4 * i], ds16[4 * i + 1], ds16[4 * i + 2], ds16[4 * i + 3],
          *reinterpret_cast<cute::uint128_t*>(target + i * 16 * Traits::kPanelColumns * 2));
    }
  }

  // dQ of the block to the adder, in the order of dq_offset.
  __device__ void hand_over_dq(const float (&dq)[kCountDq]) {
    const int thread = opaque(thread_);
    const int warpgroup = thread / kWarpgroupSize;
    EmptyBarrier::wait(&smem_.dq_empty[warpgroup], dq_phase_ ^ 1);
    float4* const target = reinterpret_cast<float4*>(smem_.dq[warpgroup]);
#pragma unroll
    for (int i = 0; i < kCountDq / 4; ++i) {
      target[i * kWarpgroupSize + thread % kWarpgroupSize] =
          float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    }
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (thread % kWarpSize == 0) EmptyBarrier::arrive(&smem_.dq_full[warpgroup]);
    dq_phase_ ^= 1;
  }

  const BackwardParams& params_;
  Smem& smem_;
  const int thread_;
  Ring ring_;  // the block of Q and dO to be multiplied next
  uint32_t dq_phase_ = 0;
};

}  // namespace fa
