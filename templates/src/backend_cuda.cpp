// The backend of libsdpa_cutlass: the CUDA runtime, linked statically. It makes the asked device current and restores
// the caller's, and it tells apart two failures that CUDA reports alike: a launch that was refused, and the fault of
// an earlier kernel that only now comes to light.
#include "backend.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace sdpa::backend {
namespace {

const char *hint(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
      return "; update the NVIDIA driver: this library was built with a newer CUDA than it serves";
    case cudaErrorNoDevice:
      return "; no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "; the library holds no code for this GPU and driver: rebuild with -DSDPA_CUDA_ARCHS=<its architecture>";
    default:
      return "";
  }
}

// Reports `error` and leaves no trace of it in the runtime, so that no later call is blamed.
Status cuda_status(const char *what, cudaError_t error) {
  (void)cudaGetLastError();
  return make_status(SDPA_CUDA_ERROR, "%s: %s: %s%s", what, cudaGetErrorName(error), cudaGetErrorString(error),
                     hint(error));
}

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    cudaError_t error = cudaGetDevice(&previous_);
    if (error != cudaSuccess) {
      status_ = cuda_status("cudaGetDevice", error);
      return;
    }
    if (previous_ == device) return;
    error = cudaSetDevice(device);
    if (error != cudaSuccess) {
      char what[64];
      snprintf(what, sizeof(what), "cudaSetDevice(%d)", device);
      status_ = cuda_status(what, error);
    }
    restore_ = true;
  }
  ~DeviceGuard() {
    if (restore_) (void)cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;

  const Status &status() const { return status_; }

 private:
  int previous_ = 0;
  bool restore_ = false;
  Status status_;
};

Status earlier_fault(cudaError_t error) {
  (void)cudaGetLastError();
  return make_status(SDPA_CUDA_ERROR,
                     "not launched: earlier work in this process had already failed with %s: %s; find it with "
                     "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer",
                     cudaGetErrorName(error), cudaGetErrorString(error));
}

// With CUDA_LAUNCH_BLOCKING=1 a launch returns when its kernel is done, so a fault that it reports is the kernel's own.
// Not while a graph is captured: nothing runs then.
bool launch_blocks(void *stream) {
  static const bool is_set = [] {
    const char *const value = std::getenv("CUDA_LAUNCH_BLOCKING");
    return value != nullptr && value[0] == '1';
  }();
  if (!is_set) return false;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture) == cudaSuccess &&
         capture == cudaStreamCaptureStatusNone;
}

// Without this attribute a launch with more dynamic shared memory is refused.
constexpr int kSmemWithoutAttribute = 48 * 1024;

Status load(const KernelRow &row) {
  for (const void *const function : row.functions) {
    if (function == nullptr) break;
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    if (error != cudaSuccess) return cuda_status("cudaFuncGetAttributes", error);
    if (row.info.smem_bytes <= kSmemWithoutAttribute) continue;
    error = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, row.info.smem_bytes);
    if (error != cudaSuccess) return cuda_status("cudaFuncSetAttribute(MaxDynamicSharedMemorySize)", error);
  }
  return {};
}

// Loads a row once per device. Two threads may both do so; that is harmless.
Status load_once(int index, const KernelRow &row, int device) {
  if (row.functions[0] == nullptr) return {};  // several kernels: their launcher sets what they need
  static std::vector<std::atomic<uint64_t>> loaded_on(static_cast<size_t>(sdpa_kernel_count()));
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  std::atomic<uint64_t> &devices = loaded_on[static_cast<size_t>(index)];
  if ((devices.load(std::memory_order_acquire) & bit) != 0) return {};
  const Status status = load(row);
  if (status.ok()) devices.fetch_or(bit, std::memory_order_release);
  return status;
}

}  // namespace

const sdpa_target kTarget = SDPA_BUILT_FOR_CUDA;

int cuda_runtime_version() { return CUDART_VERSION; }

Status launch(int index, const KernelRow &row, const sdpa_params &params, int device, void *stream) {
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  const bool blocks = launch_blocks(stream);
  cudaError_t before = cudaPeekAtLastError();
  if (before == cudaSuccess && blocks) before = cudaFree(nullptr);  // tells of a context that is already broken
  if (before != cudaSuccess) return earlier_fault(before);
  Status status = load_once(index, row, device);
  if (status.ok()) status = row.launch(params, stream);
  if (status.code == SDPA_CUDA_ERROR && !blocks) {
    // A launch is asynchronous: a context that is already broken was broken by earlier work.
    const cudaError_t sticky = cudaFree(nullptr);
    if (sticky != cudaSuccess) return earlier_fault(sticky);
  }
  return status;
}

Status prepare(int index, const KernelRow &row, int device) {
  const DeviceGuard guard(device);
  return guard.status().ok() ? load_once(index, row, device) : guard.status();
}

Status occupancy(int index, const KernelRow &row, int device, Occupancy &result) {
  if (row.functions[0] == nullptr)
    return make_status(SDPA_NOT_SUPPORTED, "%s launches several kernels; occupancy is that of one", row.info.name);
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  const Status loaded = load_once(index, row, device);
  if (!loaded.ok()) return loaded;
  result = {0, 0, INT32_MAX};
  for (const void *const function : row.functions) {
    if (function == nullptr) break;
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, function);
    if (error != cudaSuccess) return cuda_status("cudaFuncGetAttributes", error);
    int ctas = 0;
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, function, row.threads,
                                                          static_cast<size_t>(row.info.smem_bytes));
    if (error != cudaSuccess) return cuda_status("cudaOccupancyMaxActiveBlocksPerMultiprocessor", error);
    result = {std::max(result.registers, attributes.numRegs),
              std::max(result.local_bytes, static_cast<int32_t>(attributes.localSizeBytes)),
              std::min(result.ctas_per_sm, ctas)};
  }
  return {};
}

Status configure(uint64_t /*schedule_seed*/, int32_t /*num_threads*/) {
  return make_status(SDPA_NOT_SUPPORTED, "sdpa_host_configure: the CUDA library has no schedule to configure");
}

}  // namespace sdpa::backend
