// FFI handler of the forward. Logical shapes (leading axes *b: full size or 1, see operands.h):
//
//   q (*b, Hk, G, T, D), k (*b, Hk, S, D), v (*b, Hk, S, Dv); seqused_q, seqused_k (*b, 1 or Hk)
//   i32
//   -> o (*b, Hk, G, T, Dv), lse (*b, Hk, G, T) f32, workspace (*b, Hk) i32
//
// In memory (operand layouts of the call): q, o (*b, T, Hk, G, .), k, v (*b, S, Hk, .).
#include "binding/handlers.h"
#include "binding/operands.h"

namespace fa {
namespace {

struct ForwardAttributes {
  int32_t num_batch_dims;
  float softmax_scale;
  int32_t window_left;
  int32_t window_right;
  int32_t top_left;
  float softcap;
  int32_t has_seqused_q;
  int32_t has_seqused_k;
  int32_t pack_gqa;
};

void forward(cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
             ffi::RemainingArgs lengths, ffi::Result<ffi::AnyBuffer> o,
             ffi::Result<ffi::AnyBuffer> lse, ffi::Result<ffi::AnyBuffer> workspace,
             const ForwardAttributes& attributes) {
  const size_t b = static_cast<size_t>(attributes.num_batch_dims);
  const Dimensions out = o->dimensions();
  const Dimensions q_shape = q.dimensions();
  const Dimensions k_shape = k.dimensions();
  const Dimensions v_shape = v.dimensions();
  const ffi::DataType type = q.element_type();
  require(attributes.num_batch_dims >= 0 && out.size() == b + 4 &&
              lse->dimensions().size() == b + 3 && lse->element_type() == ffi::F32,
          "forward: wrong result shapes");
  require(workspace->element_type() == ffi::S32, "workspace: dtype must be int32");
  require(q_shape.size() == b + 4, "q: wrong rank");
  require(k_shape.size() == b + 3 && k.element_type() == type, "k: wrong dtype or rank");
  require(v_shape.size() == b + 3 && v.element_type() == type, "v: wrong dtype or rank");
  require(type == ffi::BF16 || type == ffi::F16, "q: dtype must be bfloat16 or float16");
  require(o->element_type() == type, "forward: the result has another dtype than q");

  ForwardArguments arguments = {};
  ForwardProblem& problem = arguments.problem;
  problem.dtype = data_type(type);
  problem.batch = product(out, 0, b);
  problem.heads_kv = out[b];
  problem.qhead_per_khead = out[b + 1];
  problem.seqlen_q = out[b + 2];
  problem.seqlen_k = k_shape[b + 1];
  problem.head_dim = q_shape[b + 3];
  problem.head_dim_v = out[b + 3];
  problem.window_left = attributes.window_left;
  problem.window_right = attributes.window_right;
  problem.top_left = attributes.top_left != 0;
  problem.has_seqused_q = attributes.has_seqused_q != 0;
  problem.has_seqused_k = attributes.has_seqused_k != 0;
  problem.softmax_scale = attributes.softmax_scale;
  problem.softcap = attributes.softcap;
  require(attributes.pack_gqa >= -1 && attributes.pack_gqa <= 1, "pack_gqa must be -1, 0 or 1");
  problem.pack_gqa = static_cast<PackGqa>(attributes.pack_gqa);
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
  require(lengths.size() == size_t{problem.has_seqused_q} + size_t{problem.has_seqused_k},
          "forward: wrong number of operands");
  size_t next = 0;
  const auto take_lengths = [&](const char* name, ForwardOperand operand) {
    const ffi::AnyBuffer buffer = lengths.get<ffi::AnyBuffer>(next++).value();
    const Dimensions shape = buffer.dimensions();
    // Equal for all heads; the partitioner wants them repeated, and the first copy is read.
    require(buffer.element_type() == ffi::S32 && shape.size() == b + 1 &&
                (shape[b] == 1 || shape[b] == problem.heads_kv),
            std::string(name) + ": wrong dtype or shape");
    steps[operand] = batch_steps(name, shape, out, b, shape[b]);
    return static_cast<const int32_t*>(buffer.untyped_data());
  };
  if (problem.has_seqused_q) arguments.seqused_q = take_lengths("seqused_q", kSequsedQ);
  if (problem.has_seqused_k) arguments.seqused_k = take_lengths("seqused_k", kSequsedK);
  if (o->element_count() == 0) return;
  require(workspace->element_count() > 0, "workspace: must have an element");
  arguments.tile_counter = static_cast<int*>(workspace->untyped_data());
  arguments.batch_map = make_batch_map<kNumForwardOperands>(out, b, steps);
  launch_forward(arguments, stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    forward_handler,
    [](cudaStream_t stream, ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
       ffi::RemainingArgs lengths, ffi::Result<ffi::AnyBuffer> o, ffi::Result<ffi::AnyBuffer> lse,
       ffi::Result<ffi::AnyBuffer> workspace, int32_t num_batch_dims, float softmax_scale,
       int32_t window_left, int32_t window_right, int32_t top_left, float softcap,
       int32_t has_seqused_q, int32_t has_seqused_k, int32_t pack_gqa) {
      return guarded([&] {
        forward(stream, q, k, v, lengths, o, lse, workspace,
                {num_batch_dims, softmax_scale, window_left, window_right, top_left, softcap,
                 has_seqused_q, has_seqused_k, pack_gqa});
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
        .Attr<int32_t>("window_left")
        .Attr<int32_t>("window_right")
        .Attr<int32_t>("top_left")
        .Attr<float>("softcap")
        .Attr<int32_t>("has_seqused_q")
        .Attr<int32_t>("has_seqused_k")
        .Attr<int32_t>("pack_gqa"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace fa
