// What a problem has to be for a row: see checks.hpp.
#include "checks.hpp"

#include <cinttypes>
#include <cmath>
#include <initializer_list>

namespace sdpa {

Status null_argument(const char *name) {
  return make_status(SDPA_INVALID_ARGUMENT, "%s is null; a valid pointer is needed", name);
}

namespace {

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
  if (params.has_window != 0 && params.has_window != 1)
    return make_status(SDPA_INVALID_ARGUMENT, "has_window is %d; it must be 0 or 1", params.has_window);
  if (params.has_window && (params.window_left < -1 || params.window_right < -1))
    return make_status(SDPA_INVALID_ARGUMENT,
                       "window_left is %d and window_right %d; they must be at least 0, or -1 for no limit",
                       params.window_left, params.window_right);
  if (params.causal_bottom_right != 0 &&
      !(params.causal_bottom_right == 1 && (params.is_causal == 1 || params.has_window == 1)))
    return make_status(SDPA_INVALID_ARGUMENT,
                       "causal_bottom_right is %d; it must be 0, or 1 with is_causal 1 or has_window 1",
                       params.causal_bottom_right);
  if (params.sinks_type < SDPA_MASK_NONE || params.sinks_type > SDPA_MASK_F32 || params.sinks_type == SDPA_MASK_BOOL)
    return make_status(SDPA_INVALID_ARGUMENT, "sinks_type is %d; allowed are %d, and %d to %d", params.sinks_type,
                       SDPA_MASK_NONE, SDPA_MASK_F16, SDPA_MASK_F32);
  if ((params.sinks == nullptr) != (params.sinks_type == SDPA_MASK_NONE))
    return make_status(SDPA_INVALID_ARGUMENT, "sinks is %p and sinks_type %d; allowed are null with %d, or neither",
                       params.sinks, params.sinks_type, SDPA_MASK_NONE);
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
      {"cu_seqlens_q", params.cu_seqlens_q, sizeof(int32_t)}, {"cu_seqlens_k", params.cu_seqlens_k, sizeof(int32_t)},
      {"sinks", params.sinks, kMaskBytes[params.sinks_type]}};
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
  if (params.has_window) bits |= SDPA_TAKES_WINDOW;
  if (params.sinks != nullptr) bits |= SDPA_TAKES_SINKS;
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
    case SDPA_TAKES_WINDOW:
      return make_status(SDPA_NOT_SUPPORTED, "%s: window is (%d, %d); this kernel takes none", info.name,
                         params.window_left, params.window_right);
    case SDPA_TAKES_SINKS:
      return make_status(SDPA_NOT_SUPPORTED, "%s: sinks is given; this kernel takes none", info.name);
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

// The workspace that was given, of which `needed` bytes are used.
Status check_workspace(const sdpa_kernel_info &info, const sdpa_params &params, uint64_t needed) {
  if (needed == 0) return {};
  if (params.workspace == nullptr || params.workspace_bytes < needed)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: workspace is %p with %" PRIu64 " bytes; this problem needs %" PRIu64,
                       info.name, params.workspace, params.workspace == nullptr ? 0 : params.workspace_bytes, needed);
  if (reinterpret_cast<uintptr_t>(params.workspace) % kWorkspaceAlignment != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "workspace is %p; it must be a multiple of %zu", params.workspace,
                       static_cast<size_t>(kWorkspaceAlignment));
  return {};
}

}  // namespace

Status check_problem(const KernelRow &row, const sdpa_params &params) {
  Status status = check_values(params);
  if (status.ok()) status = check_options(params);
  if (status.ok()) status = check_row(row.info, params);
  if (status.ok()) status = row.can_implement(params);
  return status;
}

uint64_t workspace_bytes(const KernelRow &row, const sdpa_params &params) {
  const uint64_t counters = params.num_splits > 1 ? SDPA_MAX_SPLIT_TILES * sizeof(uint32_t) : 0;
  return row.workspace_bytes(params) + counters;
}

Status check_pointers(const KernelRow &row, const sdpa_params &params) {
  // The two launches of a quantised kernel may come apart, where the caller says how much room the workspace has.
  const bool is_int8 = row.info.accuracy == SDPA_ACCURACY_INT8;
  const bool may_be_apart =
      (is_int8 || row.info.accuracy == SDPA_ACCURACY_INT8_QK) && params.total_k > 0 && params.cu_seqlens_k == nullptr;
  const bool is_second = params.quantized != nullptr;
  const bool is_first = may_be_apart && !is_second && params.q == nullptr && params.out == nullptr;
  if (is_second && !may_be_apart)
    return make_status(SDPA_INVALID_ARGUMENT,
                       "%s: quantized is %p; allowed is null, or a quantised kernel with total_k above 0 and no "
                       "cu_seqlens_k",
                       row.info.name, params.quantized);
  const struct {
    const char *name;
    const void *pointer;
    bool may_be_null;
  } tensors[] = {{"q", params.q, is_first},
                 {"k", params.k, is_second},
                 {"v", params.v, is_second && is_int8},
                 {"out", params.out, is_first}};
  for (const auto &tensor : tensors)
    if (tensor.pointer == nullptr && !tensor.may_be_null) return null_argument(tensor.name);
  const Status status = check_element_alignment("softmax_lse", params.softmax_lse, sizeof(float));
  if (!status.ok()) return status;
  if (params.num_splits > 1) {
    const Status aligned = check_element_alignment("split_arrivals", params.split_arrivals, sizeof(uint32_t));
    if (!aligned.ok()) return aligned;
  }
  if (reinterpret_cast<uintptr_t>(params.quantized) % kWorkspaceAlignment != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "quantized is %p; it must be a multiple of %zu", params.quantized,
                       static_cast<size_t>(kWorkspaceAlignment));
  if (params.workspace == nullptr && row.is_workspace_optional) return {};
  return check_workspace(row.info, params, workspace_bytes(row, params));
}

namespace {

// The gradient of a bias, if it is asked for: its type, and what it is summed over.
Status check_dbias(const sdpa_bwd_params &params) {
  const sdpa_params &forward = params.forward;
  const bool is_bias = params.dbias_type >= SDPA_MASK_F16 && params.dbias_type <= SDPA_MASK_F32;
  if (params.dbias_type != SDPA_MASK_NONE && !is_bias)
    return make_status(SDPA_INVALID_ARGUMENT, "dbias_type is %d; allowed are %d, and %d to %d", params.dbias_type,
                       SDPA_MASK_NONE, SDPA_MASK_F16, SDPA_MASK_F32);
  if ((params.dbias == nullptr) == is_bias)
    return make_status(SDPA_INVALID_ARGUMENT, "dbias is %p and dbias_type %d; allowed are null with %d, or neither",
                       params.dbias, params.dbias_type, SDPA_MASK_NONE);
  if (params.dbias == nullptr) return {};
  if (forward.mask_type < SDPA_MASK_F16)
    return make_status(SDPA_INVALID_ARGUMENT, "dbias is given and mask_type is %d; a mask that is added has %d to %d",
                       forward.mask_type, SDPA_MASK_F16, SDPA_MASK_F32);
  if (forward.cu_seqlens_q != nullptr || forward.cu_seqlens_k != nullptr)
    return make_status(SDPA_NOT_SUPPORTED, "dbias is given, and packed sequences have no gradient of a bias");
  const struct {
    const char *name;
    int32_t size;
  } dimensions[] = {
      {"batch", forward.batch}, {"head", forward.num_heads_q}, {"row", forward.seqlen_q}, {"key", forward.seqlen_k}};
  for (int i = 0; i < 4; ++i)
    if (params.dbias_stride[i] == 0 && forward.mask_stride[i] != 0 && dimensions[i].size > 1)
      return make_status(SDPA_INVALID_ARGUMENT, "dbias: %s stride is 0, and that of mask %lld; a sum over what differs",
                         dimensions[i].name, static_cast<long long>(forward.mask_stride[i]));
  return check_element_alignment("dbias", params.dbias, kMaskBytes[params.dbias_type]);
}

}  // namespace

Status check_backward(const KernelRow &row, const sdpa_bwd_params &params) {
  const sdpa_params &forward = params.forward;
  Status status = check_values(forward);
  if (status.ok()) status = check_options(forward);
  if (status.ok()) status = check_row(row.info, forward);
  if (status.ok() && (params.reserved != 0 || params.reserved_end != 0))
    return make_status(SDPA_INVALID_ARGUMENT, "reserved is %u and reserved_end %d; both must be 0", params.reserved,
                       params.reserved_end);
  if (status.ok()) status = check_dbias(params);
  if (status.ok()) status = row.check_backward(params);
  return status;
}

Status check_backward_pointers(const KernelRow &row, const sdpa_bwd_params &params) {
  const sdpa_params &forward = params.forward;
  const struct {
    const char *name;
    const void *pointer;
  } tensors[] = {{"q", forward.q},     {"k", forward.k},      {"v", forward.v},
                 {"out", forward.out}, {"dout", params.dout}, {"softmax_lse", forward.softmax_lse}};
  for (const auto &tensor : tensors)
    if (tensor.pointer == nullptr) return null_argument(tensor.name);
  Status status = check_element_alignment("softmax_lse", forward.softmax_lse, sizeof(float));
  if (status.ok()) status = check_element_alignment("dlse", params.dlse, sizeof(float));
  return status.ok() ? check_workspace(row.info, forward, row.backward_workspace_bytes(params)) : status;
}

}  // namespace sdpa
