// From the C ABI to an sm_90 kernel: may it run this problem, with which Params, and the registry row that says so.
// The only header that generated units of this family include.
#pragma once

#include <climits>

#include "sdpa/arch/target_sm90.hpp"
#include "sdpa/attention/checks.hpp"
#include "sdpa/attention/set_params.hpp"
#include "sdpa/fmha_fwd_sm90/grid.hpp"
#include "sdpa/fmha_fwd_sm90/kernel.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
int64_t num_tiles(const sdpa_params &p) {
  return (int64_t{p.seqlen_q} + Traits::kBlockM - 1) / Traits::kBlockM * p.batch * p.num_heads_q;
}

// What a tensor map can say of a tensor: strides are positive, but for heads and batches of inputs that are broadcast.
inline Status check_tensor_map(const char *name, const void *data, const int64_t (&stride)[3], const int (&extent)[3],
                               bool is_input = true) {
  const Status status = check_tensor(name, data, stride, extent);
  if (!status.ok()) return status;
  static const char *const kAxis[3] = {"batch", "head", "row"};
  constexpr int64_t kMaxStride = int64_t{1} << 39;  // elements: 2^40 bytes
  for (int i = 0; i < 3; ++i) {
    const bool may_be_0 = is_input && i < 2;
    if (extent[i] > 1 && (stride[i] < (may_be_0 ? 0 : 1) || stride[i] >= kMaxStride))
      return make_status(
          SDPA_NOT_SUPPORTED,
          "%s: %s stride %lld; this kernel takes positive strides below 2^39 elements, and of q, k and v 0 "
          "for heads and batches",
          name, kAxis[i], static_cast<long long>(stride[i]));
  }
  return {};
}

// Rows of a tensor, and of the ragged map of one: as many as its longest sequence may have.
inline int num_rows(const void *cu_seqlens, int seqlen, int total) { return cu_seqlens ? total : seqlen; }
inline int map_rows(const void *cu_seqlens, int seqlen, int total) {
  const int rows = cu_seqlens && total < seqlen ? total : seqlen;
  return rows > 1 ? rows : 1;
}

// From row to row, in bytes; that of a single row is anything.
inline int64_t row_bytes(int64_t stride, int rows, int64_t element_bytes) {
  return rows > 1 ? stride * element_bytes : kVectorBytes;
}

// A ragged map starts before its tensor.
inline Status check_ragged_map(const char *name, const void *data, int64_t stride, int rows, int map_rows,
                               int64_t element_bytes) {
  const uint64_t before = static_cast<uint64_t>(row_bytes(stride, rows, element_bytes)) * map_rows;
  if (before <= reinterpret_cast<uintptr_t>(data)) return {};
  return make_status(SDPA_NOT_SUPPORTED,
                     "%s: %d rows with a stride of %lld elements are more than there are bytes before address %p; a "
                     "general kernel of this family needs as many",
                     name, map_rows, static_cast<long long>(stride), data);
}

template <class Traits>
Status can_implement(const sdpa_params &p) {
  if (p.seqlen_q > INT_MAX - 2 * Traits::kBlockM || p.seqlen_k > INT_MAX - 2 * Traits::kBlockN)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d must be below 2^31 - 512", p.seqlen_q,
                       p.seqlen_k);
  if (num_tiles<Traits>(p) > INT_MAX)
    return make_status(SDPA_NOT_SUPPORTED,
                       "batch %d, num_heads_q %d and seqlen_q %d make %lld CTAs; one launch has at most %d", p.batch,
                       p.num_heads_q, p.seqlen_q, static_cast<long long>(num_tiles<Traits>(p)), INT_MAX);
  if (Traits::kIsGeneral && int64_t{p.seqlen_q} + p.seqlen_k > INT_MAX - 2 * Traits::kBlockM)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d: a general kernel takes sums below 2^31 - 384",
                       p.seqlen_q, p.seqlen_k);
  const int rows_q = num_rows(p.cu_seqlens_q, p.seqlen_q, p.total_q);
  const int rows_k = num_rows(p.cu_seqlens_k, p.seqlen_k, p.total_k);
  const int extent_q[3] = {p.cu_seqlens_q ? 1 : p.batch, p.num_heads_q, rows_q};
  const int extent_kv[3] = {p.cu_seqlens_k ? 1 : p.batch, p.num_heads_kv, rows_k};
  Status status = check_tensor_map("q", p.q, p.q_stride, extent_q);
  if (status.ok()) status = check_tensor_map("k", p.k, p.k_stride, extent_kv);
  if (status.ok()) status = check_tensor_map("v", p.v, p.v_stride, extent_kv);
  if (status.ok()) status = check_tensor_map("out", p.out, p.out_stride, extent_q, /*is_input=*/false);
  if constexpr (Traits::kIsGeneral) {
    constexpr int64_t kBytes = sizeof(typename Traits::Element);
    const int in_map_q = map_rows(p.cu_seqlens_q, p.seqlen_q, p.total_q);
    const int in_map_k = map_rows(p.cu_seqlens_k, p.seqlen_k, p.total_k);
    if (status.ok()) status = check_ragged_map("q", p.q, p.q_stride[2], rows_q, in_map_q, kBytes);
    if (status.ok()) status = check_ragged_map("k", p.k, p.k_stride[2], rows_k, in_map_k, kBytes);
    if (status.ok()) status = check_ragged_map("v", p.v, p.v_stride[2], rows_k, in_map_k, kBytes);
    if (status.ok()) status = check_ragged_map("out", p.out, p.out_stride[2], rows_q, in_map_q, kBytes);
  }
  return status;
}

// Boxes of kSmemCols columns and `rows` rows.
template <class Traits>
Status make_map(typename Traits::Arch::TensorMap &map, Steps &steps, const char *name, const void *data, int head_dim,
                const int64_t (&stride)[3], const int (&extent)[3], int rows) {
  constexpr uint64_t kBytes = sizeof(typename Traits::Element);
  steps = {stride[1] != 0, stride[0] != 0};
  // A map has no empty axis; what is never loaded may have any extent.
  const auto at_least_1 = [](int value) { return static_cast<uint64_t>(value > 1 ? value : 1); };
  const uint64_t extents[4] = {at_least_1(head_dim), at_least_1(extent[2]), steps.head ? at_least_1(extent[1]) : 1,
                               steps.batch ? at_least_1(extent[0]) : 1};
  uint64_t strides[3];
  for (int i = 0; i < 3; ++i)
    strides[i] = extents[i + 1] > 1 ? static_cast<uint64_t>(stride[2 - i]) * kBytes : kVectorBytes;
  const uint32_t box[4] = {Traits::kSmemCols, static_cast<uint32_t>(rows), 1, 1};
  constexpr bool kIsBf16 = std::is_same_v<typename Traits::Element, cutlass::bfloat16_t>;
  return Traits::Arch::make_tensor_map(map, name, kBytes, kIsBf16, data, 4, extents, strides, box,
                                       Traits::kSwizzleBytes);
}

template <class Traits>
void set_sections(typename Traits::Params &params, const sdpa_params &p, int64_t num_sms) {
  make_sections(params.scheduler, int64_t{p.batch} * p.num_heads_q, p.num_heads_q / p.num_heads_kv,
                int64_t{4} * params.seqlen_k * Traits::kHeadDim, num_sms);
}

// The same with a fifth dimension: see GeneralParams. `num_rows`: of the tensor, `map_rows`: of the map.
template <class Traits>
Status make_ragged_map(typename Traits::Arch::TensorMap &map, Steps &steps, const char *name, const void *data,
                       int head_dim, const int64_t (&stride)[3], const int (&extent)[3], int map_rows, int box_rows) {
  constexpr uint64_t kBytes = sizeof(typename Traits::Element);
  steps = {extent[1] > 1 && stride[1] != 0, extent[0] > 1 && stride[0] != 0};
  const auto row = static_cast<uint64_t>(row_bytes(stride[2], extent[2], kBytes));
  const uint64_t extents[5] = {static_cast<uint64_t>(head_dim), static_cast<uint64_t>(map_rows),
                               steps.head ? static_cast<uint64_t>(extent[1]) : 1,
                               steps.batch ? static_cast<uint64_t>(extent[0]) : 1, static_cast<uint64_t>(extent[2]) + 1};
  const uint64_t strides[4] = {row, steps.head ? static_cast<uint64_t>(stride[1]) * kBytes : kVectorBytes,
                               steps.batch ? static_cast<uint64_t>(stride[0]) * kBytes : kVectorBytes, row};
  const auto begin = reinterpret_cast<uintptr_t>(data) - row * static_cast<uint64_t>(map_rows);
  const uint32_t box[5] = {Traits::kSmemCols, static_cast<uint32_t>(box_rows), 1, 1, 1};
  constexpr bool kIsBf16 = std::is_same_v<typename Traits::Element, cutlass::bfloat16_t>;
  return Traits::Arch::make_tensor_map(map, name, kBytes, kIsBf16, reinterpret_cast<const void *>(begin), 5, extents,
                                       strides, box, Traits::kSwizzleBytes);
}

template <class Traits>
Status to_general_params(typename Traits::Params &params, const sdpa_params &p) {
  set_params<Traits>(params, p);
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.num_heads_q = p.num_heads_q;
  params.is_causal = p.is_causal;
  params.is_bottom_right = p.causal_bottom_right;
  params.causal_offset = p.is_causal || p.has_window ? p.causal_offset : 0;
  params.window_left = p.has_window ? p.window_left : -1;
  params.window_right = p.is_causal ? 0 : p.has_window ? p.window_right : -1;
  params.sinks = {p.sinks, static_cast<MaskType>(p.sinks_type)};
  params.lengths_q = {p.seqlens_q, p.cu_seqlens_q, p.total_q};
  params.lengths_k = {p.seqlens_k, p.cu_seqlens_k, p.total_k};
  if (p.cu_seqlens_q) params.lse_batch_stride = 0;
  params.rows_q = map_rows(p.cu_seqlens_q, p.seqlen_q, p.total_q);
  params.rows_k = map_rows(p.cu_seqlens_k, p.seqlen_k, p.total_k);
  const int extent_q[3] = {p.cu_seqlens_q ? 1 : p.batch, p.num_heads_q,
                           num_rows(p.cu_seqlens_q, p.seqlen_q, p.total_q)};
  const int extent_kv[3] = {p.cu_seqlens_k ? 1 : p.batch, p.num_heads_kv,
                            num_rows(p.cu_seqlens_k, p.seqlen_k, p.total_k)};
  Status status = make_ragged_map<Traits>(params.map_q, params.step_q, "q", p.q, p.head_dim, p.q_stride, extent_q,
                                          params.rows_q, kWarpgroupRows);
  if (status.ok())
    status = make_ragged_map<Traits>(params.map_k, params.step_k, "k", p.k, p.head_dim, p.k_stride, extent_kv,
                                     params.rows_k, Traits::kBlockN);
  if (status.ok())
    status = make_ragged_map<Traits>(params.map_v, params.step_v, "v", p.v, p.head_dim_v, p.v_stride, extent_kv,
                                     params.rows_k, Traits::kBlockN);
  if (status.ok())
    status = make_ragged_map<Traits>(params.map_out, params.step_out, "out", p.out, p.head_dim_v, p.out_stride,
                                     extent_q, params.rows_q, kWarpRows);
  params.num_tiles = params.num_ctas = static_cast<uint32_t>(num_tiles<Traits>(p));
  set_sections<Traits>(params, p, Traits::Arch::num_sms());
  return status;
}

template <class Traits>
Status to_params(typename Traits::Params &params, const sdpa_params &p) {
  set_params<Traits>(params, p);
  const int extent_q[3] = {p.batch, p.num_heads_q, p.seqlen_q};
  // Keys that no row sees are outside of their maps: 0 times the NaN that they may hold would be NaN.
  const int extent_kv[3] = {p.batch, p.num_heads_kv, params.seqlen_k};
  Steps step_out;
  Status status =
      make_map<Traits>(params.map_q, params.step_q, "q", p.q, p.head_dim, p.q_stride, extent_q, kWarpgroupRows);
  if (status.ok())
    status =
        make_map<Traits>(params.map_k, params.step_k, "k", p.k, p.head_dim, p.k_stride, extent_kv, Traits::kBlockN);
  if (status.ok())
    status =
        make_map<Traits>(params.map_v, params.step_v, "v", p.v, p.head_dim_v, p.v_stride, extent_kv, Traits::kBlockN);
  if (status.ok())
    status = make_map<Traits>(params.map_out, step_out, "out", p.out, p.head_dim_v, p.out_stride, extent_q, kWarpRows);
  const auto num_sms = static_cast<uint32_t>(Traits::Arch::num_sms());
  params.num_tiles = static_cast<uint32_t>(num_tiles<Traits>(p));
  params.num_ctas = num_ctas<Traits>(params.num_tiles, num_sms, params.seqlen_k);
  if constexpr (Traits::kIsCausal) set_sections<Traits>(params, p, num_sms);
  return status;
}

// A compiled function and what it was compiled for.
template <class Traits_, void (*kKernel_)(typename Traits_::Params)>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
};

template <class Function>
Status launch(const sdpa_params &p, void *stream) {
  using Traits = typename Function::Traits;
  typename Traits::Params params;
  Status status;
  if constexpr (Traits::kIsGeneral) {
    params = {};  // masks and dropout are not this family's yet
    status = to_general_params<Traits>(params, p);
  } else {
    status = to_params<Traits>(params, p);
  }
  if (!status.ok()) return status;
  return Traits::Arch::launch(Function::kKernel, Traits::kFacts.name, params.num_ctas, Traits::kThreads,
                              Traits::kSmemBytes, params, stream);
}

// What a kernel takes: the same that the generator says of it.
template <class Traits>
constexpr uint64_t takes() {
  constexpr uint64_t kEvery = SDPA_TAKES_UNDROPPED | SDPA_TAKES_SMALLER_HEAD_DIM;
  if (Traits::kIsGeneral)
    return kEvery | SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL | SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED | SDPA_TAKES_WINDOW |
           SDPA_TAKES_SINKS;
  return kEvery | (Traits::kIsCausal ? SDPA_TAKES_CAUSAL : SDPA_TAKES_FULL);
}

// Function's Traits add kFacts to KernelTraits.
template <class Function, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename Function::Traits;
  static_assert(Traits::kFacts.takes == takes<Traits>(), "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.can_implement = can_implement<Traits>;
  row.workspace_bytes = [](const sdpa_params &) -> uint64_t { return 0; };
  row.launch = launch<Function>;
  row.functions[0] = reinterpret_cast<const void *>(Function::kKernel);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_fwd_sm90
