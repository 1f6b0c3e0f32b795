// What the launches share: CUDA's errors as exceptions, TMA descriptors, the launch itself.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "host/launch.h"

namespace fa {

// Throws DeviceError with `what` and CUDA's own text unless `status` is cudaSuccess.
void check(cudaError_t status, const std::string& what);

// The current device. Throws NotCovered unless its compute capability is 9.0: the kernels' code is
// for that and nothing newer.
DeviceInfo check_device();

// A tensor map over a dense array of `rank` dimensions, innermost first; strides in elements of the
// dimensions from the second on. Parts of a box outside the tensor read as zero.
CUtensorMap encode_tensor_map(const std::string& what, CUtensorMapDataType type, int element_bytes,
                              const void* base, int rank, const int64_t* size,
                              const int64_t* stride, const int* box, int swizzle_bytes);

template <int kRank>
CUtensorMap tensor_map(const std::string& what, CUtensorMapDataType type, int element_bytes,
                       const void* base, const int64_t (&size)[kRank],
                       const int64_t (&stride)[kRank - 1], const int (&box)[kRank],
                       int swizzle_bytes) {
  return encode_tensor_map(what, type, element_bytes, base, kRank, size, stride, box,
                           swizzle_bytes);
}

inline CUtensorMapDataType tensor_map_type(DataType type) {
  return type == DataType::bf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
         : type == DataType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

template <typename Kernel>
const void* symbol_of(const std::vector<Kernel>& kernels, const std::string& name) {
  for (const Kernel& kernel : kernels) {
    if (name == kernel.name && kernel.symbol != nullptr) return kernel.symbol;
  }
  throw NotCovered("kernel " + name + " is not built into this installation");
}

enum class LaunchOrder {
  after_previous,
  waits_itself,  // may start under the kernel before (programmatic dependent launch), and waits for
                 // its end before it touches global memory
};

// `params`: the kernel's only argument. `cluster`: CTAs of one, of which the grid is a multiple.
void launch_kernel(const std::string& name, const void* symbol, int grid, int num_threads,
                   int smem_bytes, const void* params, cudaStream_t stream,
                   LaunchOrder order = LaunchOrder::after_previous, int cluster = 1);

template <typename Plan, typename Params>
void launch(const Plan& plan, const void* symbol, const Params& params, cudaStream_t stream,
            LaunchOrder order = LaunchOrder::after_previous) {
  launch_kernel(plan.kernel, symbol, plan.grid, plan.num_threads, plan.smem_bytes, &params, stream,
                order);
}

// Where O and LSE of a dense call lie.
struct OutputArguments {
  void* o;
  float* lse;
  int64_t batch, seqlen, heads, head_dim;
  int64_t packed_heads;  // heads that share a tile's rows
};

OutputParams output_params(const OutputArguments& arguments);

}  // namespace fa
