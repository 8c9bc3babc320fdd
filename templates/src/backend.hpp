// What the C ABI needs from the machine: run a row, load it, ask about it. backend_cuda.cpp answers with the CUDA
// runtime, backend_host.cpp with the fiber engine; each library links exactly one of the two.
// Arguments arrive checked by c_api.cpp; `index` is the row's in the whole registry. Nothing here knows how a kernel
// works.
#pragma once

#include <cstdint>

#include "sdpa/registry.hpp"

namespace sdpa::backend {

extern const sdpa_target kTarget;

// As CUDART_VERSION; 0 on the host.
int cuda_runtime_version();

// Makes `device` current, runs the row on `stream`, and makes the caller's device current again. Split kernels whose
// caller brings no counters get some that nothing else uses meanwhile; whatever happens, all are zero afterwards.
Status launch(int index, const KernelRow &row, const sdpa_params &params, int device, void *stream);

// The same for a row that merges.
Status merge(int index, const KernelRow &row, const sdpa_merge_params &params, int device, void *stream);

// The same for a row that computes gradients.
Status backward(int index, const KernelRow &row, const sdpa_bwd_params &params, int device, void *stream);

// Loads the row's functions on `device` and sets what has to be set before its first launch.
Status prepare(int index, const KernelRow &row, int device);

// Room for counters at the end of a split kernel's workspace. They are zero only when the launch makes them so.
inline uint32_t *counters_in_workspace(const KernelRow &row, const sdpa_params &params) {
  return reinterpret_cast<uint32_t *>(static_cast<char *>(params.workspace) + row.workspace_bytes(params));
}

struct Occupancy {
  int32_t registers;
  int32_t local_bytes;
  int32_t ctas_per_sm;
};
Status occupancy(int index, const KernelRow &row, int device, Occupancy &result);

// Schedule seed and OS threads of the fiber engine.
Status configure(uint64_t schedule_seed, int32_t num_threads);

}  // namespace sdpa::backend
