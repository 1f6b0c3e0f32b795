// FFI handler of the backward. Logical shapes (leading axes *b: full size or 1, see operands.h):
//
//   q (*b, Hk, G, T, D), k (*b, Hk, S, D), v (*b, Hk, S, Dv), out (*b, Hk, G, T, Dv),
//   lse (*b, Hk, G, T) f32, dout (*b, Hk, G, T, Dv), dlse (*b, Hk, G, T) f32;
//   cu_seqlens_q, cu_seqlens_k (*b, 1 or Hk, N + 1) i32; seqused_q, seqused_k (*b, 1 or Hk, N) i32
//   -> dq (*b, Hk, G, T, D), dk (*b, Hk, S, D), dv (*b, Hk, S, Dv), workspaces dq_accum f32,
//      statistics f32, semaphores i32 (*b, Hk, the plan's size)
//
// In memory (operand layouts of the call): q, out, dout, dq (*b, T, Hk, G, .), k, v, dk, dv
// (*b, S, Hk, .), the others as they are.
#include "binding/handlers.h"
#include "binding/operands.h"

namespace fa {
namespace {

struct BackwardAttributes {
  int32_t num_batch_dims;
  float softmax_scale;
  int32_t window_left;
  int32_t window_right;
  int32_t top_left;
  float softcap;
  int32_t has_cu_seqlens;
  int32_t has_seqused_q;
  int32_t has_seqused_k;
  int32_t deterministic;
};

enum Operand { kArgQ, kArgK, kArgV, kArgOut, kArgLse, kArgDout, kArgDlse, kNumArrays };
constexpr const char* kOperandNames[kNumArrays] = {"q", "k", "v", "out", "lse", "dout", "dlse"};
constexpr BackwardOperand kMapOperands[kNumArrays] = {
    kBackwardQ, kBackwardK, kBackwardV, kBackwardOut, kBackwardLse, kBackwardDout, kBackwardDlse};

void backward(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
              const BackwardAttributes& attributes) {
  const size_t b = static_cast<size_t>(attributes.num_batch_dims);
  constexpr size_t kNumResults = 6;
  const size_t num_descriptors = 2 * size_t{attributes.has_cu_seqlens != 0} +
                                 size_t{attributes.has_seqused_q != 0} +
                                 size_t{attributes.has_seqused_k != 0};
  require(attributes.num_batch_dims >= 0 && results.size() == kNumResults &&
              operands.size() == kNumArrays + num_descriptors,
          "backward: wrong number of operands or results");
  const auto operand = [&](size_t index) { return operands.get<ffi::AnyBuffer>(index).value(); };
  const auto result = [&](size_t index) { return *results.get<ffi::AnyBuffer>(index).value(); };
  const Dimensions dq = result(0).dimensions();
  const Dimensions dk = result(1).dimensions();
  const Dimensions dv = result(2).dimensions();
  const ffi::DataType type = operand(kArgQ).element_type();
  require(type == ffi::BF16 || type == ffi::F16, "q: dtype must be bfloat16 or float16");
  require(dq.size() == b + 4 && dk.size() == b + 3 && dv.size() == b + 3,
          "backward: wrong result shapes");

  BackwardArguments arguments = {};
  BackwardProblem& problem = arguments.problem;
  problem.dtype = data_type(type);
  problem.batch = product(dq, 0, b);
  problem.heads_kv = dq[b];
  problem.qhead_per_khead = dq[b + 1];
  problem.seqlen_q = dq[b + 2];
  problem.head_dim = dq[b + 3];
  problem.seqlen_k = dk[b + 1];
  problem.head_dim_v = dv[b + 2];
  problem.window_left = attributes.window_left;
  problem.window_right = attributes.window_right;
  problem.top_left = attributes.top_left != 0;
  problem.has_cu_seqlens = attributes.has_cu_seqlens != 0;
  problem.has_seqused_q = attributes.has_seqused_q != 0;
  problem.has_seqused_k = attributes.has_seqused_k != 0;
  problem.deterministic = attributes.deterministic != 0;
  problem.softmax_scale = attributes.softmax_scale;
  problem.softcap = attributes.softcap;
  for (size_t i = 0; i < 3; ++i) {
    require(result(i).element_type() == type, "backward: a gradient has another dtype than q");
    require(product(result(i).dimensions(), 0, b) == problem.batch &&
                result(i).dimensions()[b] == problem.heads_kv,
            "backward: the gradients differ in batch or heads");
  }
  require(dk[b + 2] == problem.head_dim && dv[b + 1] == problem.seqlen_k,
          "backward: wrong result shapes");

  // Shapes behind the batch axes.
  const std::vector<int64_t> query_shape{problem.heads_kv, problem.qhead_per_khead,
                                         problem.seqlen_q};
  const auto with = [](std::vector<int64_t> shape, int64_t last) {
    shape.push_back(last);
    return shape;
  };
  const std::vector<int64_t> key_shape{problem.heads_kv, problem.seqlen_k};
  const std::vector<int64_t> shapes[kNumArrays] = {with(query_shape, problem.head_dim),
                                                   with(key_shape, problem.head_dim),
                                                   with(key_shape, problem.head_dim_v),
                                                   with(query_shape, problem.head_dim_v),
                                                   query_shape,
                                                   with(query_shape, problem.head_dim_v),
                                                   query_shape};
  std::vector<int64_t> steps[kNumBackwardOperands];
  for (auto& operand_steps : steps) operand_steps.assign(b, 0);
  for (size_t i = 0; i < kNumArrays; ++i) {
    const Dimensions shape = operand(i).dimensions();
    const bool statistic = i == kArgLse || i == kArgDlse;
    bool fits = shape.size() == b + shapes[i].size() &&
                operand(i).element_type() == (statistic ? ffi::F32 : type);
    for (size_t axis = 0; fits && axis < shapes[i].size(); ++axis) {
      fits = shape[b + axis] == shapes[i][axis];
    }
    require(fits, std::string(kOperandNames[i]) + ": wrong dtype or shape");
    steps[kMapOperands[i]] = batch_steps(kOperandNames[i], shape, dq, b, 1);
    if (kMapOperands[i] <= kBackwardDout) {
      arguments.batches[kMapOperands[i]] = product(shape, 0, b);
    }
  }
  arguments.q = operand(kArgQ).untyped_data();
  arguments.k = operand(kArgK).untyped_data();
  arguments.v = operand(kArgV).untyped_data();
  arguments.out = operand(kArgOut).untyped_data();
  arguments.dout = operand(kArgDout).untyped_data();
  arguments.lse = static_cast<const float*>(operand(kArgLse).untyped_data());
  arguments.dlse = static_cast<const float*>(operand(kArgDlse).untyped_data());

  size_t next = kNumArrays;
  const auto take = [&](const char* name, BackwardOperand at, int64_t offsets) {
    const ffi::AnyBuffer buffer = operand(next++);
    if (at == kBackwardCuSeqlensQ) problem.sequences = sequences_of(name, buffer);
    return descriptor(name, buffer, dq, b, problem.heads_kv, problem.sequences + offsets,
                      steps[at]);
  };
  if (problem.has_cu_seqlens) {
    arguments.cu_seqlens_q = take("cu_seqlens_q", kBackwardCuSeqlensQ, 1);
    arguments.cu_seqlens_k = take("cu_seqlens_k", kBackwardCuSeqlensK, 1);
  }
  if (problem.has_seqused_q) arguments.seqused_q = take("seqused_q", kBackwardSequsedQ, 0);
  if (problem.has_seqused_k) arguments.seqused_k = take("seqused_k", kBackwardSequsedK, 0);

  arguments.dq = result(0).untyped_data();
  arguments.dk = result(1).untyped_data();
  arguments.dv = result(2).untyped_data();
  const BackwardPlan plan = plan_backward(problem, DeviceInfo{});
  const int64_t heads = problem.batch * problem.heads_kv;
  const auto workspace = [&](size_t index, const char* name, ffi::DataType dtype, int64_t size) {
    require(result(index).element_type() == dtype &&
                static_cast<int64_t>(result(index).element_count()) >= heads * size,
            std::string(name) + ": wrong dtype, or smaller than the plan says");
    return result(index).untyped_data();
  };
  arguments.dq_accum = static_cast<float*>(workspace(3, "dq_accum", ffi::F32, plan.dq_accum_size));
  arguments.statistics =
      static_cast<float*>(workspace(4, "statistics", ffi::F32, plan.statistics_size));
  arguments.semaphores =
      static_cast<int*>(workspace(5, "semaphores", ffi::S32, plan.semaphore_size));
  arguments.batch_map = make_batch_map<kNumBackwardOperands>(dq, b, steps);
  launch_backward(arguments, stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    backward_handler,
    [](cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
       int32_t num_batch_dims, float softmax_scale, int32_t window_left, int32_t window_right,
       int32_t top_left, float softcap, int32_t has_cu_seqlens, int32_t has_seqused_q,
       int32_t has_seqused_k, int32_t deterministic) {
      return guarded([&] {
        backward(stream, operands, results,
                 {num_batch_dims, softmax_scale, window_left, window_right, top_left, softcap,
                  has_cu_seqlens, has_seqused_q, has_seqused_k, deterministic});
      });
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .RemainingArgs()
        .RemainingRets()
        .Attr<int32_t>("num_batch_dims")
        .Attr<float>("softmax_scale")
        .Attr<int32_t>("window_left")
        .Attr<int32_t>("window_right")
        .Attr<int32_t>("top_left")
        .Attr<float>("softcap")
        .Attr<int32_t>("has_cu_seqlens")
        .Attr<int32_t>("has_seqused_q")
        .Attr<int32_t>("has_seqused_k")
        .Attr<int32_t>("deterministic"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace fa
