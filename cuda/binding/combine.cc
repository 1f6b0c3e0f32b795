// FFI handler of the combine. Logical shapes (leading axes *b = (*v, B): full size or 1, see
// operands.h):
//
//   out_partial (*b, H, N, T, Dv) f32; lse_partial (*b, H, N, T) f32
//   -> out (*b, H, T, Dv), lse (*b, H, T) f32
//
// In memory (operand layouts of the call): out_partial (*v, N, B, T, H, Dv), lse_partial
// (*v, N, B, H, T), out (*b, T, H, Dv).
#include "binding/handlers.h"
#include "binding/operands.h"

namespace fa {
namespace {

// Steps along (*v, B) of an operand whose splits lie between *v and B, and the step of a split.
std::vector<int64_t> split_batch_steps(const char* operand, Dimensions shape, Dimensions result,
                                       size_t num_batch_dims, int64_t num_splits, int64_t item,
                                       int64_t& split_stride) {
  const size_t last = num_batch_dims - 1;
  split_stride = shape[last] * item;
  std::vector<int64_t> steps = batch_steps(operand, shape, result, last, num_splits * split_stride);
  require(shape[last] == result[last] || shape[last] == 1,
          std::string(operand) + ": wrong size of the batch axis");
  steps.push_back(shape[last] == 1 ? 0 : item);
  return steps;
}

void combine(cudaStream_t stream, ffi::AnyBuffer out_partial, ffi::AnyBuffer lse_partial,
             ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse,
             int32_t num_batch_dims) {
  require(num_batch_dims >= 1, "combine: num_batch_dims must be 1 or more");
  const size_t b = static_cast<size_t>(num_batch_dims);
  const Dimensions result = out->dimensions();
  const Dimensions o_shape = out_partial.dimensions();
  const Dimensions lse_shape = lse_partial.dimensions();
  require(result.size() == b + 3 && lse->dimensions().size() == b + 2 &&
              lse->element_type() == ffi::F32,
          "combine: wrong result shapes");
  require(o_shape.size() == b + 4 && out_partial.element_type() == ffi::F32,
          "out_partial: wrong dtype or rank");
  require(lse_shape.size() == b + 3 && lse_partial.element_type() == ffi::F32,
          "lse_partial: wrong dtype or rank");

  CombineArguments arguments = {};
  CombineProblem& problem = arguments.problem;
  problem.out_dtype = data_type(out->element_type());
  problem.batch = product(result, 0, b);
  problem.heads = result[b];
  problem.seqlen = result[b + 1];
  problem.head_dim = result[b + 2];
  problem.num_splits = o_shape[b + 1];
  require(o_shape[b] == problem.heads && o_shape[b + 2] == problem.seqlen &&
              o_shape[b + 3] == problem.head_dim,
          "out_partial: wrong shape");
  require(lse_shape[b] == problem.heads && lse_shape[b + 1] == problem.num_splits &&
              lse_shape[b + 2] == problem.seqlen,
          "lse_partial: wrong shape");
  arguments.out_partial = static_cast<const float*>(out_partial.untyped_data());
  arguments.lse_partial = static_cast<const float*>(lse_partial.untyped_data());
  arguments.out = out->untyped_data();
  arguments.lse = static_cast<float*>(lse->untyped_data());
  const int64_t rows = problem.heads * problem.seqlen;
  const std::vector<int64_t> steps[kNumCombineOperands] = {
      split_batch_steps("out_partial", o_shape, result, b, problem.num_splits,
                        rows * problem.head_dim, arguments.split_stride[kOutPartial]),
      split_batch_steps("lse_partial", lse_shape, result, b, problem.num_splits, rows,
                        arguments.split_stride[kLsePartial])};
  if (out->element_count() == 0) return;
  arguments.batch_map = make_batch_map<kNumCombineOperands>(result, b, steps);
  launch_combine(arguments, stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    combine_handler,
    [](cudaStream_t stream, ffi::AnyBuffer out_partial, ffi::AnyBuffer lse_partial,
       ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> lse, int32_t num_batch_dims) {
      return guarded([&] { combine(stream, out_partial, lse_partial, out, lse, num_batch_dims); });
    },
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<cudaStream_t>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Ret<ffi::AnyBuffer>()
        .Attr<int32_t>("num_batch_dims"),
    {ffi::Traits::kCmdBufferCompatible});

}  // namespace fa
