// The CUDA backend's counters (templates/src/backend_cuda.cpp, counter_pool.hpp) on a CUDA runtime made of plain memory.
//
// The runtime below knows streams, captures, threads' own default stream and what a capture forbids. Its memory begins
// as garbage, and what is queued on a stream that the backend made happens when that stream is waited for. A kernel
// looks at its counters, which must be zero, and counts there what it is told to. Usage: PROGRAM CASE.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backend.hpp"
#include "counter_pool.hpp"

namespace {

using sdpa::CounterPool;

void expect(bool is_fine, const char *what, int line) {
  if (is_fine) return;
  fprintf(stderr, "line %d: %s\n", line, what);
  exit(1);
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)

// ---- a CUDA runtime ----

struct Runtime {
  std::recursive_mutex mutex;
  std::map<cudaStream_t, uint64_t> streams;  // ids
  std::map<uint64_t, uint64_t> captures;     // stream id -> capture id
  std::map<cudaStream_t, std::vector<std::function<void()>>> queued;
  std::set<void *> memory;
  uint64_t last_id = 100;
  size_t chunks = 0, zeroings = 0, free_chunks = 1000;
  int refused = 0;
  bool memset_fails = false;
};
Runtime runtime;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local uint64_t own_default_stream = 0;
thread_local int current_device = 0;

cudaStream_t handle(uintptr_t value) { return reinterpret_cast<cudaStream_t>(value); }

uint64_t id_of(cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  if (stream == handle(2)) return own_default_stream != 0 ? own_default_stream : own_default_stream = ++runtime.last_id;
  if (stream == handle(0) || stream == handle(1)) return 1 + 10 * static_cast<uint64_t>(current_device);
  return runtime.streams.at(stream);
}

void make_stream(uintptr_t value) { runtime.streams[handle(value)] = ++runtime.last_id; }

cudaError_t forbidden_in_captures() {
  if (runtime.captures.empty() || capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  ++runtime.refused;
  return cudaErrorStreamCaptureUnsupported;
}

// ---- a kernel ----

std::vector<uint32_t *> seen;
std::mutex seen_mutex;

sdpa::Status run_kernel(const sdpa_params &params, void * /*stream*/) {
  if (params.num_splits > 1) {
    EXPECT(params.split_arrivals != nullptr);
    EXPECT(std::all_of(params.split_arrivals, params.split_arrivals + SDPA_MAX_SPLIT_TILES,
                       [](uint32_t count) { return count == 0; }));
  }
  const std::lock_guard<std::mutex> lock(seen_mutex);
  seen.push_back(params.split_arrivals);
  return {};
}

sdpa::KernelRow make_row() {
  sdpa::KernelRow row = {};
  row.info.takes = SDPA_TAKES_SPLITS;
  row.launch = run_kernel;
  row.workspace_bytes = [](const sdpa_params &) -> uint64_t { return 512; };
  return row;
}
const sdpa::KernelRow kRow = make_row();

// The counters of a launch.
uint32_t *launch(uintptr_t stream, int device = 0, sdpa_params params = {}) {
  std::vector<char> workspace(512 + CounterPool::kSetBytes, '\x7f');
  params.num_splits = 2;
  params.workspace = workspace.data();
  const sdpa::Status status = sdpa::backend::launch(0, kRow, params, device, handle(stream));
  if (!status.ok()) fprintf(stderr, "%s\n", status.message);
  EXPECT(status.ok());
  for (size_t i = 0; i < 512; ++i) EXPECT(workspace[i] == '\x7f');
  const std::lock_guard<std::mutex> lock(seen_mutex);
  uint32_t *const counters = seen.back();
  return counters == reinterpret_cast<uint32_t *>(workspace.data() + 512) ? nullptr : counters;
}

void capture(uintptr_t stream, uint64_t id) { runtime.captures[id_of(handle(stream))] = id; }
void end_capture(uintptr_t stream) { runtime.captures.erase(id_of(handle(stream))); }

void expect_apart(std::vector<uint32_t *> counters) {
  std::sort(counters.begin(), counters.end());
  for (size_t i = 0; i < counters.size(); ++i) EXPECT(counters[i] != nullptr);
  for (size_t i = 1; i < counters.size(); ++i) EXPECT(counters[i] - counters[i - 1] >= SDPA_MAX_SPLIT_TILES);
}

// ---- the cases ----

void streams() {
  for (uintptr_t stream : {64, 128}) make_stream(stream);
  std::vector<uint32_t *> found;
  for (const int device : {0, 1})
    for (const uintptr_t stream : {0, 64, 128}) found.push_back(launch(stream, device));
  expect_apart(found);
  size_t i = 0;
  for (const int device : {0, 1})
    for (const uintptr_t stream : {0, 64, 128}) EXPECT(launch(stream, device) == found[i++]);
  EXPECT(launch(1) == found[0]);  // the legacy stream's other name
  EXPECT(runtime.chunks == 2);    // one a device
  EXPECT(runtime.zeroings == 2);
}

void prepared() {
  for (int i = 0; i < 3; ++i) EXPECT(sdpa::backend::prepare(0, kRow, 0).ok());
  EXPECT(runtime.chunks == 1);
  sdpa::KernelRow other = kRow;
  other.info.takes = 0;
  EXPECT(sdpa::backend::prepare(0, other, 1).ok());
  EXPECT(runtime.chunks == 1);
  make_stream(64);
  EXPECT(launch(64) != nullptr);
  EXPECT(runtime.chunks == 1);
}

void threads() {
  std::vector<uint32_t *> found(4);
  std::atomic<int> arrived{0};
  std::vector<std::thread> workers;
  std::mutex one_at_a_time;
  for (uint32_t *&counters : found)
    workers.emplace_back([&] {
      {
        const std::lock_guard<std::mutex> lock(one_at_a_time);
        counters = launch(2);
        EXPECT(launch(2) == counters);
      }
      ++arrived;
      while (arrived.load() < 4) std::this_thread::yield();
    });
  for (std::thread &worker : workers) worker.join();
  expect_apart(found);
}

void a_handle_that_comes_back() {
  make_stream(64);
  uint32_t *const first = launch(64);
  make_stream(64);  // destroyed meanwhile
  expect_apart({first, launch(64)});
}

void captures() {
  for (uintptr_t stream : {64, 128}) make_stream(stream);
  uint32_t *const plain = launch(64);
  capture(64, 0);
  capture(128, 0);
  uint32_t *const first = launch(64), *const second = launch(128);
  EXPECT(launch(64) == first);
  end_capture(64);
  end_capture(128);
  EXPECT(launch(64) == plain);
  capture(64, 1);
  uint32_t *const third = launch(64);
  end_capture(64);
  expect_apart({plain, first, second, third});
  EXPECT(runtime.zeroings == 1);
}

void the_first_call_may_be_captured() {
  make_stream(64);
  capture(64, 7);
  EXPECT(launch(64) != nullptr);
  EXPECT(runtime.refused == 0);
  EXPECT(capture_mode == cudaStreamCaptureModeGlobal);
  make_stream(128);
  std::thread([] {  // another thread's capture forbids as much
    EXPECT(launch(128, 1) != nullptr);
    EXPECT(capture_mode == cudaStreamCaptureModeGlobal);
  })
      .join();
  EXPECT(runtime.refused == 0);
  EXPECT(runtime.chunks == 2);
}

void the_pool_grows_and_has_an_end() {
  make_stream(64);
  std::vector<uint32_t *> found{launch(64)};
  const size_t most = CounterPool::kMaxChunks * CounterPool::kSetsPerChunk;
  for (uint64_t id = 1; id < most; ++id) {
    capture(64, id);
    found.push_back(launch(64));
  }
  expect_apart(found);
  EXPECT(runtime.chunks == CounterPool::kMaxChunks);
  EXPECT(runtime.zeroings == CounterPool::kMaxChunks);
  for (size_t i = 0; i < 3; ++i) {
    capture(64, most + 1);
    EXPECT(launch(64) == nullptr);  // zeroed in the workspace, each time
    EXPECT(runtime.zeroings == CounterPool::kMaxChunks + 1 + i);
  }
  EXPECT(runtime.chunks == CounterPool::kMaxChunks);
  capture(64, 5);
  EXPECT(launch(64) == found[5]);
}

void short_of_memory() {
  make_stream(64);
  runtime.free_chunks = 0;
  EXPECT(sdpa::backend::prepare(0, kRow, 0).ok());
  EXPECT(launch(64) == nullptr);
  EXPECT(runtime.zeroings == 1);
  runtime.free_chunks = 1;
  runtime.memset_fails = true;
  EXPECT(sdpa::backend::prepare(0, kRow, 0).ok());
  EXPECT(runtime.memory.empty());  // freed
  runtime.memset_fails = false;
  runtime.free_chunks = 1;
  EXPECT(launch(64) != nullptr);
  EXPECT(runtime.streams.size() == 1);  // those made meanwhile are gone
}

void the_callers_own() {
  std::vector<uint32_t> counters(SDPA_MAX_SPLIT_TILES);
  make_stream(64);
  sdpa_params params = {};
  params.split_arrivals = counters.data();
  EXPECT(launch(64, 0, params) == counters.data());
  EXPECT(runtime.chunks == 0);
  EXPECT(runtime.zeroings == 0);
  params.split_arrivals = nullptr;
  EXPECT(sdpa::backend::launch(0, kRow, params, 0, handle(64)).ok());  // one split needs none
  EXPECT(seen.back() == nullptr);
  EXPECT(runtime.chunks == 0);
}

const std::map<std::string, void (*)()> kCases{
    {"streams", streams},
    {"prepared", prepared},
    {"threads", threads},
    {"a_handle_that_comes_back", a_handle_that_comes_back},
    {"captures", captures},
    {"the_first_call_may_be_captured", the_first_call_may_be_captured},
    {"the_pool_grows_and_has_an_end", the_pool_grows_and_has_an_end},
    {"short_of_memory", short_of_memory},
    {"the_callers_own", the_callers_own},
};

}  // namespace

int main(int count, char **arguments) {
  if (count < 2) {
    for (const auto &entry : kCases) printf("%s\n", entry.first.c_str());
    return 0;
  }
  kCases.at(arguments[1])();
  return 0;
}

// ---- what the backend calls ----

namespace sdpa {

Status make_status(sdpa_status code, const char *format, ...) {
  Status status;
  status.code = code;
  va_list args;
  va_start(args, format);
  vsnprintf(status.message, sizeof(status.message), format, args);
  va_end(args);
  return status;
}

}  // namespace sdpa

extern "C" {

int sdpa_kernel_count(void) { return 1; }

cudaError_t cudaMalloc(void **address, size_t bytes) {
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  if (const cudaError_t error = forbidden_in_captures()) return error;
  EXPECT(bytes == CounterPool::kChunkBytes);
  if (runtime.free_chunks == 0) return cudaErrorMemoryAllocation;
  --runtime.free_chunks;
  ++runtime.chunks;
  *address = malloc(bytes);
  memset(*address, 0xA5, bytes);
  runtime.memory.insert(*address);
  return cudaSuccess;
}

cudaError_t cudaFree(void *address) {
  if (address != nullptr) {
    runtime.memory.erase(address);
    free(address);
  }
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  EXPECT(flags == cudaStreamNonBlocking);  // the legacy stream may be waiting for a capture
  *stream = handle(1u << 20);
  runtime.streams[*stream] = ++runtime.last_id;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  runtime.streams.erase(stream);
  runtime.queued.erase(stream);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *address, int value, size_t bytes, cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  if (runtime.memset_fails) return cudaErrorUnknown;
  ++runtime.zeroings;
  if (stream == handle(1u << 20))
    runtime.queued[stream].push_back([=] { memset(address, value, bytes); });
  else
    memset(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  if (const cudaError_t error = forbidden_in_captures()) return error;
  for (const auto &work : runtime.queued[stream]) work();
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
  *id = id_of(stream);
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **, size_t *) {
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *, const cudaGraphNode_t **, size_t *) {
#endif
  const std::lock_guard<std::recursive_mutex> lock(runtime.mutex);
  const auto found = runtime.captures.find(id_of(stream));
  *status = found == runtime.captures.end() ? cudaStreamCaptureStatusNone : cudaStreamCaptureStatusActive;
  if (found != runtime.captures.end()) *id = found->second;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *) { return cudaErrorUnknown; }
cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char *cudaGetErrorName(cudaError_t) { return "an error"; }
const char *cudaGetErrorString(cudaError_t) { return "of the test"; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, const void *) { return cudaErrorUnknown; }
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaErrorUnknown; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *, const void *, int, size_t) { return cudaErrorUnknown; }

}  // extern "C"
