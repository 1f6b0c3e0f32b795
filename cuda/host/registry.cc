#include "host/registry.h"

#include <string_view>

namespace fa {

// Each generated .cu defines the symbol function of its row.
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm) \
  const void* epilogue_##dtype##_##head_dim##_##order##_##block_m##_##blocks_per_sm##_symbol();
#define COMBINE_KERNEL(dtype, head_dim) const void* combine_##dtype##_##head_dim##_symbol();
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages) \
  const void*                                                                         \
      forward_##dtype##_##head_dim##_##head_dim_v##_##output##_##block_m##_##block_n##_##stages##_symbol();
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages) \
  const void*                                                                  \
      backward_##dtype##_##head_dim##_##head_dim_v##_##block_m##_##block_n##_##stages##_symbol();
#define PREPROCESS_KERNEL(dtype) const void* preprocess_##dtype##_symbol();
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m) \
  const void* postprocess_##dtype##_##head_dim##_##block_m##_symbol();
#include "built_kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL

namespace {

struct BuiltKernel {
  std::string_view name;
  const void* symbol;
};

const std::vector<BuiltKernel>& built_kernels() {
  static const std::vector<BuiltKernel> kernels = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)         \
  {"epilogue_" #dtype "_" #head_dim "_" #order "_" #block_m "_" #blocks_per_sm, \
   epilogue_##dtype##_##head_dim##_##order##_##block_m##_##blocks_per_sm##_symbol()},
#define COMBINE_KERNEL(dtype, head_dim) \
  {"combine_" #dtype "_" #head_dim, combine_##dtype##_##head_dim##_symbol()},
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)    \
  {"forward_" #dtype "_" #head_dim "_" #head_dim_v "_" #output "_" #block_m "_" #block_n \
   "_" #stages,                                                                          \
   forward_##dtype##_##head_dim##_##head_dim_v##_##output##_##block_m##_##block_n##_##stages##_symbol()},
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)             \
  {"backward_" #dtype "_" #head_dim "_" #head_dim_v "_" #block_m "_" #block_n "_" #stages, \
   backward_##dtype##_##head_dim##_##head_dim_v##_##block_m##_##block_n##_##stages##_symbol()},
#define PREPROCESS_KERNEL(dtype) {"preprocess_" #dtype, preprocess_##dtype##_symbol()},
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m) \
  {"postprocess_" #dtype "_" #head_dim "_" #block_m, \
   postprocess_##dtype##_##head_dim##_##block_m##_symbol()},
#include "built_kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
  };
  return kernels;
}

const void* find_symbol(std::string_view name) {
  for (const BuiltKernel& kernel : built_kernels()) {
    if (kernel.name == name) return kernel.symbol;
  }
  return nullptr;
}

}  // namespace

const std::vector<EpilogueKernel>& epilogue_kernels() {
  static const std::vector<EpilogueKernel> kernels = [] {
    std::vector<EpilogueKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)                   \
  {EpilogueConfig{DataType::dtype, head_dim, ColumnOrder::order, block_m, blocks_per_sm}, \
   "epilogue_" #dtype "_" #head_dim "_" #order "_" #block_m "_" #blocks_per_sm, nullptr},
#define COMBINE_KERNEL(dtype, head_dim)
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)
#define PREPROCESS_KERNEL(dtype)
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
    };
    for (EpilogueKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

const std::vector<CombineKernel>& combine_kernels() {
  static const std::vector<CombineKernel> kernels = [] {
    std::vector<CombineKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)
#define COMBINE_KERNEL(dtype, head_dim) \
  {CombineConfig{DataType::dtype, head_dim}, "combine_" #dtype "_" #head_dim, nullptr},
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)
#define PREPROCESS_KERNEL(dtype)
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
    };
    for (CombineKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

const std::vector<ForwardKernel>& forward_kernels() {
  static const std::vector<ForwardKernel> kernels = [] {
    std::vector<ForwardKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)
#define COMBINE_KERNEL(dtype, head_dim)
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)              \
  {ForwardConfig{DataType::dtype, head_dim, head_dim_v, Output::output, block_m, block_n, stages}, \
   "forward_" #dtype "_" #head_dim "_" #head_dim_v "_" #output "_" #block_m "_" #block_n           \
   "_" #stages,                                                                                    \
   nullptr},
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)
#define PREPROCESS_KERNEL(dtype)
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
    };
    for (ForwardKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

const std::vector<BackwardKernel>& backward_kernels() {
  static const std::vector<BackwardKernel> kernels = [] {
    std::vector<BackwardKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)
#define COMBINE_KERNEL(dtype, head_dim)
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)
#define PREPROCESS_KERNEL(dtype)
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)             \
  {BackwardConfig{DataType::dtype, head_dim, head_dim_v, block_m, block_n, stages},        \
   "backward_" #dtype "_" #head_dim "_" #head_dim_v "_" #block_m "_" #block_n "_" #stages, \
   nullptr},
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
    };
    for (BackwardKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

const std::vector<PreprocessKernel>& preprocess_kernels() {
  static const std::vector<PreprocessKernel> kernels = [] {
    std::vector<PreprocessKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)
#define COMBINE_KERNEL(dtype, head_dim)
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)
#define PREPROCESS_KERNEL(dtype) {PreprocessConfig{DataType::dtype}, "preprocess_" #dtype, nullptr},
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
    };
    for (PreprocessKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

const std::vector<PostprocessKernel>& postprocess_kernels() {
  static const std::vector<PostprocessKernel> kernels = [] {
    std::vector<PostprocessKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)
#define COMBINE_KERNEL(dtype, head_dim)
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)
#define BACKWARD_KERNEL(dtype, head_dim, head_dim_v, block_m, block_n, stages)
#define PREPROCESS_KERNEL(dtype)
#define POSTPROCESS_KERNEL(dtype, head_dim, block_m)      \
  {PostprocessConfig{DataType::dtype, head_dim, block_m}, \
   "postprocess_" #dtype "_" #head_dim "_" #block_m, nullptr},
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef BACKWARD_KERNEL
#undef PREPROCESS_KERNEL
#undef POSTPROCESS_KERNEL
    };
    for (PostprocessKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

}  // namespace fa
