// FFI handler of the forward. Logical shapes (leading axes *b: full size or 1, see operands.h):
//
//   q (*b, Hk, G, T, D), k (*b, Hk, S, D), v (*b, Hk, S, Dv),
//   as flagged: cu_seqlens_q, cu_seqlens_k (*b, 1 or Hk, N + 1), seqused_q, seqused_k (*b, 1 or Hk, N) i32
//   num_splits 0:  -> o (*b, Hk, G, T, Dv), lse (*b, Hk, G, T) f32
//   num_splits P:  -> o (*b, Hk, P, G, T, Dv) f32, lse (*b, Hk, P, G, T) f32
//   and workspace (*b, Hk, W) i32, W as the plan says
//
// N sequences share the T and S tokens of a batch index; without cu_seqlens there is one. In memory
// (operand layouts of the call): q, o (*b, T, Hk, G, .), k, v (*b, S, Hk, .). Partial results have
// the splits outside the last axis of *b = (*v, B), as the combine reads them:
// o (*v, P, B, T, Hk, G, Dv), lse (*v, P, B, Hk, G, T).
#include "binding/handlers.h"
#include "binding/operands.h"

namespace fa {
namespace {

struct ForwardAttributes {
  int32_t num_batch_dims;
  float softmax_scale;
  float softcap;
  int32_t window_left;
  int32_t window_right;
  int32_t top_left;
  int32_t has_cu_seqlens;
  int32_t has_seqused_q;
  int32_t has_seqused_k;
  int32_t max_seqlen_q;
  int32_t max_seqlen_k;
  int32_t pack_gqa;
  int32_t num_splits;
};

void forward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
             ffi::RemainingArgs descriptors, ffi::Result<ffi::AnyBuffer> o,
             ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> workspace,
             const ForwardAttributes& attributes) {
  const size_t b = static_cast<size_t>(attributes.num_batch_dims);
  const Dimensions out = o->dimensions();
  const Dimensions q_shape = q.dimensions();
  const Dimensions k_shape = k.dimensions();
  const Dimensions v_shape = v.dimensions();
  const ffi::DataType type = q.element_type();
  require(attributes.num_splits >= 0, "num_splits must be 0 or more");
  const bool partial = attributes.num_splits > 0;
  const size_t split_dims = partial ? 1 : 0;
  require(attributes.num_batch_dims >= 0 && out.size() == b + 4 + split_dims &&
              lse->dimensions().size() == b + 3 + split_dims && lse->element_type() == ffi::F32,
          "forward: wrong result shapes");
  require(!partial || (b >= 1 && out[b + 1] == attributes.num_splits),
          "forward: partial results need a batch axis and num_splits splits");
  require(workspace->element_type() == ffi::S32, "workspace: dtype must be int32");
  require(q_shape.size() == b + 4, "q: wrong rank");
  require(k_shape.size() == b + 3 && k.element_type() == type, "k: wrong dtype or rank");
  require(v_shape.size() == b + 3 && v.element_type() == type, "v: wrong dtype or rank");
  require(type == ffi::BF16 || type == ffi::F16, "q: dtype must be bfloat16 or float16");
  require(o->element_type() == (partial ? ffi::F32 : type), "forward: wrong dtype of the result");

  ForwardArguments arguments = {};
  ForwardProblem& problem = arguments.problem;
  problem.dtype = data_type(type);
  problem.batch = product(out, 0, b);
  problem.heads_kv = out[b];
  problem.qhead_per_khead = out[b + split_dims + 1];
  problem.seqlen_q = out[b + split_dims + 2];
  problem.seqlen_k = k_shape[b + 1];
  problem.head_dim = q_shape[b + 3];
  problem.max_seqlen_q = attributes.max_seqlen_q;
  problem.max_seqlen_k = attributes.max_seqlen_k;
  problem.head_dim_v = out[b + split_dims + 3];
  problem.window_left = attributes.window_left;
  problem.window_right = attributes.window_right;
  problem.top_left = attributes.top_left != 0;
  problem.has_cu_seqlens = attributes.has_cu_seqlens != 0;
  problem.has_seqused_q = attributes.has_seqused_q != 0;
  problem.has_seqused_k = attributes.has_seqused_k != 0;
  problem.softmax_scale = attributes.softmax_scale;
  problem.softcap = attributes.softcap;
  require(attributes.pack_gqa >= -1 && attributes.pack_gqa <= 1, "pack_gqa must be -1, 0 or 1");
  problem.pack_gqa = static_cast<PackGqa>(attributes.pack_gqa);
  problem.num_splits = attributes.num_splits;
  require(q_shape[b] == problem.heads_kv && q_shape[b + 1] == problem.qhead_per_khead &&
              q_shape[b + 2] == problem.seqlen_q,
          "q: wrong shape");
  require(k_shape[b] == problem.heads_kv && k_shape[b + 2] == problem.head_dim, "k: wrong shape");
  require(v_shape[b] == problem.heads_kv && v_shape[b + 1] == problem.seqlen_k &&
              v_shape[b + 2] == problem.head_dim_v,
          "v: wrong shape");
  arguments.q = q.untyped_data();
  arguments.k = k.untyped_data();
  arguments.v = v.untyped_data();
  arguments.o = o->untyped_data();
  arguments.lse = static_cast<float*>(lse->untyped_data());
  arguments.batches[kQ] = product(q_shape, 0, b);
  arguments.batches[kK] = product(k_shape, 0, b);
  arguments.batches[kV] = product(v_shape, 0, b);

  std::vector<int64_t> steps[kNumForwardOperands];
  for (auto& operand_steps : steps) operand_steps.assign(b, 0);
  steps[kQ] = batch_steps("q", q_shape, out, b, 1);
  steps[kK] = batch_steps("k", k_shape, out, b, 1);
  steps[kV] = batch_steps("v", v_shape, out, b, 1);
  require(descriptors.size() ==
              2 * size_t{problem.has_cu_seqlens} + problem.has_seqused_q + problem.has_seqused_k,
          "forward: wrong number of operands");
  size_t next = 0;
  const auto take = [&](const char* name, ForwardOperand operand, int64_t offsets) {
    const ffi::AnyBuffer buffer = descriptors.get<ffi::AnyBuffer>(next++).value();
    if (operand == kForwardCuSeqlensQ) problem.sequences = sequences_of(name, buffer);
    return descriptor(name, buffer, out, b, problem.heads_kv, problem.sequences + offsets,
                      steps[operand]);
  };
  if (problem.has_cu_seqlens) {
    arguments.cu_seqlens_q = take("cu_seqlens_q", kForwardCuSeqlensQ, 1);
    arguments.cu_seqlens_k = take("cu_seqlens_k", kForwardCuSeqlensK, 1);
  }
  if (problem.has_seqused_q) arguments.seqused_q = take("seqused_q", kSequsedQ, 0);
  if (problem.has_seqused_k) arguments.seqused_k = take("seqused_k", kSequsedK, 0);
  if (o->element_count() == 0) return;
  arguments.inner_batch = b == 0 ? 1 : static_cast<int>(out[b - 1]);
  arguments.workspace = static_cast<int*>(workspace->untyped_data());
  arguments.workspace_size = workspace->element_count();
  arguments.batch_map = make_batch_map<kNumForwardOperands>(out, b, steps);
  launch_forward(arguments, stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(forward_handler,
                              [](cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                 ffi::AnyBuffer v, ffi::RemainingArgs descriptors,
                                 ffi::Result<ffi::AnyBuffer> o, ffi::Result<ffi::AnyBuffer> lse,
                                 ffi::Result<ffi::AnyBuffer> workspace, int32_t num_batch_dims,
                                 float softmax_scale, float softcap, int32_t window_left,
                                 int32_t window_right, int32_t top_left, int32_t has_cu_seqlens,
                                 int32_t has_seqused_q, int32_t has_seqused_k, int32_t max_seqlen_q,
                                 int32_t max_seqlen_k, int32_t pack_gqa, int32_t num_splits) {
                                return guarded([&] {
                                  forward(stream, q, k, v, descriptors, o, lse, workspace,
                                          {num_batch_dims, softmax_scale, softcap, window_left,
                                           window_right, top_left, has_cu_seqlens, has_seqused_q,
                                           has_seqused_k, max_seqlen_q, max_seqlen_k, pack_gqa,
                                           num_splits});
                                });
                              },
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("num_batch_dims")
                                  .Attr<float>("softmax_scale")
                                  .Attr<float>("softcap")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("window_right")
                                  .Attr<int32_t>("top_left")
                                  .Attr<int32_t>("has_cu_seqlens")
                                  .Attr<int32_t>("has_seqused_q")
                                  .Attr<int32_t>("has_seqused_k")
                                  .Attr<int32_t>("max_seqlen_q")
                                  .Attr<int32_t>("max_seqlen_k")
                                  .Attr<int32_t>("pack_gqa")
                                  .Attr<int32_t>("num_splits"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace fa
