// The main loop of one consumer warpgroup for wide heads: 64 keys, shared with the other warpgroup,
// against the query blocks of every head of the group. Of a block of 128 queries each warpgroup has
// S^T, dP^T and dQ of 64 queries, and dK and dV of half of the columns; P and dS pass through shared
// memory, since dK and dV need all queries.
//
//   S^T = K Q^T   P = 2^(S - LSE)   dP^T = V dO^T   dS = P * (dP - delta)
//   dK += dS^T Q   dV += P^T dO   dQ = dS K, added in global memory
//
//   tensor cores    | S^T    | dP^T  |       | dK | half of dQ | dV     | half of dQ | S^T'
//   this warpgroup  | dQ out | P     | dS    |                 | dQ out |            | dQ out
//
// There is one stage of Q and of dO. Q is free after dK, and the next block's loads have the time of
// dQ and dV; dO is free after dV and has the time of dQ and S^T. dQ goes from registers to global
// memory under the GEMM that follows.
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
  using typename Base::FullBarrier;
  using typename Base::NamedBarrier;
  using typename Base::Ring;
  using typename Base::Smem;
  using typename Base::Traits;
  static constexpr int kSlices = Traits::kDqSlices;
  static constexpr int kCountDq = Traits::kDqColumns / 2;

 public:
  static constexpr int kCountDk = Traits::kShare / 2;
  static constexpr int kCountDv = Traits::kShareV / 2;

  __device__ WideMainloop(const BackwardParams& params, Smem& smem, int thread)
      : Base(params, smem, thread) {}

  // Fragments of the warpgroup's columns of dK, without the scale, and dV.
  __device__ void run(const BackwardTile& tile, float (&dk)[kCountDk], float (&dv)[kCountDv]) {
    using namespace cute;
    const int warpgroup = cutlass::canonical_warp_group_idx();
    const int first_query = kRowsPerWarpgroup * warpgroup;  // of the warpgroup, in a block
    const auto thread_scores = typename Traits::MmaScores{}.get_slice(0);
    const auto thread_dp = typename Traits::MmaDp{}.get_slice(0);
    const auto thread_dv = typename Traits::MmaDv{}.get_slice(0);
    const auto thread_dk = typename Traits::MmaDk{}.get_slice(0);
    const auto thread_dq = typename Traits::MmaDq{}.get_slice(0);
    // Descriptors: the warpgroup's queries of a K-major tile, `kColumns` columns from a multiple of
    // them on of an MN-major one.
    const auto queries_of = [&](auto layout, Element* memory) {
      constexpr int kDepth = decltype(size<1>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout)(_, _, _0{}),
                        Shape<_64, Int<kDepth>>{}, make_coord(warpgroup, 0));
    };
    const auto columns_of = [&](auto columns, auto layout, Element* memory, int index) {
      constexpr int kDepth = decltype(size<1>(layout))::value;
      return local_tile(make_tensor(make_smem_ptr(memory), layout)(_, _, _0{}),
                        Shape<decltype(columns), Int<kDepth>>{}, make_coord(index, 0));
    };
    const auto multiply_scores = [&](float(&scores)[kCountS]) {
      const auto r_k = thread_scores.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.k), typename Traits::LayoutK{})(_, _, _0{}));
      const auto r_q =
          thread_scores.partition_fragment_B(queries_of(typename Traits::LayoutQ{}, smem_.q[0]));
      issue_gemm_ss<kType>(r_k, r_q, scores);
    };
    const auto multiply_dp = [&](float(&dp)[kCountS]) {
      const auto r_v = thread_dp.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.v), typename Traits::LayoutV{})(_, _, _0{}));
      const auto r_dout =
          thread_dp.partition_fragment_B(queries_of(typename Traits::LayoutDout{}, smem_.dout[0]));
      issue_gemm_ss<kType>(r_v, r_dout, dp);
    };
    const auto multiply_dv = [&] {
      const auto r_p = thread_dv.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.p), typename Traits::LayoutDst{})(_, _, _0{}));
      const auto r_dout = thread_dv.partition_fragment_B(columns_of(
          Int<Traits::kShareV>{}, typename Traits::LayoutDoutt{}, smem_.dout[0], warpgroup));
      issue_gemm_ss<kType, true, true, true>(r_p, r_dout, dv);
    };
    const auto multiply_dk = [&] {
      const auto r_ds = thread_dk.partition_fragment_A(
          make_tensor(make_smem_ptr(smem_.ds), typename Traits::LayoutDst{})(_, _, _0{}));
      const auto r_q = thread_dk.partition_fragment_B(
          columns_of(Int<Traits::kShare>{}, typename Traits::LayoutQt{}, smem_.q[0], warpgroup));
      issue_gemm_ss<kType, true, true, true>(r_ds, r_q, dk);
    };
    const auto multiply_dq = [&](int slice, float(&dq)[kCountDq]) {
      const auto r_ds =
          thread_dq.partition_fragment_A(queries_of(typename Traits::LayoutDs{}, smem_.ds));
      const auto r_k = thread_dq.partition_fragment_B(
          columns_of(Int<Traits::kDqColumns>{}, typename Traits::LayoutKt{}, smem_.k, slice));
      issue_gemm_ss<kType, false, true>(r_ds, r_k, dq);
    };

    smem_.mask.prepare(tile, thread_);
#pragma unroll
    for (int i = 0; i < kCountDk; ++i) dk[i] = 0.f;
#pragma unroll
    for (int i = 0; i < kCountDv; ++i) dv[i] = 0.f;
    float scores[kCountS];  // S^T, then P^T
    float dp[kCountS];      // dP^T, then dS^T
    float dq[kSlices][kCountDq];
    uint32_t packed[kCountS / 2];
    const RegisterDqAdder<kConfig> adder(params_, thread_);
    typename Base::Walk walk(tile, params_.qhead_per_khead);
    const typename Base::WholeBlocks whole(tile.valid);

    FullBarrier::wait(&smem_.k_full, tile.phase);
    FullBarrier::wait(&smem_.v_full, tile.phase);
    this->zero_keys(tile);
    FullBarrier::wait(&smem_.q_full[0], ring_.phase);
    this->zero_q(tile, whole, walk.block, 0);
    multiply_scores(scores);
    warpgroup_wait<0>();
    fence_registers(scores);

    FA_NO_UNROLL
    while (true) {
      FullBarrier::wait(&smem_.dout_full[0], ring_.phase);
      this->zero_dout(tile, whole, walk.block, 0);
      multiply_dp(dp);
      const float* const lse = smem_.statistics[0] + first_query;
      typename Base::Statistics statistics;
      this->load_statistics(lse, statistics);
      this->exponentiate(scores, statistics);
      if (tile.blocks.masked(walk.block)) {
        smem_.mask.apply(scores, walk.block * kBlockM + first_query, thread_);
      }
      this->convert(scores, packed);
      // All consumer threads arrive and wait: no wgmma of the block before reads P or dS any more.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kDsRead);
      this->store_turned(packed, smem_.p, first_query);
      warpgroup_wait<0>();
      fence_registers(dp);
      this->load_statistics(lse + kBlockM, statistics);
      this->multiply_ds(scores, dp, statistics, lse);
      this->convert(dp, packed);
      this->store_turned(packed, smem_.ds, first_query);
      cutlass::arch::fence_view_async_shared();
      // All consumer threads arrive and wait: P and dS of the block are in shared memory.
      NamedBarrier::sync(Traits::kConsumerThreads, Traits::kDsWritten);
      multiply_dk();
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) multiply_dq(slice, dq[slice]);
      multiply_dv();

      warpgroup_wait<1 + kSlices>();
      fence_registers(dk);
      this->release(smem_.q_empty, 0);
      const int added = walk.workspace_block;
      if (adder.ordered()) adder.wait_for_turn(tile, walk.block, added);
      add_slice<kSlices>(adder, dq[0], 0, added);
      if constexpr (kSlices == 2) add_slice<1>(adder, dq[1], 1, added);
      warpgroup_wait<0>();
      fence_registers(dv);
      this->release(smem_.dout_empty, 0);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) multiply_dq(kSlices + slice, dq[slice]);
      if constexpr (kSlices == 2) add_slice<1>(adder, dq[0], 2, added);
      ring_.advance();
      const bool more = walk.advance(tile.blocks, params_.workspace.q_slots);
      if (more) {
        FullBarrier::wait(&smem_.q_full[0], ring_.phase);
        this->zero_q(tile, whole, walk.block, 0);
      }
      // Also past the last block, to no purpose: under a condition it would serialise all the GEMMs.
      multiply_scores(scores);
      add_slice<1>(adder, dq[kSlices - 1], 2 * kSlices - 1, added);
      warpgroup_wait<0>();
      fence_registers(scores);
      if (adder.ordered()) adder.pass_turn(added);
      if (!more) return;
    }
  }

 private:
  // A slice of dQ of the warpgroup's queries, in the order of dq_offset, when no more than kYounger
  // GEMMs are in flight, those issued after it.
  template <int kYounger>
  __device__ static void add_slice(const RegisterDqAdder<kConfig>& adder, float (&dq)[kCountDq],
                                   int slice, int workspace_block) {
    cute::warpgroup_wait<kYounger>();
    fence_registers(dq);
    adder.add(dq, slice * kCountDq, workspace_block);
  }
};

}  // namespace fa
