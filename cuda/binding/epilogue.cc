// FFI handler of the epilogue. Logical shapes (leading axes *b: full size or 1, see operands.h):
//
//   acc (*b, Hk, S, M, Dv) f32; lse or row_max, row_sum (*b, Hk, S, M) f32;
//   cu_seqlens (*b, 1 or Hk, S + 1) i32; seqused (*b, 1 or Hk, S) i32
//   -> o (*b, Hk, G, T, Dv), lse (*b, Hk, G, T) f32
//
// In memory S lies before Hk in the operands, and T before Hk, G in o (operand layouts of the
// call).
#include "binding/handlers.h"
#include "binding/operands.h"

namespace fa {
namespace {

void epilogue(cudaStream_t stream, ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> o,
              ffi::Result<ffi::AnyBuffer> lse, int32_t num_batch_dims, int32_t normalised,
              int32_t has_cu_seqlens, int32_t has_seqused, int32_t fp8_permuted_columns) {
  const size_t num_statistics = normalised ? 1 : 2;
  require(operands.size() == 1 + num_statistics + (has_cu_seqlens != 0) + (has_seqused != 0),
          "epilogue: wrong number of operands");
  size_t next = 0;
  const auto take = [&](const char* name, ffi::DataType type, size_t rank) {
    const ffi::AnyBuffer buffer = operands.get<ffi::AnyBuffer>(next++).value();
    require(buffer.element_type() == type && buffer.dimensions().size() == rank,
            std::string(name) + ": wrong dtype or rank");
    return buffer;
  };
  const size_t b = static_cast<size_t>(num_batch_dims);
  const Dimensions out = o->dimensions();
  require(num_batch_dims >= 0 && out.size() == b + 4 && lse->dimensions().size() == b + 3 &&
              lse->element_type() == ffi::F32,
          "epilogue: wrong result shapes");

  EpilogueArguments arguments = {};
  EpilogueProblem& problem = arguments.problem;
  const ffi::AnyBuffer acc = take("acc", ffi::F32, b + 4);
  const Dimensions in = acc.dimensions();
  problem.out_dtype = data_type(o->element_type());
  problem.column_order = fp8_permuted_columns ? ColumnOrder::fp8 : ColumnOrder::plain;
  problem.batch = product(out, 0, b);
  problem.heads_kv = out[b];
  problem.qhead_per_khead = out[b + 1];
  problem.seqlen = out[b + 2];
  problem.head_dim = out[b + 3];
  problem.sequences = in[b + 1];
  problem.rows = in[b + 2];
  require(in[b] == problem.heads_kv && in[b + 3] == problem.head_dim, "acc: wrong shape");
  require(has_cu_seqlens ||
              (problem.sequences == 1 && problem.rows == problem.seqlen * problem.qhead_per_khead),
          "acc: dense rows must be queries times qhead_per_khead");
  require(problem.qhead_per_khead > 0 && problem.rows % problem.qhead_per_khead == 0,
          "acc: rows must be a multiple of qhead_per_khead");
  arguments.acc = static_cast<const float*>(acc.untyped_data());
  arguments.o = o->untyped_data();
  arguments.lse = static_cast<float*>(lse->untyped_data());

  // One matrix of acc, and one vector of rows of the statistics, per (sequence, head).
  const int64_t matrices = problem.sequences * problem.heads_kv;
  std::vector<int64_t> steps[kNumEpilogueOperands];
  for (auto& operand_steps : steps) operand_steps.assign(b, 0);
  steps[kAcc] = batch_steps("acc", in, out, b, matrices);
  for (size_t i = 0; i < num_statistics; ++i) {
    const ffi::AnyBuffer statistic = take("statistics", ffi::F32, b + 3);
    const Dimensions shape = statistic.dimensions();
    require(shape[b] == problem.heads_kv && shape[b + 1] == problem.sequences &&
                shape[b + 2] == problem.rows,
            "statistics: wrong shape");
    steps[kStatistic0 + i] = batch_steps("statistics", shape, out, b, matrices);
    arguments.statistic[i] = static_cast<const float*>(statistic.untyped_data());
  }
  const auto take_descriptor = [&](const char* name, EpilogueOperand operand, int64_t length) {
    return descriptor(name, take(name, ffi::S32, b + 2), out, b, problem.heads_kv, length,
                      steps[operand]);
  };
  if (has_cu_seqlens) {
    arguments.cu_seqlens = take_descriptor("cu_seqlens", kCuSeqlens, problem.sequences + 1);
  }
  if (has_seqused) arguments.seqused = take_descriptor("seqused", kSeqused, problem.sequences);
  if (o->element_count() == 0 && lse->element_count() == 0) return;
  arguments.batch_map = make_batch_map<kNumEpilogueOperands>(out, b, steps);
  launch_epilogue(arguments, stream);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(epilogue_handler,
                              [](cudaStream_t stream, ffi::RemainingArgs operands,
                                 ffi::Result<ffi::AnyBuffer> o, ffi::Result<ffi::AnyBuffer> lse,
                                 int32_t num_batch_dims, int32_t normalised, int32_t has_cu_seqlens,
                                 int32_t has_seqused, int32_t fp8_permuted_columns) {
                                return guarded([&] {
                                  epilogue(stream, operands, o, lse, num_batch_dims, normalised,
                                           has_cu_seqlens, has_seqused, fp8_permuted_columns);
                                });
                              },
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int32_t>("num_batch_dims")
                                  .Attr<int32_t>("normalised")
                                  .Attr<int32_t>("has_cu_seqlens")
                                  .Attr<int32_t>("has_seqused")
                                  .Attr<int32_t>("fp8_permuted_columns"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace fa
