// The backend of libsdpa_cutlass_host: rows run on the fiber engine, on the calling thread's time, and are done when
// launch returns. There is no device to choose, to load onto, or to ask for registers.
#include "backend.hpp"

#include <cstring>

#include "sdpa/arch/simt/launch.hpp"

namespace sdpa::backend {

const sdpa_target kTarget = SDPA_BUILT_FOR_HOST;

int cuda_runtime_version() { return 0; }

// A launch that fails midway leaves counts behind. Counters in the workspace end with the launch, and the caller's are
// put back to zero.
Status launch(int /*index*/, const KernelRow &row, const sdpa_params &params, int /*device*/, void *stream) {
  constexpr size_t kBytes = SDPA_MAX_SPLIT_TILES * sizeof(uint32_t);
  if (params.num_splits <= 1) return row.launch(params, stream);
  sdpa_params complete = params;
  if (params.split_arrivals == nullptr) {
    complete.split_arrivals = counters_in_workspace(row, params);
    memset(complete.split_arrivals, 0, kBytes);
  }
  const Status status = row.launch(complete, stream);
  if (!status.ok()) memset(complete.split_arrivals, 0, kBytes);
  return status;
}

Status merge(int /*index*/, const KernelRow &row, const sdpa_merge_params &params, int /*device*/, void *stream) {
  return row.merge(params, stream);
}

Status backward(int /*index*/, const KernelRow &row, const sdpa_bwd_params &params, int /*device*/, void *stream) {
  return row.backward(params, stream);
}

Status prepare(int /*index*/, const KernelRow & /*row*/, int /*device*/) { return {}; }

Status occupancy(int /*index*/, const KernelRow &row, int /*device*/, Occupancy & /*result*/) {
  return make_status(SDPA_NOT_SUPPORTED, "%s: the host library has no registers or SMs to report", row.info.name);
}

Status configure(uint64_t schedule_seed, int32_t num_threads) {
  simt::configure(schedule_seed, num_threads);
  return {};
}

}  // namespace sdpa::backend
