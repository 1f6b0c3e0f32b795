// The main loop of one consumer warpgroup: 64 keys of the tile against the query blocks of every
// head of the group. S^T, dP^T, dQ, dK and dV in registers; P^T and dS^T as the A operand of dV and
// dK straight from registers; dS through shared memory for dQ, which needs all keys of the tile.
//
//   S^T = K Q^T   P = 2^(S - LSE)   dV += P^T dO
//   dP^T = V dO^T   dS = P * (dP - delta)   dK += dS^T Q   dQ = dS K, added in global memory
//
//   tensor cores    | S^T | dP^T | dV         | dQ | dK         |
//   this warpgroup        | P    | dS -> smem      | dQ -> smem |
//
// The exponentials run under dP^T, dS under dV, the stores of dQ under dK and the fence behind them
// under the next block's S^T. With blocks of 128 queries dV is issued when dS is stored.
#pragma once

#include "device/backward/consumer.cuh"

namespace fa {

template <BackwardConfig kConfig>
class NarrowMainloop : BackwardConsumer<kConfig> {
  using Base = BackwardConsumer<kConfig>;
  using Base::kBlockM;
  using Base::kBlockN;
  using Base::kCountS;
  using Base::kType;
  using Base::params_;
  using Base::ring_;
  using Base::smem_;
  using Base::thread_;
  using typename Base::Element;
  using typename Base::EmptyBarrier;
  using typename Base::FullBarrier;
  using typename Base::NamedBarrier;
  using typename Base::Ring;
  using typename Base::Smem;
  using typename Base::Traits;
  static constexpr int kParts = Traits::kParts;
  static constexpr int kPartM = Traits::kScoreColumns;
  // With two parts there are registers for LSE and delta only if they are spread over the warp. With
  // one, all of LSE and then all of delta is faster.
  static constexpr bool kSpread = kParts > 1;
  static constexpr int kCountDq = kBlockM * Traits::kHeadDim / Traits::kConsumerThreads;

 public:
  static constexpr int kCountDk = Traits::kHeadDim / 2;
  static constexpr int kCountDv = Traits::kHeadDimV / 2;

  __device__ NarrowMainloop(const BackwardParams& params, Smem& smem, int thread)
      : Base(params, smem, thread) {}

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
    const auto as_operand = [](uint32_t(&packed)[kParts][kCountS / 2]) {
      return make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(packed)),
                         Layout<Shape<Shape<_2, _2, _2>, _1, Int<kBlockM / 16>>>{});
    };
    const auto all_parts = [](float(&parts)[kParts][kCountS]) -> auto& {
      return reinterpret_cast<float(&)[kParts * kCountS]>(parts);
    };

    const auto multiply_scores = [&](int stage) {
      const auto r_q = thread_scores.partition_fragment_B(
          make_tensor(make_smem_ptr(smem_.q[0]), typename Traits::LayoutQ{}));
      issue_gemm_ss<kType>(r_k, r_q(_, _, _, stage), all_parts(scores));
    };
    const auto multiply_dp = [&](int stage) {
      const auto r_dout = thread_dp.partition_fragment_B(
          make_tensor(make_smem_ptr(smem_.dout[0]), typename Traits::LayoutDout{}));
      issue_gemm_ss<kType>(r_v, r_dout(_, _, _, stage), all_parts(dp));
    };
    const auto multiply_dv = [&](int stage) {
      const auto r_doutt = thread_dv.partition_fragment_B(
          make_tensor(make_smem_ptr(smem_.dout[0]), typename Traits::LayoutDoutt{}));
      issue_gemm_rs<typename Traits::MmaDv>(as_operand(p16), r_doutt(_, _, _, stage), r_dv);
    };
    const auto multiply_dk = [&](int stage) {
      const auto r_qt = thread_dk.partition_fragment_B(
          make_tensor(make_smem_ptr(smem_.q[0]), typename Traits::LayoutQt{}));
      issue_gemm_rs<typename Traits::MmaDk>(as_operand(ds16), r_qt(_, _, _, stage), r_dk);
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
            local_tile(s_ds, Shape<_64, Int<kBlockN>, Int<Traits::kDsStages>>{},
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
    typename Base::Walk walk(tile, params_.qhead_per_khead);

    FullBarrier::wait(&smem_.k_full, tile.phase);
    FullBarrier::wait(&smem_.v_full, tile.phase);
    // The other warpgroup's rows of K are read as well, for dQ, but not before dS is written.
    this->zero_keys(tile);

    const int ds_offset = Base::turned_offset(thread_);

    // kPlain: the walk's block is one of plain_blocks, or one of its followers.
    const auto visit = [&]<bool kPlain>(bool masked, const typename Base::BlockRange& whole)
        __attribute__((always_inline)) {
      const Ring ring = ring_;
      const int stage = uniform(ring.stage);
      const int block = walk.block;
      // S^T starts before anything is known of dO.
      FullBarrier::wait(&smem_.q_full[ring.stage], ring.phase);
      if constexpr (!kPlain) this->zero_q(tile, whole, block, ring.stage);
      const float* const of_block = smem_.statistics[ring.stage];
      [[maybe_unused]] float lse[kBlockM / 32], delta[kBlockM / 32];
      if constexpr (kSpread) {
        this->template load_spread<kBlockM>(of_block, lse);
        this->template load_spread<kBlockM>(of_block + kBlockM, delta);
      }
      multiply_scores(stage);
      if (dq_stored_) publish_dq();
      FullBarrier::wait(&smem_.dout_full[ring.stage], ring.phase);
      if constexpr (!kPlain) this->zero_dout(tile, whole, block, ring.stage);
      multiply_dp(stage);

      // One set of registers: LSE and then delta.
      typename Base::Statistics statistics;
      if constexpr (!kSpread) this->load_statistics(of_block, statistics);
      warpgroup_wait<1>();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        fence_registers(scores[part]);
        if constexpr (kSpread) this->gather(lse, part * kPartM, statistics);
        this->template exponentiate<!kPlain>(scores[part], statistics);
        if constexpr (!kSpread) this->load_statistics(of_block + kBlockM, statistics);
        if constexpr (!kPlain) {
          if (masked) [[unlikely]] {
            smem_.mask.apply(scores[part], block * kBlockM + part * kPartM, thread_);
          }
        }
      }
      if constexpr (Traits::kDvBeforeDs) {
        this->convert(scores[0], p16[0]);
        multiply_dv(stage);
      }
      warpgroup_wait<Traits::kDvBeforeDs>();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        fence_registers(dp[part]);
        if constexpr (kSpread) this->gather(delta, part * kPartM, statistics);
        this->template multiply_ds<!kPlain>(scores[part], dp[part], statistics,
                                            of_block + part * kPartM);
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        this->convert(dp[part], ds16[part]);
        if constexpr (!Traits::kDvBeforeDs) this->convert(scores[part], p16[part]);
        Base::store_turned(ds16[part], reinterpret_cast<char*>(smem_.ds[ds_stage_]) + ds_offset +
                                           part * kPartM * Base::kSwizzledRowBytes);
      }
      if constexpr (!Traits::kDvBeforeDs) multiply_dv(stage);
      cutlass::arch::fence_view_async_shared();
      // All consumer threads arrive and wait: dS of the block is in shared memory.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kDsWritten);
      multiply_dq(uniform(ds_stage_));
      multiply_dk(stage);

      warpgroup_wait<2>();
      fence_registers(dv);
      this->release(smem_.dout_empty, ring.stage);
      warpgroup_wait<1>();
      fence_registers(dq);
      store_dq(dq);
      warpgroup_wait<0>();
      fence_registers(dk);
      this->release(smem_.q_empty, ring.stage);
      ring_.advance();
      ds_stage_ ^= 1;
    };
    // Plain blocks have a loop of their own, without zeros, masks and softcap.
    int visited;
    FA_NO_UNROLL
    do {
      // Read again, since it would not stay in registers; not between two GEMMs, where it would wait
      // for shared memory, which they keep busy.
      const QueryBlocks blocks = uniform(tile.blocks);
      const typename Base::BlockRange whole = Base::whole_blocks(tile.valid);
      const typename Base::BlockRange plain = this->plain_blocks(blocks, whole);
      const bool masked = blocks.masked(walk.block);
      if (plain.contains(walk.block)) {
        visited = plain.end - walk.block;
        FA_NO_UNROLL
        for (int left = visited; left > 0; --left) visit.template operator()<true>(false, whole);
      } else {
        visited = 1;
        visit.template operator()<false>(masked, whole);
      }
    } while (walk.advance(uniform(tile.blocks), params_.workspace.q_slots, visited));
    publish_dq();
  }

 private:
  // dQ of the block to shared memory, in the order of dq_offset.
  __device__ void store_dq(const float (&dq)[kCountDq]) {
    const int thread = opaque(thread_);
    const int warpgroup = thread / kWarpgroupSize;
    EmptyBarrier::wait(&smem_.dq_empty[warpgroup], dq_phase_ ^ 1);
    float4* const target = reinterpret_cast<float4*>(smem_.dq[warpgroup]);
#pragma unroll
    for (int i = 0; i < kCountDq / 4; ++i) {
      target[i * kWarpgroupSize + thread % kWarpgroupSize] =
          float4{dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    }
    dq_phase_ ^= 1;
    dq_stored_ = true;
  }

  // What store_dq stored, to DqAdder. The fence waits for the stores, hence later, under a GEMM.
  __device__ void publish_dq() {
    const int thread = opaque(thread_);
    cutlass::arch::fence_view_async_shared();
    __syncwarp();
    if (thread % kWarpSize == 0) {
      EmptyBarrier::arrive(&smem_.dq_full[thread / kWarpgroupSize]);
    }
    dq_stored_ = false;
  }

  uint32_t dq_phase_ = 0;
  bool dq_stored_ = false;  // and not published
  int ds_stage_ = 0;
};

}  // namespace fa
