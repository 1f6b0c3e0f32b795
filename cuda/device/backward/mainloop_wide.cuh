// The main loop of one consumer warpgroup for wide heads: the CTA's 64 keys of the tile, shared with
// the other warpgroup, against the query blocks of every head of the group. Of a block each warpgroup
// has S^T and dP^T of half of the queries, and dK and dV of half of the columns; P and dS pass through
// shared memory, since dK and dV need all queries.
//
//   S^T = K Q^T   P = 2^(S - LSE)   dP^T = V dO^T   dS = P * (dP - delta)
//   dK += dS^T Q   dV += P^T dO   dQ = dS K, added in global memory
//
// dQ is summed over the keys of both CTAs of the cluster: each has half of its columns, and gets the
// other one's dS (ds_exchange.cuh), which is on its way under dK and half of dV.
//
//   tensor cores    | S^T          | dP^T | half of dV | dK | the rest of dV | dQ, own | dQ, peer's
//   this warpgroup  | dQ' of the block before out | P  | dS |
//
// There is one stage of Q and of dO. Q is free after dK and dO after dV, and the next block's loads
// have the time of what follows. Most of dQ goes from registers to global memory under S^T of the next
// block: once it is out, its registers hold dP^T. Exponentials run under dP^T and dS under half of dV.
#pragma once

#include "device/backward/consumer.cuh"
#include "device/backward/register_dq_adder.cuh"

namespace fa {

template <BackwardConfig kConfig>
class WideMainloop : BackwardConsumer<kConfig> {
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
  static constexpr int kQueries = Traits::kScoreColumns;  // of S^T and dP^T
  static constexpr bool kDqTransposed = Traits::kDqTransposed;
  static constexpr int kCountDq = kDqTransposed ? kBlockM / 2 : Traits::kDqColumns / 2;
  static constexpr int kEarlyDq = kCountDq * 2 / 3;  // added before dP^T takes registers

 public:
  static constexpr int kCountDk = Traits::kShare / 2;
  static constexpr int kCountDv = Traits::kShareV / 2;

  __device__ WideMainloop(const BackwardParams& params, Smem& smem, int thread)
      : Base(params, smem, thread) {
    let_other_store_p();
  }

  // Fragments of the warpgroup's columns of dK, without the scale, and dV.
  __device__ __forceinline__ void run(const BackwardTile& tile, float (&dk)[kCountDk],
                                      float (&dv)[kCountDv]) {
    using namespace cute;
    const int warpgroup = cutlass::canonical_warp_group_idx();
    const int first_query = kQueries * warpgroup;  // of the warpgroup, in a block
    const auto thread_scores = typename Traits::MmaScores{}.get_slice(0);
    const auto thread_dp = typename Traits::MmaDp{}.get_slice(0);
    const auto thread_dv = typename Traits::MmaDv{}.get_slice(0);
    const auto thread_dk = typename Traits::MmaDk{}.get_slice(0);
    const auto thread_dq = typename Traits::MmaDq{}.get_slice(0);
    // Descriptors: a number of queries of a K-major tile, of columns of an MN-major one, from a
    // multiple of the number on.
    const auto queries_of = [&](auto queries, auto layout, Element* memory, int index) {
      constexpr int kDepth = decltype(size<1>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout)(_, _, _0{}),
                        Shape<decltype(queries), Int<kDepth>>{}, make_coord(opaque(index), 0));
    };
    const auto columns_of = [&](auto columns, auto layout, Element* memory, int index) {
      constexpr int kDepth = decltype(size<1>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout)(_, _, _0{}),
                        Shape<decltype(columns), Int<kDepth>>{}, make_coord(opaque(index), 0));
    };
    // K and V as of an unknown place: their descriptors, the same in each block, would spill.
    const auto multiply_scores = [&](float(&scores)[kCountS]) {
      const auto r_k = thread_scores.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.k + opaque(0)), typename Traits::LayoutK{})(_, _, _0{}));
      const auto r_q = thread_scores.partition_fragment_B(
          queries_of(Int<kQueries>{}, typename Traits::LayoutQ{}, smem_.q[0], warpgroup));
      issue_gemm_ss<kType>(r_k, r_q, scores);
    };
    const auto multiply_dp = [&](float(&dp)[kCountS]) {
      const auto r_v = thread_dp.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.v + opaque(0)), typename Traits::LayoutV{})(_, _, _0{}));
      const auto r_dout = thread_dp.partition_fragment_B(
          queries_of(Int<kQueries>{}, typename Traits::LayoutDout{}, smem_.dout[0], warpgroup));
      issue_gemm_ss<kType>(r_v, r_dout, dp);
    };
    // From half of the queries.
    const auto multiply_dv = [&](auto half) {
      constexpr int kHalf = decltype(half)::value;
      const auto r_p = thread_dv.partition_fragment_A(
          local_tile(make_tensor(make_smem_ptr(smem_.p), typename Traits::LayoutDst{})(_, _, _0{}),
                     Shape<_64, Int<kBlockM / 2>>{}, make_coord(_0{}, Int<kHalf>{})));
      const auto s_dout = columns_of(Int<Traits::kShareV>{}, typename Traits::LayoutDoutt{},
                                     smem_.dout[0], warpgroup);
      const auto r_dout = thread_dv.partition_fragment_B(local_tile(
          s_dout, Shape<Int<Traits::kShareV>, Int<kBlockM / 2>>{}, make_coord(_0{}, Int<kHalf>{})));
      issue_gemm_ss<kType, true, true, true>(r_p, r_dout, dv);
    };
    const auto multiply_dk = [&] {
      const auto r_ds = thread_dk.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.ds), typename Traits::LayoutDst{})(_, _, _0{}));
      const auto r_q = thread_dk.partition_fragment_B(
          columns_of(Int<Traits::kShare>{}, typename Traits::LayoutQt{}, smem_.q[0], warpgroup));
      issue_gemm_ss<kType, true, true, true>(r_ds, r_q, dk);
    };
    // dQ = or += dS K, for `layout` of K^T and the warpgroup's columns, number `index` in it.
    const auto multiply_dq = [&](auto accumulate, Element* ds, auto layout, Element* k, int index,
                                 float(&dq)[kCountDq]) {
      constexpr bool kAccumulate = decltype(accumulate)::value;
      const auto columns = columns_of(Int<Traits::kDqColumns>{}, layout, k, index);
      if constexpr (kDqTransposed) {
        const auto r_k = thread_dq.partition_fragment_A(columns);
        const auto r_ds = thread_dq.partition_fragment_B(
            queries_of(Int<kBlockM>{}, typename Traits::LayoutDs{}, ds, 0));
        issue_gemm_ss<kType, true, false, kAccumulate>(r_k, r_ds, dq);
      } else {
        const auto r_ds = thread_dq.partition_fragment_A(
            queries_of(_64{}, typename Traits::LayoutDs{}, ds, warpgroup));
        const auto r_k = thread_dq.partition_fragment_B(columns);
        issue_gemm_ss<kType, false, true, kAccumulate>(r_ds, r_k, dq);
      }
    };
    const auto multiply_own_dq = [&](float(&dq)[kCountDq]) {
      multiply_dq(false_type{}, smem_.ds, typename Traits::LayoutKt{}, smem_.k,
                  kDqTransposed ? 2 * cluster_rank() + warpgroup : cluster_rank(), dq);
    };
    const auto multiply_peer_dq = [&](float(&dq)[kCountDq]) {
      multiply_dq(true_type{}, smem_.peer_ds, typename Traits::LayoutPeerKt{}, smem_.peer_k,
                  kDqTransposed ? warpgroup : 0, dq);
    };

    smem_.mask.prepare(tile, thread_);
#pragma unroll
    for (int i = 0; i < kCountDk; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kCountDv; ++i) dv[i] = 0.f;
    float dq[kCountDq];
    float scores[kCountS];  // S^T, then P^T
    float dp[kCountS];      // dP^T, then dS^T
    uint32_t packed[kCountS / 2];
    const float* const lse = smem_.statistics[0] + first_query;  // and then delta
    const RegisterDqAdder<kConfig> adder(params_,
                                         thread_ + cluster_rank() * Traits::kConsumerThreads);
    typename Base::Walk walk(tile, params_.qhead_per_khead);
    const typename Base::BlockRange whole = Base::whole_blocks(tile.valid);
    // dQ of the block before is there.
    const auto wait_for_dq = [&](auto younger) __attribute__((always_inline)) {
      warpgroup_wait<decltype(younger)::value>();
      fence_registers(dq);
      if (thread_ % kWarpSize == 0) arrive_at_peer(&smem_.ds_taken);
    };

    const auto wait_for_turn = [&](const Addition& addition) __attribute__((always_inline)) {
      if (addition.has_turn) return;
      adder.wait_for_turn(tile, addition.block, addition.workspace_block);
    };

    // The first part of a block, up to dS in shared memory. kPlain: one of plain_blocks, without a
    // branch between its GEMMs. kFirst: there is no block before.
    const auto begin_block = [&]<bool kPlain, bool kOrdered, bool kFirst>(const Addition& addition)
        __attribute__((always_inline)) {
      typename Base::Statistics statistics;
      const bool ordered = kPlain ? kOrdered : adder.ordered();
      FullBarrier::wait(&smem_.q_full[0], ring_.phase);
      if constexpr (!kPlain) this->zero_q(tile, whole, walk.block, 0);
      // Ahead of the GEMM: see load_in_order.
      this->load_in_order(lse, statistics);
      multiply_scores(scores);
      if constexpr (!kFirst) {
        wait_for_dq(_1{});
        if (ordered) wait_for_turn(addition);
        adder.template add<0, kEarlyDq>(dq, addition.workspace_block);
      }
      FullBarrier::wait(&smem_.dout_full[0], ring_.phase);
      if constexpr (!kPlain) this->zero_dout(tile, whole, walk.block, 0);
      multiply_dp(dp);
      if constexpr (!kFirst) {
        adder.template add<kEarlyDq, kCountDq>(dq, addition.workspace_block);
      }
      warpgroup_wait<1>();
      fence_registers(scores);
      this->template exponentiate<!kPlain>(scores, statistics);
      if (!kPlain && tile.blocks.masked(walk.block)) {
        smem_.mask.apply(scores, walk.block * kBlockM + first_query, thread_);
      }
      this->load_statistics(lse + kBlockM, statistics);
      this->convert(scores, packed);
      // The other warpgroup's threads have arrived, these arrive and wait: its dV of the block before
      // has read P.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kPRead + warpgroup);
      this->store_turned(packed, smem_.p, first_query);
      cutlass::arch::fence_view_async_shared();
      // All consumer threads arrive and wait: P of the block is in shared memory, and no wgmma of the
      // block before reads dS any more.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kPWritten);
      multiply_dv(_0{});
      if (!kFirst && ordered) adder.pass_turn(addition.workspace_block);
      warpgroup_wait<1>();
      fence_registers(dp);
      this->template multiply_ds<!kPlain>(scores, dp, statistics, lse);
      this->convert(dp, packed);
      // The other CTA has multiplied the block before's dS.
      FullBarrier::wait(&smem_.ds_taken, ring_.phase ^ 1);
      this->store_turned(packed, smem_.ds, first_query);
      cutlass::arch::fence_view_async_shared();
      __syncwarp();
      if (thread_ % kWarpSize == 0) EmptyBarrier::arrive(&smem_.ds_full);
      // The assembler wants no wgmma under way where a loop begins. dS takes as long as it.
      warpgroup_wait<0>();
      fence_registers(dv);
      // All consumer threads arrive and wait: dS of the block is in shared memory.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kDsWritten);
    };
    // The rest: dQ is under way, and what there is to know of its addition.
    const auto finish_block = [&]<bool kPlain, bool kOrdered>() __attribute__((always_inline)) {
      multiply_dk();
      multiply_dv(_1{});
      multiply_own_dq(dq);
      Addition addition{walk.block, walk.workspace_block, false};
      // A first look at the turn, which has time here; where dQ is to be added there is none.
      if (kPlain ? kOrdered : adder.ordered()) {
        addition.has_turn = adder.has_turn(tile, addition.block, addition.workspace_block);
      }
      warpgroup_wait<2>();
      fence_registers(dk);
      this->release(smem_.q_empty, 0);
      warpgroup_wait<1>();
      fence_registers(dv);
      this->release(smem_.dout_empty, 0);
      let_other_store_p();
      FullBarrier::wait(&smem_.peer_ds_full, ring_.phase);
      multiply_peer_dq(dq);
      ring_.advance();
      return addition;
    };

    FullBarrier::wait(&smem_.k_full, tile.phase);
    FullBarrier::wait(&smem_.v_full, tile.phase);
    FullBarrier::wait(&smem_.peer_k_full, tile.phase);
    this->zero_keys(tile);
    begin_block.template operator()<false, false, true>({});
    const typename Base::BlockRange plain = this->plain_blocks(tile.blocks, whole);
    const auto process_plain = [&]<bool kOrdered>() __attribute__((always_inline)) {
      FA_NO_UNROLL
      while (plain.contains(walk.block + 1)) {
        const Addition addition = finish_block.template operator()<true, kOrdered>();
        walk.advance_in_head();
        begin_block.template operator()<true, kOrdered, false>(addition);
      }
    };
    FA_NO_UNROLL
    while (true) {
      if (adder.ordered()) {
        process_plain.template operator()<true>();
      } else {
        process_plain.template operator()<false>();
      }
      if (walk.left == 1) break;
      const Addition addition = finish_block.template operator()<false, false>();
      walk.advance(tile.blocks, params_.workspace.q_slots);
      begin_block.template operator()<false, false, false>(addition);
    }
    const Addition last = finish_block.template operator()<false, false>();
    wait_for_dq(_0{});
    if (adder.ordered()) wait_for_turn(last);
    adder.template add<0, kEarlyDq>(dq, last.workspace_block);
    adder.template add<kEarlyDq, kCountDq>(dq, last.workspace_block);
    if (adder.ordered()) adder.pass_turn(last.workspace_block);
  }

 private:
  // dQ of a block.
  struct Addition {
    int block;            // of the sequence
    int workspace_block;  // its number in the workspace
    bool has_turn;        // known to have it
  };

  // This warpgroup's threads arrive for the other one, which waits: this one's dV has read P.
  __device__ void let_other_store_p() const {
    NamedBarrier::arrive(Traits::kConsumerThreads,
                         Traits::kPRead + (1 - cutlass::canonical_warp_group_idx()));
  }
};

}  // namespace fa
