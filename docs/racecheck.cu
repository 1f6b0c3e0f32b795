// What racecheck says of a warp's accesses to shared memory that one lane announces for all: see
// sanitizers.md. Modes 0 and 1: written, then read; 2 and 3: read, then overwritten by a bulk copy. In 0
// and 2 one lane arrives and hazards are reported, in 1 and 3 each lane does and none is.
//
//   nvcc -std=c++17 -arch=sm_90a docs/racecheck.cu -o racecheck
//   for mode in 0 1 2 3; do compute-sanitizer --tool racecheck --racecheck-report all ./racecheck $mode; done
#include <cstdint>
#include <cstdio>

namespace {

__device__ uint32_t address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(barrier)), "r"(arrivals)
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(address(barrier)) : "memory");
}

__device__ void wait(uint64_t* barrier, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT%=:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT%=;\n"
      "}" ::"r"(address(barrier)),
      "r"(phase)
      : "memory");
}

__device__ void bulk_copy(int* target, const int* source, uint64_t* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" ::"r"(address(barrier))
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::
          "r"(address(target)),
      "l"(source), "r"(address(barrier))
      : "memory");
}

// A warp's work, announced by one lane after __syncwarp, or by each lane for itself.
template <bool kEachLane>
__device__ void announce(uint64_t* barrier) {
  if (!kEachLane) __syncwarp();
  if (kEachLane || threadIdx.x % 32 == 0) arrive(barrier);
}

// The first warp writes, the second one reads.
template <bool kEachLane>
__global__ void written_then_read(int* out) {
  __shared__ int values[32];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) init(&full, kEachLane ? 32 : 1);
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    values[lane] = lane;
    announce<kEachLane>(&full);
  } else {
    wait(&full, 0);
    out[lane] = values[31 - lane];
  }
}

// The first warp reads what a bulk copy brought, and another copy overwrites it.
template <bool kEachLane>
__global__ void read_then_copied(const int* in, int* out) {
  __shared__ alignas(128) int values[32];
  __shared__ uint64_t full;
  __shared__ uint64_t empty;
  if (threadIdx.x == 0) {
    init(&full, 1);
    init(&empty, kEachLane ? 32 : 1);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 32) {
    bulk_copy(values, in, &full);
    wait(&empty, 0);
    bulk_copy(values, in + 32, &full);
  } else if (threadIdx.x < 32) {
    for (int i = 0; i < 2; ++i) {
      wait(&full, i);
      out[32 * i + lane] = values[31 - lane];
      announce<kEachLane>(&empty);
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  const int mode = count > 1 ? arguments[1][0] - '0' : 0;
  int* in;
  int* out;
  cudaMalloc(&in, 256);
  cudaMalloc(&out, 256);
  cudaMemset(in, 0, 256);
  if (mode == 0) written_then_read<false><<<1, 64>>>(out);
  if (mode == 1) written_then_read<true><<<1, 64>>>(out);
  if (mode == 2) read_then_copied<false><<<1, 64>>>(in, out);
  if (mode == 3) read_then_copied<true><<<1, 64>>>(in, out);
  std::printf("%d: %s\n", mode, cudaGetErrorString(cudaDeviceSynchronize()));
}
