#include "host/launch.h"

#include <cuda.h>

#include <atomic>
#include <string>

#include "host/registry.h"
#include "index_maps.h"

namespace fa {
namespace {

std::atomic<bool> fail_next{false};

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here; later calls start clean
  throw DeviceError(what + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                    ")");
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "reading a device attribute");
  return value;
}

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, fetched through the runtime so that the library loads without a driver.
EncodeTiled encode_tiled() {
  static const EncodeTiled encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &found),
          "looking up cuTensorMapEncodeTiled");
#else
    check(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
          "looking up cuTensorMapEncodeTiled");
#endif
    if (found != cudaDriverEntryPointSuccess) {
      throw DeviceError("the CUDA driver has no cuTensorMapEncodeTiled");
    }
    return reinterpret_cast<EncodeTiled>(function);
  }();
  return encode;
}

// A tensor map over a dense array, innermost dimension first; strides in elements of the dimensions
// from the second on. Parts of a box outside the tensor read as zero and are not written.
template <int kRank>
CUtensorMap tensor_map(const std::string& what, CUtensorMapDataType type, int element_bytes,
                       const void* base, const int64_t (&size)[kRank],
                       const int64_t (&stride)[kRank - 1], const int (&box)[kRank],
                       int swizzle_bytes) {
  cuuint64_t sizes[kRank], strides[kRank];
  cuuint32_t boxes[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(size[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(stride[i - 1] * element_bytes);
  }
  const CUtensorMapSwizzle swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  CUtensorMap map;
  const CUresult status =
      encode_tiled()(&map, type, kRank, const_cast<void*>(base), sizes, strides, boxes, steps,
                     CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError(what + ": TMA descriptor refused, CUresult " + std::to_string(status));
  }
  return map;
}

// The kernels' code is for compute capability 9.0 and nothing newer.
void check_device() {
  int device = 0;
  check(cudaGetDevice(&device), "finding the current device");
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) {
    throw NotCovered("the kernels need compute capability 9.0, the device has " +
                     std::to_string(major) + "." + std::to_string(minor));
  }
}

template <typename Kernel>
const void* symbol_of(const std::vector<Kernel>& kernels, const std::string& name) {
  for (const Kernel& kernel : kernels) {
    if (name == kernel.name && kernel.symbol != nullptr) return kernel.symbol;
  }
  throw NotCovered("kernel " + name + " is not built into this installation");
}

template <typename Plan, typename Params>
void launch(const Plan& plan, const void* symbol, const Params& params, cudaStream_t stream) {
  const std::string what = "launching kernel " + plan.kernel;
  constexpr int kTooManyBytes = 1 << 24;
  const int smem_bytes = fail_next.exchange(false) ? kTooManyBytes : plan.smem_bytes;
  // What every kernel may use without asking. More is asked for per call: the attribute belongs to
  // the current device.
  constexpr int kDefaultSmemBytes = 48 * 1024;
  if (smem_bytes > kDefaultSmemBytes) {
    check(cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
          what);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.grid));
  config.blockDim = dim3(static_cast<unsigned>(plan.num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  void* arguments[] = {const_cast<Params*>(&params)};
  check(cudaLaunchKernelExC(&config, symbol, arguments), what);
}

}  // namespace

void fail_next_launch() { fail_next = true; }

void launch_epilogue(const EpilogueArguments& arguments, cudaStream_t stream) {
  const EpilogueProblem& problem = arguments.problem;
  const EpiloguePlan plan = plan_epilogue(problem);
  if (plan.grid == 0) return;
  check_device();
  const void* const symbol = symbol_of(epilogue_kernels(), plan.kernel);
  const int64_t head_dim = problem.head_dim;
  const int64_t heads = problem.heads_kv * problem.qhead_per_khead;

  EpilogueParams params = {};
  OutputParams& output = params.output;
  output.o = arguments.o;
  output.lse = arguments.lse;
  output.o_head_stride = head_dim;
  output.o_query_stride = heads * head_dim;
  output.o_batch_stride = problem.seqlen * output.o_query_stride;
  output.lse_head_stride = problem.seqlen;
  output.lse_batch_stride = heads * problem.seqlen;
  output.qhead_per_khead = cutlass::FastDivmod(static_cast<int>(problem.qhead_per_khead));
  output.head_dim = static_cast<int>(head_dim);
  output.tma_store = plan.tma_store;
  if (plan.tma_store) {
    const int panel = output_panel_columns(plan.config.head_dim);
    output.o_tensor_map =
        tensor_map<4>(plan.kernel,
                      problem.out_dtype == DataType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                      2, arguments.o, {head_dim, problem.seqlen, heads, problem.batch},
                      {output.o_query_stride, output.o_head_stride, output.o_batch_stride},
                      {panel, plan.config.block_m, 1, 1}, 2 * panel);
  }
  params.batch_map = arguments.batch_map;
  params.acc = arguments.acc;
  params.statistic[0] = arguments.statistic[0];
  params.statistic[1] = arguments.statistic[1];
  params.cu_seqlens = arguments.cu_seqlens;
  params.seqused = arguments.seqused;
  params.heads_kv = cutlass::FastDivmod(static_cast<int>(problem.heads_kv));
  params.row_blocks =
      cutlass::FastDivmod(static_cast<int>(plan.grid / (problem.batch * problem.heads_kv)));
  params.sequences = static_cast<int>(problem.sequences);
  params.seqlen_acc = static_cast<int>(problem.rows / problem.qhead_per_khead);
  params.seqlen = static_cast<int>(problem.seqlen);
  launch(plan, symbol, params, stream);
}

void launch_combine(const CombineArguments& arguments, cudaStream_t stream) {
  const CombineProblem& problem = arguments.problem;
  const CombinePlan plan = plan_combine(problem);
  if (plan.grid == 0) return;
  check_device();
  const void* const symbol = symbol_of(combine_kernels(), plan.kernel);

  CombineParams params = {};
  params.out_partial = arguments.out_partial;
  params.lse_partial = arguments.lse_partial;
  params.out = arguments.out;
  params.lse = arguments.lse;
  params.batch_map = arguments.batch_map;
  for (int operand = 0; operand < kNumCombineOperands; ++operand) {
    params.split_stride[operand] = arguments.split_stride[operand];
  }
  params.num_tasks = static_cast<int>(plan.num_tasks);
  params.seqlen_blocks = cutlass::FastDivmod(
      static_cast<int>((problem.seqlen + kCombineRowsPerWarp - 1) / kCombineRowsPerWarp));
  params.heads = cutlass::FastDivmod(static_cast<int>(problem.heads));
  params.seqlen = static_cast<int>(problem.seqlen);
  params.head_dim = static_cast<int>(problem.head_dim);
  params.num_splits = static_cast<int>(problem.num_splits);
  launch(plan, symbol, params, stream);
}

}  // namespace fa
