// The main loop of one consumer warpgroup: 64 query rows against the tile's key blocks, from the
// last to the first, S and O in registers, P as the A operand of P V straight from registers.
//
//   S = Q K^T     P = softmax(S) as it goes     O = P V          (next ' = block before)
//
//   tensor cores   | S' = Q K'^T | O += P V         |  S'' ...
//   this warpgroup | issue both  | softmax(S') -> P'|  O rescaled, next turn
//   the other one  | softmax     | issues its own   |
//
// So the exponentials of one block run under P V of the one before and under the other warpgroup's
// GEMMs.
//
// Of a tile's last blocks, which reach past the diagonal of a causal mask, a warpgroup leaves out
// those of which its own rows see nothing.
#pragma once

#include "device/epilogue/convert.cuh"
#include "device/forward/softmax.cuh"
#include "device/forward/traits.cuh"

namespace fa {

template <ForwardConfig kConfig>
class ForwardMainloop {
  using Traits = ForwardTraits<kConfig>;
  using Smem = typename Traits::Smem;
  using Ring = typename Traits::Ring;
  using Element = typename Traits::Element;
  using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
  using EmptyBarrier = cutlass::arch::ClusterBarrier;
  using NamedBarrier = cutlass::arch::NamedBarrier;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kCountS = kBlockN / 2;
  static constexpr int kCountO = Traits::kHeadDimV / 2;
  static constexpr bool kThree = Traits::kWarpgroups == 3;
  static constexpr int kRegisters = kCountS + kCountO;
  // So many exponentials of a block are made before its maximum is known to be the one before: what
  // the registers allow, and none with three warpgroups, of which another one always has some to make.
  static constexpr int kEarly = kThree ? 0 : kRegisters <= 128 ? 20 : kRegisters <= 168 ? 12 : 4;
  // The exponentials from this one on are made when P V is there, and the conversion runs under them:
  // two warpgroups hardly wait for P V. With many registers taken, so many that none is spilled.
  static constexpr int kLate = kThree ? kCountS : kCountS * (kRegisters <= 168 ? 5 : 6) / 8 / 4 * 4;

 public:
  __device__ ForwardMainloop(const ForwardParams& params, Smem& smem)
      : params_(params), smem_(smem), warpgroup_(cutlass::canonical_warp_group_idx()) {
    if (Traits::kTakeTurns && warpgroup_ == Traits::kWarpgroups - 1) pass_turn();
  }

  // O of this thread's fragment, not normalised, and what normalises its two rows. `under_last_pv` is
  // called while the tensor cores are at the last P V; neither `tile` nor `start` is read after that.
  template <typename Call>
  __device__ void run(const ForwardTile& tile, const TileStart& start, float (&o)[kCountO],
                      RowStatistics (&statistics)[2], const Call& under_last_pv) {
    using namespace cute;
    OnlineSoftmax softmax;
    const int q_stage = static_cast<int>(start.number % Traits::kQStages);
    const uint32_t q_phase = start.number / Traits::kQStages % 2;
    const auto thread_qk = typename Traits::MmaQKSlice{}.get_slice(0);
    const auto thread_pv = typename Traits::MmaPV{}.get_slice(0);
    const auto s_q = local_tile(make_tensor(make_smem_ptr(smem_.q[0]), typename Traits::LayoutQ{}),
                                Shape<_64, Int<Traits::kHeadDim>>{},
                                make_coord(uniform(warpgroup_), 0, q_stage));
    const auto s_k = make_tensor(make_smem_ptr(smem_.k[0]), typename Traits::LayoutK{});
    const auto s_vt = make_tensor(make_smem_ptr(smem_.v[0]), typename Traits::LayoutVt{});
    const auto r_q = thread_qk.partition_fragment_A(s_q);
    const auto r_k = thread_qk.partition_fragment_B(s_k);
    const auto r_vt = thread_pv.partition_fragment_B(s_vt);
    float scores[kCountS];
    uint32_t p[kCountS / 2];
    auto r_o = make_tensor(make_rmem_ptr(o),
                           Layout<Shape<Shape<_2, _2, Int<Traits::kHeadDimV / 8>>, _1, _1>>{});
    const auto r_p = make_tensor(make_rmem_ptr(reinterpret_cast<Element*>(p)),
                                 Layout<Shape<Shape<_2, _2, _2>, _1, Int<kBlockN / 16>>>{});
    const auto multiply_qk = [&](int stage) __attribute__((always_inline)) {
      issue_gemm_ss<kConfig.dtype>(r_q, r_k(_, _, _, uniform(stage)), scores);
    };
    const auto multiply_pv = [&](int stage) __attribute__((always_inline)) {
      issue_gemm_rs<typename Traits::MmaPV>(r_p, r_vt(_, _, _, uniform(stage)), r_o);
    };
    const auto wait_for_v = [&](const Ring& position) {
      FullBarrier::wait(&smem_.v_full[position.stage], position.phase);
    };

    const KeyBlocks blocks = start.share;
    // Blocks that the other warpgroups visit. Rare, and its turns written out are much code.
    FA_NO_UNROLL
    for (int left_out = start.end; left_out > blocks.end; --left_out) leave_out();
    int block = blocks.end - 1;
    const auto transform_and_mask = [&]() __attribute__((always_inline)) {
      transform_scores(scores);
      if (blocks.masked(block)) smem_.mask.apply(scores, block * kBlockN, threadIdx.x);
    };

    FullBarrier::wait(&smem_.q_full[q_stage], q_phase);
    wait_for_k(ring_);
    multiply_qk(ring_.stage);
    smem_.mask.prepare(params_, tile, threadIdx.x);
#pragma unroll
    for (int i = 0; i < kCountO; ++i) o[i] = 0.f;
    warpgroup_wait<0>();
    fence_registers(scores);
    release_k(q_stage, block == blocks.begin);
    transform_and_mask();
    softmax.update(scores, params_.logit_unit_log2);
    convert(scores, p);
    ring_.advance();
    if (block > blocks.begin) wait_for_k(ring_);

    int v_stage;  // of the last `multiply`; the ring has moved on
    bool last;    // it was for the tile's last block
    // S of a block and P V of the one before are issued; S is there.
    const auto multiply = [&]() __attribute__((always_inline)) {
      const Ring v = v_position();
      take_turn();
      multiply_qk(ring_.stage);
      wait_for_v(v);
      multiply_pv(v.stage);
      pass_turn();
      warpgroup_wait<1>();
      fence_registers(scores);
      last = block == blocks.begin;
      release_k(q_stage, last);
      v_stage = v.stage;
      ring_.advance();
    };
    // P V is there.
    const auto wait_for_pv = [&]() __attribute__((always_inline)) {
      // The assembler would move the wait for P V ahead of the exponentials, which are to run under
      // it; it does not move it across the loop that waits for the next K.
      if (!last) wait_for_k(ring_);
      warpgroup_wait<0>();
      fence_registers(o);
      release(smem_.v_empty, v_stage);
      --block;
    };
    // Blocks without mask and transform that keep the maximum have a loop of their own, with nothing
    // in it that they jump over. All warps of a warpgroup must wait for P V at the same instruction:
    // a warp whose maximum moves leaves only at the loop's end, with scores that are still there and
    // a P that means nothing.
    --block;
    while (block >= blocks.begin) {
      if (params_.transform == ScoreTransform::none && !blocks.masked(block)) {
        bool update;
        do {
          multiply();
          float early[kEarly > 0 ? kEarly : 1];
          update = softmax.template try_block<kEarly>(scores, early, params_.logit_unit_log2);
          if (!update) [[likely]] {
#pragma unroll
            for (int i = 0; i < kEarly; ++i) scores[i] = early[i];
            softmax.template exponentiate<kEarly, kLate>(scores, params_.logit_unit_log2);
            softmax.template add<0, kLate>(scores);
          }
          wait_for_pv();
          float late[kCountS];
#pragma unroll
          for (int i = 0; i < kCountS; ++i) late[i] = scores[i];
          softmax.template exponentiate<kLate, kCountS>(late, params_.logit_unit_log2);
          softmax.template add<kLate, kCountS>(late, !update);
          convert(late, p);
        } while (!update && block >= blocks.full_begin);
        if (!update) continue;
        softmax.update(scores, params_.logit_unit_log2);
      } else {
        multiply();
        transform_and_mask();
        softmax.update(scores, params_.logit_unit_log2);
        wait_for_pv();
      }
      rescale_o(o, softmax.rescale);
      convert(scores, p);
    }

    wait_for_v(v_position());
    multiply_pv(v_position().stage);
    under_last_pv();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      statistics[half] = softmax.finish(half, params_.logit_unit);
    }
    warpgroup_wait<0>();
    fence_registers(o);
    release(smem_.v_empty, v_position().stage);
  }

 private:
  __device__ void take_turn() const {
    if constexpr (Traits::kTakeTurns) {
      NamedBarrier::sync(2 * kWarpgroupSize, Traits::kTurn + opaque(warpgroup_));
    }
  }

  __device__ void pass_turn() const {
    if constexpr (Traits::kTakeTurns) {
      const int warpgroup = opaque(warpgroup_);
      const int next = warpgroup == Traits::kWarpgroups - 1 ? 0 : warpgroup + 1;
      NamedBarrier::arrive(2 * kWarpgroupSize, Traits::kTurn + next);
    }
  }

  // One lane per warp: what the warp's wgmma read is free.
  __device__ void release(uint64_t* empty, int stage) const {
    if (threadIdx.x % kWarpSize == 0) EmptyBarrier::arrive(&empty[stage]);
  }

  // The same for K, and with the tile's last block for Q.
  __device__ void release_k(int q_stage, bool last) const {
    release(smem_.k_empty, ring_.stage);
    if (last) release(smem_.q_empty, q_stage);
  }

  __device__ void wait_for_k(const Ring& position) const {
    FullBarrier::wait(&smem_.k_full[position.stage], position.phase);
  }

  // V of the block whose P is there: one behind the next K.
  __device__ Ring v_position() const { return ring_.previous(); }

  // Instead of a block of which this warpgroup sees nothing. The stages are released once the block
  // is there: earlier, this would count for the block that had them before. The turn is taken and
  // passed on, since all warpgroups have as many.
  __device__ void leave_out() {
    wait_for_k(ring_);
    release(smem_.k_empty, ring_.stage);
    FullBarrier::wait(&smem_.v_full[ring_.stage], ring_.phase);
    release(smem_.v_empty, ring_.stage);
    ring_.advance();
    take_turn();
    pass_turn();
  }

  // In parts with a branch before each: the assembler would begin all elements at once and spill.
  __device__ void transform_scores(float (&scores)[kCountS]) const {
    if (params_.transform == ScoreTransform::none) return;
    constexpr int kPart = 16;
#pragma unroll
    for (int begin = 0; begin < kCountS; begin += kPart) {
      if (opaque(static_cast<int>(params_.transform)) ==
          static_cast<int>(ScoreTransform::softcap)) {
        // tanh(x) = 1 - 2 / (1 + e^2x): an absolute error near 1e-7, where tanh.approx has 5e-4.
        const float factor = 2.f * kLog2E * params_.factor;
#pragma unroll
        for (int i = begin; i < min(begin + kPart, kCountS); ++i) {
          scores[i] = fmaf(-2.f, __fdividef(1.f, 1.f + exp2_approx(scores[i] * factor)), 1.f);
        }
      } else {
#pragma unroll
        for (int i = begin; i < min(begin + kPart, kCountS); ++i) scores[i] *= params_.factor;
      }
    }
  }

  static __device__ void convert(const float (&scores)[kCountS], uint32_t (&p)[kCountS / 2]) {
#pragma unroll
    for (int i = 0; i < kCountS / 2; ++i) {
      p[i] = pack<kConfig.dtype>(scores[2 * i], scores[2 * i + 1]);
    }
  }

  static __device__ void rescale_o(float (&o)[kCountO], const float (&factor)[2]) {
    // Often: what P is relative to rarely changes after a row's first block.
    if (__all_sync(~0u, factor[0] == 1.f && factor[1] == 1.f)) return;
#pragma unroll
    for (int i = 0; i < kCountO; ++i) o[i] *= factor[i / 2 % 2];
  }

  const ForwardParams& params_;
  Smem& smem_;
  const int warpgroup_;
  Ring ring_;  // the block of K to be multiplied next
};

}  // namespace fa
