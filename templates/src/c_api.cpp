// The C ABI over the registry, the same file for both libraries: checks arguments, finds the row, calls it, and keeps
// the reason of the calling thread's last failure. Every message names the argument, its value and what is allowed.
// What a problem must look like for one kernel is that row's can_implement; what the machine does is backend.hpp.
#include "sdpa/c_api.h"

#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <exception>

#include <cutlass/version.h>

#include "backend.hpp"
#include "build_config.hpp"
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

constexpr uintptr_t kWorkspaceAlignment = 256;
constexpr size_t kMaskBytes[] = {1, 1, 2, 2, 4};  // by sdpa_mask_type

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

Status null_argument(const char *name) {
  return make_status(SDPA_INVALID_ARGUMENT, "%s is null; a valid pointer is needed", name);
}

Status check_size(const char *name, uint32_t size, size_t expected) {
  if (size == expected) return {};
  return make_status(SDPA_INVALID_ARGUMENT,
                     "%s.struct_size is %u; this library was built with %zu: caller and library differ in version",
                     name, size, expected);
}

Status check_positive(const char *name, int32_t value) {
  if (value >= 1) return {};
  return make_status(SDPA_INVALID_ARGUMENT, "%s is %d; it must be at least 1", name, value);
}

const char *dtype_name(int32_t dtype) {
  return dtype == SDPA_DTYPE_F16 ? "float16" : dtype == SDPA_DTYPE_BF16 ? "bfloat16" : "unknown";
}

// Legal for any kernel: sizes, flags and numbers that make sense by themselves.
Status check_values(const sdpa_params &params) {
  if (params.dtype != SDPA_DTYPE_F16 && params.dtype != SDPA_DTYPE_BF16)
    return make_status(SDPA_INVALID_ARGUMENT, "dtype is %d; allowed are %d (float16) and %d (bfloat16)", params.dtype,
                       SDPA_DTYPE_F16, SDPA_DTYPE_BF16);
  const struct {
    const char *name;
    int32_t value;
  } sizes[] = {
      {"batch", params.batch},          {"num_heads_q", params.num_heads_q}, {"num_heads_kv", params.num_heads_kv},
      {"seqlen_q", params.seqlen_q},    {"seqlen_k", params.seqlen_k},       {"head_dim", params.head_dim},
      {"head_dim_v", params.head_dim_v}};
  for (const auto &size : sizes) {
    const Status status = check_positive(size.name, size.value);
    if (!status.ok()) return status;
  }
  if (params.num_heads_q % params.num_heads_kv != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "num_heads_q is %d; it must be a multiple of num_heads_kv, which is %d",
                       params.num_heads_q, params.num_heads_kv);
  if (params.is_causal != 0 && params.is_causal != 1)
    return make_status(SDPA_INVALID_ARGUMENT, "is_causal is %d; it must be 0 or 1", params.is_causal);
  if (!std::isfinite(params.softmax_scale))
    return make_status(SDPA_INVALID_ARGUMENT, "softmax_scale is %g; it must be finite",
                       static_cast<double>(params.softmax_scale));
  if (!(params.p_dropout >= 0.0f && params.p_dropout < 1.0f))
    return make_status(SDPA_INVALID_ARGUMENT, "p_dropout is %g; it must be at least 0 and less than 1",
                       static_cast<double>(params.p_dropout));
  return {};
}

Status check_element_alignment(const char *name, const void *pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return {};
  return make_status(SDPA_INVALID_ARGUMENT, "%s is %p; it must be a multiple of %zu", name, pointer, bytes);
}

// What is optional must be there whole or not at all.
Status check_options(const sdpa_params &params) {
  if (params.mask_type < SDPA_MASK_NONE || params.mask_type > SDPA_MASK_F32)
    return make_status(SDPA_INVALID_ARGUMENT, "mask_type is %d; allowed are %d to %d", params.mask_type, SDPA_MASK_NONE,
                       SDPA_MASK_F32);
  if ((params.mask == nullptr) != (params.mask_type == SDPA_MASK_NONE))
    return make_status(SDPA_INVALID_ARGUMENT, "mask is %p and mask_type %d; allowed are null with %d, or neither",
                       params.mask, params.mask_type, SDPA_MASK_NONE);
  if (params.causal_bottom_right != 0 && !(params.causal_bottom_right == 1 && params.is_causal == 1))
    return make_status(SDPA_INVALID_ARGUMENT, "causal_bottom_right is %d; it must be 0, or 1 with is_causal 1",
                       params.causal_bottom_right);
  if (params.total_q < 0 || params.total_k < 0)
    return make_status(SDPA_INVALID_ARGUMENT, "total_q is %d and total_k %d; they must be at least 0", params.total_q,
                       params.total_k);
  const struct {
    const char *name;
    const void *pointer;
    size_t bytes;
  } arrays[] = {
      {"mask", params.mask, kMaskBytes[params.mask_type]},    {"philox_state", params.philox_state, sizeof(uint64_t)},
      {"seqlens_q", params.seqlens_q, sizeof(int32_t)},       {"seqlens_k", params.seqlens_k, sizeof(int32_t)},
      {"cu_seqlens_q", params.cu_seqlens_q, sizeof(int32_t)}, {"cu_seqlens_k", params.cu_seqlens_k, sizeof(int32_t)}};
  for (const auto &array : arrays) {
    const Status status = check_element_alignment(array.name, array.pointer, array.bytes);
    if (!status.ok()) return status;
  }
  return {};
}

// What the problem needs of a kernel, of sdpa_takes.
uint64_t needs(const sdpa_params &params, const sdpa_kernel_info &info) {
  constexpr uint64_t kMasks[] = {0, SDPA_TAKES_BOOL, SDPA_TAKES_BIAS16, SDPA_TAKES_BIAS16, SDPA_TAKES_BIAS32};
  uint64_t bits = kMasks[params.mask_type];
  bits |= params.is_causal ? SDPA_TAKES_CAUSAL : SDPA_TAKES_FULL;
  bits |= params.p_dropout > 0.0f ? SDPA_TAKES_DROPOUT : SDPA_TAKES_UNDROPPED;
  if (params.seqlens_q != nullptr || params.seqlens_k != nullptr || params.causal_bottom_right != 0)
    bits |= SDPA_TAKES_LENGTHS;
  if (params.cu_seqlens_q != nullptr || params.cu_seqlens_k != nullptr) bits |= SDPA_TAKES_PACKED;
  if (params.head_dim != info.head_dim || params.head_dim_v != info.head_dim) bits |= SDPA_TAKES_SMALLER_HEAD_DIM;
  if (params.num_splits != 0) bits |= SDPA_TAKES_SPLITS;
  return bits;
}

// Why a kernel that lacks `bit` cannot run the problem, which needs it.
Status lacks(uint64_t bit, const sdpa_kernel_info &info, const sdpa_params &params) {
  switch (bit) {
    case SDPA_TAKES_FULL:
    case SDPA_TAKES_CAUSAL:
      return make_status(SDPA_NOT_SUPPORTED, "%s: is_causal is %d; this kernel takes %d", info.name, params.is_causal,
                         params.is_causal ? 0 : 1);
    case SDPA_TAKES_BIAS16:
    case SDPA_TAKES_BIAS32:
      if (info.takes & SDPA_TAKES_BOOL)
        return make_status(SDPA_NOT_SUPPORTED, "%s: mask is a bias; this kernel takes boolean masks", info.name);
      [[fallthrough]];
    case SDPA_TAKES_BOOL:
      return make_status(SDPA_NOT_SUPPORTED, "%s: mask is given; this kernel takes none", info.name);
    case SDPA_TAKES_LENGTHS:
      return make_status(SDPA_NOT_SUPPORTED, "%s: %s is given; this kernel takes no lengths", info.name,
                         params.seqlens_q   ? "seqlens_q"
                         : params.seqlens_k ? "seqlens_k"
                                            : "causal_bottom_right");
    case SDPA_TAKES_PACKED:
      return make_status(SDPA_NOT_SUPPORTED, "%s: %s is given; this kernel takes no packed sequences", info.name,
                         params.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k");
    case SDPA_TAKES_UNDROPPED:
    case SDPA_TAKES_DROPOUT:
      return make_status(SDPA_NOT_SUPPORTED, "%s: p_dropout is %g; this kernel takes %s", info.name,
                         static_cast<double>(params.p_dropout), params.p_dropout > 0.0f ? "0 only" : "more than 0");
    case SDPA_TAKES_SMALLER_HEAD_DIM:
      return make_status(SDPA_NOT_SUPPORTED, "%s: head_dim is %d and head_dim_v %d; this kernel takes %d for both",
                         info.name, params.head_dim, params.head_dim_v, info.head_dim);
    default:
      return make_status(SDPA_INVALID_ARGUMENT, "%s: num_splits is %d; this kernel takes 0", info.name,
                         params.num_splits);
  }
}

// What this row was compiled for.
Status check_row(const sdpa_kernel_info &info, const sdpa_params &params) {
  if (params.dtype != info.dtype)
    return make_status(SDPA_NOT_SUPPORTED, "%s: dtype is %s; this kernel takes %s", info.name, dtype_name(params.dtype),
                       dtype_name(info.dtype));
  const uint64_t missing = needs(params, info) & ~info.takes;
  if (missing != 0) return lacks(missing & -missing, info, params);
  for (const int head_dim : {params.head_dim, params.head_dim_v})
    if (head_dim > info.head_dim || head_dim % 8 != 0)
      return make_status(SDPA_NOT_SUPPORTED,
                         "%s: head_dim is %d and head_dim_v %d; this kernel takes multiples of 8 up to %d", info.name,
                         params.head_dim, params.head_dim_v, info.head_dim);
  return {};
}

Status check_problem(const KernelRow &row, const sdpa_params &params) {
  Status status = check_values(params);
  if (status.ok()) status = check_options(params);
  if (status.ok()) status = check_row(row.info, params);
  if (status.ok()) status = row.can_implement(params);
  return status;
}

// The row's own, and room for counters behind it.
uint64_t workspace_bytes(const KernelRow &row, const sdpa_params &params) {
  const uint64_t counters = params.num_splits > 1 ? SDPA_MAX_SPLIT_TILES * sizeof(uint32_t) : 0;
  return row.workspace_bytes(params) + counters;
}

// Pointers matter only once something runs.
Status check_pointers(const KernelRow &row, const sdpa_params &params) {
  const struct {
    const char *name;
    const void *pointer;
  } tensors[] = {{"q", params.q}, {"k", params.k}, {"v", params.v}, {"out", params.out}};
  for (const auto &tensor : tensors)
    if (tensor.pointer == nullptr) return null_argument(tensor.name);
  const Status status = check_element_alignment("softmax_lse", params.softmax_lse, sizeof(float));
  if (!status.ok()) return status;
  if (params.num_splits > 1) {
    const Status aligned = check_element_alignment("split_arrivals", params.split_arrivals, sizeof(uint32_t));
    if (!aligned.ok()) return aligned;
  }
  const uint64_t needed = workspace_bytes(row, params);
  if (needed == 0) return {};
  if (params.workspace == nullptr || params.workspace_bytes < needed)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: workspace is %p with %" PRIu64 " bytes; this problem needs %" PRIu64,
                       row.info.name, params.workspace, params.workspace == nullptr ? 0 : params.workspace_bytes,
                       needed);
  if (reinterpret_cast<uintptr_t>(params.workspace) % kWorkspaceAlignment != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "workspace is %p; it must be a multiple of %zu", params.workspace,
                       static_cast<size_t>(kWorkspaceAlignment));
  return {};
}

Status find_and_check(int index, const sdpa_params *params, const KernelRow *&row) {
  row = find_row(index);
  if (row == nullptr) return bad_index(index);
  if (params == nullptr) return null_argument("params");
  const Status status = check_size("params", params->struct_size, sizeof(sdpa_params));
  return status.ok() ? check_problem(*row, *params) : status;
}

Status check_device(int device) {
  if (device >= 0) return {};
  return make_status(SDPA_INVALID_ARGUMENT, "device is %d; it must be a device ordinal, 0 or more", device);
}

sdpa_params with_addresses(sdpa_params params, const sdpa_addresses &addresses) {
  params.q = addresses.q;
  params.k = addresses.k;
  params.v = addresses.v;
  params.out = addresses.out;
  params.softmax_lse = addresses.softmax_lse;
  params.workspace = addresses.workspace;
  params.workspace_bytes = addresses.workspace_bytes;
  params.split_arrivals = addresses.split_arrivals;
  params.mask = addresses.mask;
  params.philox_seed = addresses.philox_seed;
  params.philox_offset = addresses.philox_offset;
  params.philox_state = addresses.philox_state;
  params.seqlens_q = addresses.seqlens_q;
  params.seqlens_k = addresses.seqlens_k;
  params.cu_seqlens_q = addresses.cu_seqlens_q;
  params.cu_seqlens_k = addresses.cu_seqlens_k;
  return params;
}

// Whatever went wrong while it ran: say for which kernel and problem.
Status with_problem(Status status, const KernelRow &row, const sdpa_params &params) {
  const Status plain = status;
  return make_status(plain.code, "%.480s [%s: batch %d, num_heads_q %d, num_heads_kv %d, seqlen_q %d, seqlen_k %d]",
                     plain.message, row.info.name, params.batch, params.num_heads_q, params.num_heads_kv,
                     params.seqlen_q, params.seqlen_k);
}

// What is optional and given: a bit each.
template <class Fields>
uint32_t given_options(const Fields &fields) {
  uint32_t bits = 0;
  for (const void *const pointer :
       {static_cast<const void *>(fields.softmax_lse), fields.mask, static_cast<const void *>(fields.seqlens_q),
        static_cast<const void *>(fields.seqlens_k), static_cast<const void *>(fields.cu_seqlens_q),
        static_cast<const void *>(fields.cu_seqlens_k)})
    bits = bits << 1 | (pointer != nullptr);
  return bits;
}

}  // namespace
}  // namespace sdpa

struct sdpa_plan {
  int index;
  const sdpa::KernelRow *row;
  int device;
  sdpa_params params;  // its addresses are those of no launch
  uint64_t workspace_bytes;
  uint32_t given;  // given_options
};

namespace sdpa {
namespace {

// Whether nothing is wrong with the addresses: one look at all of them. check_addresses says what is.
bool are_fine(const sdpa_plan &plan, const sdpa_addresses &given) {
  const auto bits = [](auto... pointers) { return (reinterpret_cast<uintptr_t>(pointers) | ...); };
  const bool is_there = given.q != nullptr && given.k != nullptr && given.v != nullptr && given.out != nullptr;
  const uintptr_t tensors = bits(given.q, given.k, given.v, given.out) % 16;
  const uintptr_t words = bits(given.softmax_lse, given.split_arrivals, given.seqlens_q, given.seqlens_k,
                               given.cu_seqlens_q, given.cu_seqlens_k) %
                          4;
  const uintptr_t others = bits(given.philox_state) % 8 | bits(given.mask) % kMaskBytes[plan.params.mask_type];
  const bool has_room =
      plan.workspace_bytes == 0 || (given.workspace != nullptr && given.workspace_bytes >= plan.workspace_bytes &&
                                    bits(given.workspace) % kWorkspaceAlignment == 0);
  return is_there && has_room && (tensors | words | others) == 0 && given_options(given) == plan.given;
}

Status check_addresses(const sdpa_plan &plan, const sdpa_params &params) {
  Status status = check_problem(*plan.row, params);
  if (status.ok()) status = check_pointers(*plan.row, params);
  if (!status.ok() || given_options(params) == plan.given) return status;
  return make_status(SDPA_INVALID_ARGUMENT,
                     "addresses: softmax_lse, mask, seqlens and cu_seqlens must be null exactly where they were when "
                     "the plan was made");
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

int sdpa_plan_make(int index, const sdpa_params *params, int device, sdpa_plan **plan) {
  return sdpa::guarded(__func__, [&]() -> Status {
    if (plan == nullptr) return sdpa::null_argument("plan");
    *plan = nullptr;
    const KernelRow *row = nullptr;
    Status status = sdpa::find_and_check(index, params, row);
    if (status.ok()) status = sdpa::check_device(device);
    if (status.ok()) status = sdpa::backend::prepare(index, *row, device);
    if (!status.ok()) return status;
    const uint64_t bytes = sdpa::workspace_bytes(*row, *params);
    *plan = new sdpa_plan{index, row, device, *params, bytes, sdpa::given_options(*params)};
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

}  // extern "C"
