#include "host/registry.h"

#include <string_view>

namespace fa {

// Each generated .cu defines the symbol function of its row.
#define BUILT_KERNEL(name) const void* name##_symbol();
#include "built_kernels.def"
#undef BUILT_KERNEL

namespace {

struct BuiltKernel {
  std::string_view name;
  const void* symbol;
};

const std::vector<BuiltKernel>& built_kernels() {
  static const std::vector<BuiltKernel> kernels = {
#define BUILT_KERNEL(name) {#name, name##_symbol()},
#include "built_kernels.def"
#undef BUILT_KERNEL
  };
  return kernels;
}

template <typename Kernel>
std::vector<Kernel> with_symbols(std::vector<Kernel> table) {
  for (Kernel& kernel : table) {
    for (const BuiltKernel& built : built_kernels()) {
      if (built.name == kernel.name) kernel.symbol = built.symbol;
    }
  }
  return table;
}

}  // namespace

const std::vector<EpilogueKernel>& epilogue_kernels() {
  static const auto kernels = with_symbols<EpilogueKernel>({
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)                   \
  {EpilogueConfig{DataType::dtype, head_dim, ColumnOrder::order, block_m, blocks_per_sm}, \
   "epilogue_" #dtype "_" #head_dim "_" #order "_" #block_m "_" #blocks_per_sm, nullptr},
#include "kernels.def"
  });
  return kernels;
}

const std::vector<CombineKernel>& combine_kernels() {
  static const auto kernels = with_symbols<CombineKernel>({
#define COMBINE_KERNEL(dtype, head_dim) \
  {CombineConfig{DataType::dtype, head_dim}, "combine_" #dtype "_" #head_dim, nullptr},
#include "kernels.def"
  });
  return kernels;
}

const std::vector<ForwardKernel>& forward_kernels() {
  static const auto kernels = with_symbols<ForwardKernel>({
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)              \
  {ForwardConfig{DataType::dtype, head_dim, head_dim_v, Output::output, block_m, block_n, stages}, \
   "forward_" #dtype "_" #head_dim "_" #head_dim_v "_" #output "_" #block_m "_" #block_n           \
   "_" #stages,                                                                                    \
   nullptr},
#include "kernels.def"
  });
  return kernels;
}

const std::vector<ScheduleKernel>& schedule_kernels() {
  static const auto kernels = with_symbols<ScheduleKernel>({
#define SCHEDULE_KERNEL(max_threads, items) \
  {ScheduleConfig{max_threads, items}, "schedule_" #max_threads "_" #items, nullptr},
#include "kernels.def"
  });
  return kernels;
}

const std::vector<BackwardKernel>& backward_kernels() {
  static const auto kernels = with_symbols<BackwardKernel>({
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)             \
  {BackwardConfig{DataType::dtype, head_dim, head_dim_v, block_m, block_n, stages},        \
   "backward_" #dtype "_" #head_dim "_" #head_dim_v "_" #block_m "_" #block_n "_" #stages, \
   nullptr},
#include "kernels.def"
  });
  return kernels;
}

const std::vector<PreprocessKernel>& preprocess_kernels() {
  static const auto kernels = with_symbols<PreprocessKernel>({
#define PREPROCESS_KERNEL(dtype) {PreprocessConfig{DataType::dtype}, "preprocess_" #dtype, nullptr},
#include "kernels.def"
  });
  return kernels;
}

const std::vector<PostprocessKernel>& postprocess_kernels() {
  static const auto kernels = with_symbols<PostprocessKernel>({
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)      \
  {PostprocessConfig{DataType::dtype, head_dim, block_m}, \
   "postprocess_" #dtype "_" #head_dim "_" #block_m, nullptr},
#include "kernels.def"
  });
  return kernels;
}

}  // namespace fa
