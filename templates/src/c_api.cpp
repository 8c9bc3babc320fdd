// The C ABI over the registry, the same file for both libraries: finds the row, has its arguments checked (checks.hpp),
// calls it, and keeps the reason of the calling thread's last failure. What the machine does is backend.hpp.
#include "sdpa/c_api.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>

#include <cutlass/version.h>

#include "backend.hpp"
#include "build_config.hpp"
#include "checks.hpp"
#include "plan.hpp"
#include "sdpa/registry.hpp"

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

namespace {

thread_local char last_error[sizeof(Status::message)] = "";

int finish(const Status &status) {
  if (!status.ok()) memcpy(last_error, status.message, sizeof(last_error));
  return status.code;
}

// No exception crosses the C ABI.
template <class Body>
int guarded(const char *function, Body body) {
  try {
    return finish(body());
  } catch (const std::exception &error) {
    return finish(make_status(SDPA_INVALID_ARGUMENT, "%s: %s", function, error.what()));
  } catch (...) {
    return finish(make_status(SDPA_INVALID_ARGUMENT, "%s: unknown C++ exception", function));
  }
}

int kernel_count() {
  int count = 0;
  for (int i = 0; i < kNumRowSpans; ++i) count += kRowSpans[i].count;
  return count;
}

const KernelRow *find_row(int index) {
  if (index < 0) return nullptr;
  for (int i = 0; i < kNumRowSpans; ++i) {
    if (index < kRowSpans[i].count) return &kRowSpans[i].rows[index];
    index -= kRowSpans[i].count;
  }
  return nullptr;
}

Status bad_index(int index) {
  return make_status(SDPA_INVALID_ARGUMENT, "index is %d; this library has kernels 0 to %d", index, kernel_count() - 1);
}

Status check_size(const char *name, uint32_t size, size_t expected) {
  if (size == expected) return {};
  return make_status(SDPA_INVALID_ARGUMENT,
                     "%s.struct_size is %u; this library was built with %zu: caller and library differ in version",
                     name, size, expected);
}

Status other_op(int index, const KernelRow &row, const char *wanted) {
  return make_status(SDPA_INVALID_ARGUMENT, "index is %d: %s has op %d; a kernel for %s is needed", index,
                     row.info.name, row.info.op, wanted);
}

Status find_and_check(int index, const sdpa_params *params, const KernelRow *&row) {
  row = find_row(index);
  if (row == nullptr) return bad_index(index);
  if (row->info.op != SDPA_OP_FORWARD) return other_op(index, *row, "attention");
  if (params == nullptr) return null_argument("params");
  const Status status = check_size("params", params->struct_size, sizeof(sdpa_params));
  return status.ok() ? check_problem(*row, *params) : status;
}

Status find_and_check(int index, const sdpa_merge_params *params, const KernelRow *&row) {
  row = find_row(index);
  if (row == nullptr) return bad_index(index);
  if (row->info.op != SDPA_OP_MERGE) return other_op(index, *row, "merging");
  if (params == nullptr) return null_argument("params");
  const Status status = check_size("params", params->struct_size, sizeof(sdpa_merge_params));
  return status.ok() ? row->check_merge(*params) : status;
}

Status find_and_check(int index, const sdpa_bwd_params *params, const KernelRow *&row) {
  row = find_row(index);
  if (row == nullptr) return bad_index(index);
  if (row->info.op != SDPA_OP_BACKWARD) return other_op(index, *row, "gradients");
  if (params == nullptr) return null_argument("params");
  Status status = check_size("params", params->struct_size, sizeof(sdpa_bwd_params));
  if (status.ok()) status = check_size("params.forward", params->forward.struct_size, sizeof(sdpa_params));
  return status.ok() ? check_backward(*row, *params) : status;
}

Status check_device(int device) {
  if (device >= 0) return {};
  return make_status(SDPA_INVALID_ARGUMENT, "device is %d; it must be a device ordinal, 0 or more", device);
}

// Whatever went wrong while it ran: say for which kernel and problem.
Status with_problem(Status status, const KernelRow &row, const sdpa_params &params) {
  const Status plain = status;
  return make_status(plain.code, "%.480s [%s: batch %d, num_heads_q %d, num_heads_kv %d, seqlen_q %d, seqlen_k %d]",
                     plain.message, row.info.name, params.batch, params.num_heads_q, params.num_heads_kv,
                     params.seqlen_q, params.seqlen_k);
}

}  // namespace
}  // namespace sdpa

using sdpa::KernelRow;
using sdpa::Status;

extern "C" {

const char *sdpa_last_error(void) { return sdpa::last_error; }

int sdpa_build_info_get(sdpa_build_info *info) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (info == nullptr) return sdpa::null_argument("info");
    const Status status = sdpa::check_size("info", info->struct_size, sizeof(sdpa_build_info));
    if (!status.ok()) return status;
    info->abi_version = SDPA_ABI_VERSION;
    info->target = sdpa::backend::kTarget;
    info->cuda_runtime_version = sdpa::backend::cuda_runtime_version();
    info->params_size = sizeof(sdpa_params);
    info->cutlass_version = CUTLASS_VERSION;
    info->version = SDPA_BUILD_VERSION;
    info->digest = sdpa::kGeneratorDigest;
    info->space = sdpa::kSpaceName;
    info->archs = SDPA_BUILD_ARCHS;
    info->sanitizers = SDPA_BUILD_SANITIZERS;
    return {};
  });
}

int sdpa_kernel_count(void) { return sdpa::kernel_count(); }

int sdpa_kernel_info_get(int index, sdpa_kernel_info *info) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = sdpa::find_row(index);
    if (row == nullptr) return sdpa::bad_index(index);
    if (info == nullptr) return sdpa::null_argument("info");
    const Status status = sdpa::check_size("info", info->struct_size, sizeof(sdpa_kernel_info));
    if (!status.ok()) return status;
    *info = row->info;
    info->struct_size = sizeof(sdpa_kernel_info);
    return {};
  });
}

int sdpa_can_implement(int index, const sdpa_params *params) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = nullptr;
    return sdpa::find_and_check(index, params, row);
  });
}

int sdpa_workspace_bytes(int index, const sdpa_params *params, uint64_t *bytes) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (bytes == nullptr) return sdpa::null_argument("bytes");
    const KernelRow *row = nullptr;
    const Status status = sdpa::find_and_check(index, params, row);
    if (!status.ok()) return status;
    *bytes = sdpa::workspace_bytes(*row, *params);
    return {};
  });
}

int sdpa_launch(int index, const sdpa_params *params, int device, void *stream) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = nullptr;
    Status status = sdpa::find_and_check(index, params, row);
    if (status.ok()) status = sdpa::check_pointers(*row, *params);
    if (status.ok()) status = sdpa::check_device(device);
    if (!status.ok()) return status;
    status = sdpa::backend::launch(index, *row, *params, device, stream);
    return status.ok() ? status : sdpa::with_problem(status, *row, *params);
  });
}

int sdpa_plan_make(int index, const sdpa_params *params, int device, sdpa_plan **plan, uint64_t *workspace_bytes) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (plan == nullptr) return sdpa::null_argument("plan");
    *plan = nullptr;
    if (workspace_bytes == nullptr) return sdpa::null_argument("workspace_bytes");
    const KernelRow *row = nullptr;
    Status status = sdpa::find_and_check(index, params, row);
    if (status.ok()) status = sdpa::check_device(device);
    if (status.ok()) status = sdpa::backend::prepare(index, *row, device);
    if (!status.ok()) return status;
    *workspace_bytes = sdpa::workspace_bytes(*row, *params);
    *plan = new sdpa_plan{index, row, device, *params, *workspace_bytes, sdpa::given_options(*params)};
    return status;
  });
}

int sdpa_plan_launch(const sdpa_plan *plan, const sdpa_addresses *addresses, void *stream) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (plan == nullptr) return sdpa::null_argument("plan");
    if (addresses == nullptr) return sdpa::null_argument("addresses");
    Status status = sdpa::check_size("addresses", addresses->struct_size, sizeof(sdpa_addresses));
    if (!status.ok()) return status;
    const sdpa_params params = sdpa::with_addresses(plan->params, *addresses);
    if (!sdpa::are_fine(*plan, *addresses)) status = sdpa::check_addresses(*plan, params);
    if (!status.ok()) return status;
    status = sdpa::backend::launch(plan->index, *plan->row, params, plan->device, stream);
    return status.ok() ? status : sdpa::with_problem(status, *plan->row, params);
  });
}

void sdpa_plan_free(sdpa_plan *plan) { delete plan; }

int sdpa_kernel_occupancy(int index, int device, int32_t *registers, int32_t *local_bytes, int32_t *ctas_per_sm) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = sdpa::find_row(index);
    if (row == nullptr) return sdpa::bad_index(index);
    if (registers == nullptr) return sdpa::null_argument("registers");
    if (local_bytes == nullptr) return sdpa::null_argument("local_bytes");
    if (ctas_per_sm == nullptr) return sdpa::null_argument("ctas_per_sm");
    Status status = sdpa::check_device(device);
    sdpa::backend::Occupancy result{};
    if (status.ok()) status = sdpa::backend::occupancy(index, *row, device, result);
    if (!status.ok()) return status;
    *registers = result.registers;
    *local_bytes = result.local_bytes;
    *ctas_per_sm = result.ctas_per_sm;
    return {};
  });
}

int sdpa_prepare(int index, int device) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = sdpa::find_row(index);
    if (row == nullptr) return sdpa::bad_index(index);
    const Status status = sdpa::check_device(device);
    return status.ok() ? sdpa::backend::prepare(index, *row, device) : status;
  });
}

int sdpa_host_configure(uint64_t schedule_seed, int32_t num_threads) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (num_threads < 0)
      return sdpa::make_status(SDPA_INVALID_ARGUMENT, "num_threads is %d; it must be 0 (all cores) or more",
                               num_threads);
    return sdpa::backend::configure(schedule_seed, num_threads);
  });
}

int sdpa_merge_states(int index, const sdpa_merge_params *params, int device, void *stream) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = nullptr;
    Status status = sdpa::find_and_check(index, params, row);
    if (status.ok()) status = sdpa::check_device(device);
    return status.ok() ? sdpa::backend::merge(index, *row, *params, device, stream) : status;
  });
}

int sdpa_bwd_can_implement(int index, const sdpa_bwd_params *params) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = nullptr;
    return sdpa::find_and_check(index, params, row);
  });
}

int sdpa_bwd_workspace_bytes(int index, const sdpa_bwd_params *params, uint64_t *bytes) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (bytes == nullptr) return sdpa::null_argument("bytes");
    const KernelRow *row = nullptr;
    const Status status = sdpa::find_and_check(index, params, row);
    if (!status.ok()) return status;
    *bytes = row->backward_workspace_bytes(*params);
    return {};
  });
}

int sdpa_bwd_launch(int index, const sdpa_bwd_params *params, int device, void *stream) {
  return sdpa::guarded(__func__, [&]() -> Status {
    const KernelRow *row = nullptr;
    Status status = sdpa::find_and_check(index, params, row);
    if (status.ok()) status = sdpa::check_backward_pointers(*row, *params);
    if (status.ok()) status = sdpa::check_device(device);
    if (!status.ok()) return status;
    status = sdpa::backend::backward(index, *row, *params, device, stream);
    return status.ok() ? status : sdpa::with_problem(status, *row, params->forward);
  });
}

}  // extern "C"
