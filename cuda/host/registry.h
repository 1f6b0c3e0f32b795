// The kernel table at run time: one entry per row of kernels.def, with the kernel's symbol where
// this build holds it.
#pragma once

#include <vector>

#include "config.h"

namespace fa {

struct EpilogueKernel {
  EpilogueConfig config;
  const char* name;
  const void* symbol;  // null: not built
};

struct CombineKernel {
  CombineConfig config;
  const char* name;
  const void* symbol;
};

struct ForwardKernel {
  ForwardConfig config;
  const char* name;
  const void* symbol;
};

struct ScheduleKernel {
  ScheduleConfig config;
  const char* name;
  const void* symbol;
};

struct BackwardKernel {
  BackwardConfig config;
  const char* name;
  const void* symbol;
};

struct PreprocessKernel {
  PreprocessConfig config;
  const char* name;
  const void* symbol;
};

struct PostprocessKernel {
  PostprocessConfig config;
  const char* name;
  const void* symbol;
};

const std::vector<EpilogueKernel>& epilogue_kernels();
const std::vector<CombineKernel>& combine_kernels();
const std::vector<ForwardKernel>& forward_kernels();
const std::vector<ScheduleKernel>& schedule_kernels();
const std::vector<BackwardKernel>& backward_kernels();
const std::vector<PreprocessKernel>& preprocess_kernels();
const std::vector<PostprocessKernel>& postprocess_kernels();

}  // namespace fa
