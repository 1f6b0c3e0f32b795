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
#define SCHEDULE_KERNEL(max_threads, items) const void* schedule_##max_threads##_##items##_symbol();
#include "built_kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef SCHEDULE_KERNEL

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
#define COMBINE_KERNEL(dtype, head_dim)                                        \
  { "combine_" #dtype "_" #head_dim, combine_##dtype##_##head_dim##_symbol() } \
  ,
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)    \
  {"forward_" #dtype "_" #head_dim "_" #head_dim_v "_" #output "_" #block_m "_" #block_n \
   "_" #stages,                                                                          \
   forward_##dtype##_##head_dim##_##head_dim_v##_##output##_##block_m##_##block_n##_##stages##_symbol()},
#define SCHEDULE_KERNEL(max_threads, items) \
  {"schedule_" #max_threads "_" #items, schedule_##max_threads##_##items##_symbol()},
#include "built_kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef SCHEDULE_KERNEL
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
#define SCHEDULE_KERNEL(max_threads, items)
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef SCHEDULE_KERNEL
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
#define SCHEDULE_KERNEL(max_threads, items)
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef SCHEDULE_KERNEL
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
#define SCHEDULE_KERNEL(max_threads, items)
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef SCHEDULE_KERNEL
    };
    for (ForwardKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

const std::vector<ScheduleKernel>& schedule_kernels() {
  static const std::vector<ScheduleKernel> kernels = [] {
    std::vector<ScheduleKernel> table = {
#define EPILOGUE_KERNEL(dtype, head_dim, order, block_m, blocks_per_sm)
#define COMBINE_KERNEL(dtype, head_dim)
#define FORWARD_KERNEL(dtype, head_dim, head_dim_v, output, block_m, block_n, stages)
#define SCHEDULE_KERNEL(max_threads, items) \
  {ScheduleConfig{max_threads, items}, "schedule_" #max_threads "_" #items, nullptr},
#include "kernels.def"
#undef EPILOGUE_KERNEL
#undef COMBINE_KERNEL
#undef FORWARD_KERNEL
#undef SCHEDULE_KERNEL
    };
    for (ScheduleKernel& kernel : table) kernel.symbol = find_symbol(kernel.name);
    return table;
  }();
  return kernels;
}

}  // namespace fa
