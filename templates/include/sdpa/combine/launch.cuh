// From the C ABI to the kernel that merges: what may be merged, with which Params, and the registry row that says so.
// The only header that generated units of this family include.
#pragma once

#include <climits>

#include "sdpa/attention/checks.hpp"
#include "sdpa/combine/kernel.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::combine {

inline constexpr int kMaxRows = INT_MAX - 1024;  // of a launch: row indices stay below 2^31 in every CTA

inline int element_bytes(int32_t dtype) { return dtype == SDPA_DTYPE_F32 ? 4 : 2; }

inline bool is_dtype(int32_t dtype) { return dtype >= SDPA_DTYPE_F16 && dtype <= SDPA_DTYPE_F32; }

inline Status check_pointer(const char *name, int part, const void *pointer, int alignment) {
  const char *const what = pointer == nullptr ? "null" : "misaligned";
  if (pointer != nullptr && reinterpret_cast<uintptr_t>(pointer) % alignment == 0) return {};
  return make_status(SDPA_INVALID_ARGUMENT, "%s of part %d is %p, which is %s; it must be a multiple of %d bytes", name,
                     part, pointer, what, alignment);
}

// A stride counts where its axis has more than one element.
inline Status check_strides(const char *name, int part, const int64_t (&stride)[3], const int (&extent)[3], int bytes) {
  static const char *const kAxis[3] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i)
    if (extent[i] > 1 && stride[i] * bytes % kVectorBytes != 0)
      return make_status(SDPA_INVALID_ARGUMENT, "%s of part %d: %s stride %lld must be a multiple of %d elements", name,
                         part, kAxis[i], static_cast<long long>(stride[i]), kVectorBytes / bytes);
  return {};
}

inline Status check_sizes(const sdpa_merge_params &p, const KernelFacts &info) {
  const struct {
    const char *name;
    int32_t value;
  } sizes[] = {{"num_parts", p.num_parts}, {"batch", p.batch},       {"num_heads", p.num_heads},
               {"seqlen_q", p.seqlen_q},   {"head_dim", p.head_dim}, {"num_listed", p.num_listed}};
  for (const auto &size : sizes)
    if (size.value < 1)
      return make_status(SDPA_INVALID_ARGUMENT, "%s is %d; it must be at least 1", size.name, size.value);
  if (p.num_listed > SDPA_MAX_LISTED_PARTS || (p.num_listed != 1 && p.num_listed != p.num_parts))
    return make_status(SDPA_INVALID_ARGUMENT, "num_listed is %d and num_parts %d; allowed are 1, and up to %d for both",
                       p.num_listed, p.num_parts, SDPA_MAX_LISTED_PARTS);
  if (p.dtype != info.dtype)
    return make_status(SDPA_NOT_SUPPORTED, "%s: dtype is %d; this kernel takes %d", info.name, p.dtype, info.dtype);
  if (!is_dtype(p.out_dtype))
    return make_status(SDPA_INVALID_ARGUMENT, "out_dtype is %d; allowed are %d to %d", p.out_dtype, SDPA_DTYPE_F16,
                       SDPA_DTYPE_F32);
  if (p.head_dim % kVector != 0 || p.head_dim > info.head_dim)
    return make_status(SDPA_NOT_SUPPORTED, "%s: head_dim is %d; this kernel takes multiples of %d up to %d", info.name,
                       p.head_dim, kVector, info.head_dim);
  if (int64_t{p.batch} * p.num_heads > kMaxRows / p.seqlen_q)
    return make_status(SDPA_NOT_SUPPORTED,
                       "batch %d times num_heads %d times seqlen_q %d; one launch has at most %d rows", p.batch,
                       p.num_heads, p.seqlen_q, kMaxRows);
  return {};
}

template <class Traits>
Status check(const sdpa_merge_params &p) {
  Status status = check_sizes(p, Traits::kFacts);
  if (!status.ok()) return status;
  if (p.parts == nullptr) return make_status(SDPA_INVALID_ARGUMENT, "parts is null; a valid pointer is needed");
  const int extent[3] = {p.batch, p.num_heads, p.seqlen_q};
  const int bytes = element_bytes(p.dtype);
  for (int i = 0; status.ok() && i < p.num_listed; ++i) {
    status = check_pointer("out", i, p.parts[i].out, kVectorBytes);
    if (status.ok()) status = check_pointer("lse", i, p.parts[i].lse, sizeof(float));
    if (status.ok()) status = check_strides("out", i, p.parts[i].out_stride, extent, bytes);
  }
  if (!status.ok()) return status;
  if (p.num_parts != p.num_listed && p.out_part_stride * bytes % kVectorBytes != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "out_part_stride is %lld; it must be a multiple of %d elements",
                       static_cast<long long>(p.out_part_stride), kVectorBytes / bytes);
  const int out_bytes = element_bytes(p.out_dtype);
  const int64_t outs[] = {reinterpret_cast<intptr_t>(p.out), p.batch > 1 ? p.out_stride[0] * out_bytes : 0,
                          p.num_heads > 1 ? p.out_stride[1] * out_bytes : 0,
                          p.seqlen_q > 1 ? p.out_stride[2] * out_bytes : 0};
  for (const int64_t multiple : outs)
    if (p.out == nullptr || multiple % kVectorBytes != 0)
      return make_status(SDPA_INVALID_ARGUMENT, "out is %p with strides %lld, %lld, %lld; %d-byte multiples are needed",
                         p.out, static_cast<long long>(p.out_stride[0]), static_cast<long long>(p.out_stride[1]),
                         static_cast<long long>(p.out_stride[2]), kVectorBytes);
  const bool has_floats = reinterpret_cast<uintptr_t>(p.sinks) % sizeof(float) == 0 &&
                          reinterpret_cast<uintptr_t>(p.lse) % sizeof(float) == 0;
  if (has_floats) return status;
  return make_status(SDPA_INVALID_ARGUMENT, "sinks is %p and lse %p; they must be multiples of 4",
                     static_cast<const void *>(p.sinks), static_cast<const void *>(p.lse));
}

template <class Traits>
Params to_params(const sdpa_merge_params &p) {
  const int bytes = element_bytes(p.dtype);
  const int vectors = p.head_dim / kVector;
  const bool is_list = p.num_parts == p.num_listed;
  Params params = {};
  params.num_parts = p.num_parts;
  params.step = is_list ? 1 : 0;
  params.out_part_stride = is_list ? 0 : p.out_part_stride * bytes;
  params.lse_part_stride = is_list ? 0 : p.lse_part_stride * int64_t{sizeof(float)};
  params.sinks = p.sinks;
  params.sink_stride = p.sink_stride;
  params.out = static_cast<char *>(p.out);
  params.lse = p.lse;
  params.out_dtype = p.out_dtype;
  params.num_rows = p.batch * p.num_heads * p.seqlen_q;
  params.rows_per_cta = Traits::kThreads / vectors;
  params.vectors = cutlass::FastDivmod(vectors);
  params.seqlen_q = cutlass::FastDivmod(p.seqlen_q);
  params.num_heads = cutlass::FastDivmod(p.num_heads);
  for (int axis = 0; axis < 3; ++axis) params.out_stride[axis] = p.out_stride[axis] * element_bytes(p.out_dtype);
  for (int i = 0; i < p.num_listed; ++i) {
    const sdpa_merge_part &from = p.parts[i];
    Part &part = params.parts[i];
    part.out = static_cast<const char *>(from.out);
    part.lse = reinterpret_cast<const char *>(from.lse);
    for (int axis = 0; axis < 3; ++axis) {
      part.out_stride[axis] = from.out_stride[axis] * bytes;
      part.lse_stride[axis] = from.lse_stride[axis] * int64_t{sizeof(float)};
    }
  }
  return params;
}

// A compiled function and what it was compiled for.
template <class Traits_, void (*kKernel_)(Params)>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
};

template <class Function>
Status merge(const sdpa_merge_params &p, void *stream) {
  using Traits = typename Function::Traits;
  const Params params = to_params<Traits>(p);
  const int64_t grid = (int64_t{params.num_rows} + params.rows_per_cta - 1) / params.rows_per_cta;
  return Traits::Arch::launch(Function::kKernel, Traits::kFacts.name, grid, Traits::kThreads, Traits::kSmemBytes,
                              params, stream);
}

// Traits add kFacts to KernelTraits.
template <class Function, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename Function::Traits;
  static_assert(Traits::kFacts.op == SDPA_OP_MERGE && Traits::kFacts.takes == SDPA_TAKES_SMALLER_HEAD_DIM);
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.check_merge = check<Traits>;
  row.merge = merge<Function>;
  row.functions[0] = reinterpret_cast<const void *>(Function::kKernel);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::combine
