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

#include "counter_pool.hpp"

namespace sdpa::backend {
namespace {

const char *hint(cudaError_t error) {
  switch (error) {
    case cudaErrorInsufficientDriver:
      return "; update the NVIDIA driver: this library was built with a newer CUDA than it serves";
    case cudaErrorNoDevice: return "; no NVIDIA GPU is visible: check nvidia-smi and CUDA_VISIBLE_DEVICES";
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "; the library holds no code for this GPU and driver: rebuild with -DSDPA_CUDA_ARCHS=<its architecture>";
    default: return "";
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

constexpr int kMaxDevices = 64;

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
  const uint64_t bit = device < kMaxDevices ? uint64_t{1} << device : 0;
  std::atomic<uint64_t> &devices = loaded_on[static_cast<size_t>(index)];
  if ((devices.load(std::memory_order_acquire) & bit) != 0) return {};
  const Status status = load(row);
  if (status.ok()) devices.fetch_or(bit, std::memory_order_release);
  return status;
}

// Allows the calling thread what a capture by any thread would forbid, such as cudaMalloc.
class RelaxedCapture {
 public:
  RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture &) = delete;
  RelaxedCapture &operator=(const RelaxedCapture &) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // then the one to go back to
};

// A chunk of the current device's counter pool. Its zeros are written on a stream that no capture knows, and are there
// when this returns.
uint32_t *make_counters() {
  const RelaxedCapture relaxed;
  void *chunk = nullptr;
  cudaStream_t stream = nullptr;
  const bool is_made = cudaMalloc(&chunk, CounterPool::kChunkBytes) == cudaSuccess &&
                       cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                       cudaMemsetAsync(chunk, 0, CounterPool::kChunkBytes, stream) == cudaSuccess &&
                       cudaStreamSynchronize(stream) == cudaSuccess;
  if (!is_made) (void)cudaGetLastError();
  if (stream != nullptr) (void)cudaStreamDestroy(stream);
  if (!is_made && chunk != nullptr) (void)cudaFree(chunk);
  return is_made ? static_cast<uint32_t *>(chunk) : nullptr;
}

// Null for devices that have none: more than any machine has.
CounterPool *counter_pool(int device) {
  static CounterPool *const pools = new CounterPool[kMaxDevices];  // threads may launch until the process ends
  return device < kMaxDevices ? &pools[device] : nullptr;
}

// Sets split_arrivals: to the stream's own counters, which are zero, else to those in the workspace, zeroed in stream
// order (in a capture, by the graph).
Status add_counters(const KernelRow &row, sdpa_params &params, int device, cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  unsigned long long capture_id = 0, stream_id = 0;
  cudaError_t error = cudaStreamGetCaptureInfo(stream, &capture, &capture_id);
  if (error != cudaSuccess) return cuda_status("cudaStreamGetCaptureInfo", error);
  const bool is_captured = capture == cudaStreamCaptureStatusActive;
  if (is_captured) {
    stream_id = reinterpret_cast<uintptr_t>(stream);  // one handle is one stream as long as a capture goes on
  } else {
    const RelaxedCapture relaxed;
    error = cudaStreamGetId(stream, &stream_id);  // handles come back, and one stands for a stream of every thread
    if (error != cudaSuccess) return cuda_status("cudaStreamGetId", error);
  }
  const CounterUser user(stream_id, is_captured ? capture_id + 1 : 0);
  CounterPool *const pool = counter_pool(device);
  if (pool != nullptr) params.split_arrivals = pool->find(user, make_counters);
  if (params.split_arrivals != nullptr) return {};
  params.split_arrivals = counters_in_workspace(row, params);
  error = cudaMemsetAsync(params.split_arrivals, 0, CounterPool::kSetBytes, stream);
  return error == cudaSuccess ? Status{} : cuda_status("cudaMemsetAsync", error);
}

Status run(const KernelRow &row, const sdpa_params &params, int device, void *stream) {
  if (params.num_splits <= 1 || params.split_arrivals != nullptr) return row.launch(params, stream);
  sdpa_params complete = params;
  const Status status = add_counters(row, complete, device, static_cast<cudaStream_t>(stream));
  return status.ok() ? row.launch(complete, stream) : status;
}

// Calls `launch` with `device` current and the row loaded, and tells its failures from those of earlier work.
template <class Launch>
Status launch_on(int index, const KernelRow &row, int device, void *stream, Launch launch) {
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  const bool blocks = launch_blocks(stream);
  cudaError_t before = cudaPeekAtLastError();
  if (before == cudaSuccess && blocks) before = cudaFree(nullptr);  // tells of a context that is already broken
  if (before != cudaSuccess) return earlier_fault(before);
  Status status = load_once(index, row, device);
  if (status.ok()) status = launch();
  if (status.code == SDPA_CUDA_ERROR && !blocks) {
    // A launch is asynchronous: a context that is already broken was broken by earlier work.
    const cudaError_t sticky = cudaFree(nullptr);
    if (sticky != cudaSuccess) return earlier_fault(sticky);
  }
  return status;
}

}  // namespace

const sdpa_target kTarget = SDPA_BUILT_FOR_CUDA;

int cuda_runtime_version() { return CUDART_VERSION; }

Status launch(int index, const KernelRow &row, const sdpa_params &params, int device, void *stream) {
  return launch_on(index, row, device, stream, [&] { return run(row, params, device, stream); });
}

Status merge(int index, const KernelRow &row, const sdpa_merge_params &params, int device, void *stream) {
  return launch_on(index, row, device, stream, [&] { return row.merge(params, stream); });
}

Status backward(int index, const KernelRow &row, const sdpa_bwd_params &params, int device, void *stream) {
  return launch_on(index, row, device, stream, [&] { return row.backward(params, stream); });
}

Status prepare(int index, const KernelRow &row, int device) {
  const DeviceGuard guard(device);
  if (!guard.status().ok()) return guard.status();
  CounterPool *const pool = (row.info.takes & SDPA_TAKES_SPLITS) != 0 ? counter_pool(device) : nullptr;
  if (pool != nullptr) pool->reserve(make_counters);
  return load_once(index, row, device);
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
