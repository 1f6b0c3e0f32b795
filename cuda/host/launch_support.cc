#include "host/launch_support.h"

#include <atomic>

#include "index_maps.h"

namespace fa {
namespace {

std::atomic<bool> fail_next{false};

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

}  // namespace

void check(cudaError_t status, const std::string& what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the error is reported here; later calls start clean
  throw DeviceError(what + ": " + cudaGetErrorName(status) + " (" + cudaGetErrorString(status) +
                    ")");
}

DeviceInfo check_device() {
  int device = 0;
  check(cudaGetDevice(&device), "finding the current device");
  const int major = attribute(cudaDevAttrComputeCapabilityMajor, device);
  const int minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
  if (major != 9 || minor != 0) {
    throw NotCovered("the kernels need compute capability 9.0, the device has " +
                     std::to_string(major) + "." + std::to_string(minor));
  }
  return {attribute(cudaDevAttrMultiProcessorCount, device)};
}

CUtensorMap encode_tensor_map(const std::string& what, CUtensorMapDataType type, int element_bytes,
                              const void* base, int rank, const int64_t* size,
                              const int64_t* stride, const int* box, int swizzle_bytes) {
  constexpr int kMaxRank = 5;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank];
  cuuint32_t boxes[kMaxRank], steps[kMaxRank];
  for (int i = 0; i < rank; ++i) {
    sizes[i] = static_cast<cuuint64_t>(size[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(stride[i - 1] * element_bytes);
  }
  const CUtensorMapSwizzle swizzle =
      swizzle_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  CUtensorMap map;
  const CUresult status =
      encode_tiled()(&map, type, static_cast<cuuint32_t>(rank), const_cast<void*>(base), sizes,
                     strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError(what + ": TMA descriptor refused, CUresult " + std::to_string(status));
  }
  return map;
}

OutputParams output_params(const OutputArguments& arguments) {
  OutputParams output = {};
  output.o = arguments.o;
  output.lse = arguments.lse;
  output.o_head_stride = arguments.head_dim;
  output.o_query_stride = arguments.heads * arguments.head_dim;
  output.o_batch_stride = arguments.seqlen * output.o_query_stride;
  output.lse_head_stride = arguments.seqlen;
  output.lse_batch_stride = arguments.heads * arguments.seqlen;
  output.qhead_per_khead = cutlass::FastDivmod(static_cast<int>(arguments.packed_heads));
  output.head_dim = static_cast<int>(arguments.head_dim);
  return output;
}

void launch_kernel(const std::string& name, const void* symbol, int grid, int num_threads,
                   int smem_bytes, const void* params, cudaStream_t stream, LaunchOrder order,
                   int cluster) {
  const std::string what = "launching kernel " + name;
  constexpr int kTooManyBytes = 1 << 24;
  if (fail_next.exchange(false)) smem_bytes = kTooManyBytes;
  // What every kernel may use without asking. More is asked for per call: the attribute belongs to
  // the current device.
  constexpr int kDefaultSmemBytes = 48 * 1024;
  if (smem_bytes > kDefaultSmemBytes) {
    check(cudaFuncSetAttribute(symbol, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes),
          what);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.dynamicSmemBytes = static_cast<size_t>(smem_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (order == LaunchOrder::waits_itself) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  void* arguments[] = {const_cast<void*>(params)};
  check(cudaLaunchKernelExC(&config, symbol, arguments), what);
}

void fail_next_launch() { fail_next = true; }

}  // namespace fa
