// From the C ABI to a backward kernel: may it run this problem, with which Params, and the registry row that says so.
// The only header that generated units of this family include.
#pragma once

#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>

#include "sdpa/attention/checks.hpp"
#include "sdpa/attention/constants.hpp"
#include "sdpa/fmha_bwd/bias_parts.cuh"
#include "sdpa/fmha_bwd/kernel.cuh"
#include "sdpa/fmha_fwd/launch.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::fmha_bwd {

inline int64_t num_blocks(int length, int block) { return (int64_t{length} + block - 1) / block; }

inline int64_t padded_rows(const sdpa_params &p) { return num_blocks(p.seqlen_q, kPaddedRows) * kPaddedRows; }

template <class Traits>
int64_t num_key_tiles(const sdpa_bwd_params &p) {
  if (p.dk == nullptr && p.dv == nullptr) return 0;
  return num_blocks(p.forward.seqlen_k, Traits::kBlockN) * p.forward.batch * p.forward.num_heads_kv;
}

// Those of dK and dV together or, where these have roles of their own, of each that is asked for.
template <class Traits>
int64_t num_key_ctas(const sdpa_bwd_params &p) {
  const int roles = Traits::kSplitsKeys ? (p.dk != nullptr) + (p.dv != nullptr) : 1;
  return roles * num_key_tiles<Traits>(p);
}

template <class Traits>
int64_t num_row_tiles(const sdpa_bwd_params &p) {
  if (p.dq == nullptr) return 0;
  return num_blocks(p.forward.seqlen_q, Traits::kDqBlockM) * p.forward.batch * p.forward.num_heads_q;
}

// Tiles of what the bias has itself; 0 where its gradient is not asked for.
template <class Traits>
int64_t num_bias_tiles(const sdpa_bwd_params &p) {
  if (p.dbias == nullptr) return 0;
  const sdpa_params &forward = p.forward;
  const auto own = [&](int dimension, int64_t count) { return p.dbias_stride[dimension] == 0 ? 1 : count; };
  return own(0, forward.batch) * own(1, forward.num_heads_q) * own(2, num_blocks(forward.seqlen_q, Traits::kDqBlockM)) *
         own(3, num_blocks(forward.seqlen_k, Traits::kDqBlockN));
}

template <class Traits>
BiasParts bias_parts(const sdpa_bwd_params &p) {
  return BiasParts(num_bias_tiles<Traits>(p), p.forward.batch, p.dbias_stride[0] == 0);
}

// Elements of the gradient of a bias that batches share.
inline int64_t num_bias_elements(const sdpa_bwd_params &p) {
  const auto own = [&](int dimension, int64_t size) { return p.dbias_stride[dimension] == 0 ? 1 : size; };
  return own(1, p.forward.num_heads_q) * own(2, p.forward.seqlen_q) * own(3, p.forward.seqlen_k);
}

// Two floats a row.
inline uint64_t statistics_bytes(const sdpa_bwd_params &p) {
  return static_cast<uint64_t>(padded_rows(p.forward)) * p.forward.batch * p.forward.num_heads_q * sizeof(float2);
}

// | row statistics | the gradient of a bias in parts, where there are several |
template <class Traits>
uint64_t workspace_bytes(const sdpa_bwd_params &p) {
  const int64_t parts = p.dbias == nullptr ? 1 : bias_parts<Traits>(p).count;
  return statistics_bytes(p) + (parts == 1 ? 0 : static_cast<uint64_t>(parts * num_bias_elements(p)) * sizeof(float));
}

template <class Traits>
Status check(const sdpa_bwd_params &params) {
  const sdpa_params &p = params.forward;
  if (int64_t{p.seqlen_q} + p.seqlen_k > INT_MAX - 256)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d: a backward kernel takes sums below 2^31 - 256",
                       p.seqlen_q, p.seqlen_k);
  if (p.split_arrivals != nullptr)
    return make_status(SDPA_INVALID_ARGUMENT, "split_arrivals is %p; a backward kernel takes null",
                       static_cast<const void *>(p.split_arrivals));
  if (params.dq == nullptr && params.dk == nullptr && params.dv == nullptr && params.dbias == nullptr)
    return make_status(SDPA_INVALID_ARGUMENT, "dq, dk, dv and dbias are null; at least one has to be asked for");
  const int64_t statistics = padded_rows(p) * p.batch * p.num_heads_q / Preprocess<Traits>::kRowsPerCta;
  const int64_t ctas =
      std::max(num_key_ctas<Traits>(params) + num_row_tiles<Traits>(params), num_bias_tiles<Traits>(params));
  if (ctas > INT_MAX || statistics > INT_MAX)
    return make_status(
        SDPA_NOT_SUPPORTED,
        "batch %d, num_heads_q %d, seqlen_q %d and seqlen_k %d make %lld CTAs; one launch has at most %d", p.batch,
        p.num_heads_q, p.seqlen_q, p.seqlen_k, static_cast<long long>(ctas > statistics ? ctas : statistics), INT_MAX);
  const int batch_q = p.cu_seqlens_q ? 1 : p.batch;
  const int batch_k = p.cu_seqlens_k ? 1 : p.batch;
  const int extent_q[3] = {batch_q, p.num_heads_q, p.cu_seqlens_q ? p.total_q : p.seqlen_q};
  const int extent_kv[3] = {batch_k, p.num_heads_kv, p.cu_seqlens_k ? p.total_k : p.seqlen_k};
  const struct {
    const char *name;
    const void *data;
    const int64_t (&stride)[3];
    const int (&extent)[3];
  } tensors[] = {{"q", p.q, p.q_stride, extent_q},
                 {"k", p.k, p.k_stride, extent_kv},
                 {"v", p.v, p.v_stride, extent_kv},
                 {"out", p.out, p.out_stride, extent_q},
                 {"dout", params.dout, params.dout_stride, extent_q},
                 {"dq", params.dq, params.dq_stride, extent_q},
                 {"dk", params.dk, params.dk_stride, extent_kv},
                 {"dv", params.dv, params.dv_stride, extent_kv}};
  for (const auto &tensor : tensors) {
    const Status status = check_tensor(tensor.name, tensor.data, tensor.stride, tensor.extent);
    if (!status.ok()) return status;
  }
  return {};
}

inline TensorRef to_tensor(const void *data, const int64_t (&stride)[3], bool is_packed) {
  return {const_cast<void *>(data), is_packed ? 0 : stride[0], stride[1], stride[2]};
}

inline float finite(double value) {
  return static_cast<float>(std::fmin(std::fmax(value, -double{FLT_MAX}), double{FLT_MAX}));
}

template <class Traits>
Params to_params(const sdpa_bwd_params &given) {
  const sdpa_params &p = given.forward;
  const bool is_packed_q = p.cu_seqlens_q != nullptr, is_packed_k = p.cu_seqlens_k != nullptr;
  Params params = {};
  params.q = to_tensor(p.q, p.q_stride, is_packed_q);
  params.k = to_tensor(p.k, p.k_stride, is_packed_k);
  params.v = to_tensor(p.v, p.v_stride, is_packed_k);
  params.out = to_tensor(p.out, p.out_stride, is_packed_q);
  params.dout = to_tensor(given.dout, given.dout_stride, is_packed_q);
  params.dq = to_tensor(given.dq, given.dq_stride, is_packed_q);
  params.dk = to_tensor(given.dk, given.dk_stride, is_packed_k);
  params.dv = to_tensor(given.dv, given.dv_stride, is_packed_k);
  params.softmax_lse = p.softmax_lse;
  params.dlse = given.dlse;
  params.lse_batch_stride = is_packed_q ? 0 : p.lse_stride[0];
  params.lse_head_stride = p.lse_stride[1];
  params.seqlen_q = p.seqlen_q;
  params.seqlen_k = p.seqlen_k;
  params.head_dim = p.head_dim;
  params.head_dim_v = p.head_dim_v;
  params.num_heads_q = p.num_heads_q;
  params.is_causal = p.is_causal;
  params.is_bottom_right = p.causal_bottom_right;
  params.causal_offset = p.is_causal || p.has_window ? p.causal_offset : 0;
  params.window_left = p.has_window ? p.window_left : -1;
  params.window_right = p.is_causal ? 0 : p.has_window ? p.window_right : -1;
  params.lengths_q = {p.seqlens_q, p.cu_seqlens_q, p.total_q};
  params.lengths_k = {p.seqlens_k, p.cu_seqlens_k, p.total_k};
  if (p.mask != nullptr) params.mask = to_mask(p, 2);
  params.dropout = to_dropout(p);
  params.softmax_scale_log2 = finite(double{p.softmax_scale} * double{kLog2e});
  params.p_keep = 1.f - p.p_dropout;
  params.score_scale = finite(double{p.softmax_scale} / double{params.p_keep});
  params.heads_per_kv = p.num_heads_q / p.num_heads_kv;
  params.statistics = static_cast<float2 *>(p.workspace);
  params.padded_rows = static_cast<int32_t>(padded_rows(p));
  params.statistics_ctas = cutlass::FastDivmod(params.padded_rows / Preprocess<Traits>::kRowsPerCta);
  params.heads_q = cutlass::FastDivmod(p.num_heads_q);
  params.num_key_tiles = static_cast<int32_t>(num_key_tiles<Traits>(given));
  params.scheduler = TileScheduler::make(static_cast<int>(num_blocks(p.seqlen_q, Traits::kDqBlockM)), p.batch,
                                         p.num_heads_q, p.num_heads_kv, int64_t{4} * p.seqlen_k * Traits::kHeadDim);
  params.key_scheduler =
      TileScheduler::make(static_cast<int>(num_blocks(p.seqlen_k, Traits::kBlockN)), p.batch, p.num_heads_kv,
                          p.num_heads_kv, int64_t{4} * p.seqlen_q * params.heads_per_kv * Traits::kHeadDim);
  return params;
}

template <class Traits>
BiasParams to_bias_params(const sdpa_bwd_params &given) {
  const sdpa_params &p = given.forward;
  BiasParams params = {};
  static_cast<Params &>(params) = to_params<Traits>(given);
  params.dbias = given.dbias;
  for (int i = 0; i < 4; ++i) params.dbias_stride[i] = given.dbias_stride[i];
  params.dbias_type = static_cast<MaskType>(given.dbias_type);
  const int64_t strides = given.dbias_stride[0] | given.dbias_stride[1] | given.dbias_stride[2];
  params.has_dbias_pairs =
      given.dbias_stride[3] == 1 && strides % 2 == 0 && reinterpret_cast<uintptr_t>(given.dbias) % 4 == 0;
  params.batch = p.batch;
  params.sums_heads = given.dbias_stride[1] == 0;
  params.sums_rows = given.dbias_stride[2] == 0;
  params.sums_keys = given.dbias_stride[3] == 0;
  params.num_m_blocks = static_cast<int>(num_blocks(p.seqlen_q, Traits::kDqBlockM));
  params.num_n_blocks = static_cast<int>(num_blocks(p.seqlen_k, Traits::kDqBlockN));
  params.m_blocks = cutlass::FastDivmod(params.sums_rows ? 1 : params.num_m_blocks);
  params.n_blocks = cutlass::FastDivmod(params.sums_keys ? 1 : params.num_n_blocks);
  params.heads = cutlass::FastDivmod(params.sums_heads ? 1 : p.num_heads_q);
  const BiasParts parts = bias_parts<Traits>(given);
  params.batches = static_cast<int>(parts.batches);
  if (parts.count == 1) return params;
  params.dbias = static_cast<char *>(p.workspace) + statistics_bytes(given);
  params.dbias_type = MaskType::kF32;
  params.has_dbias_pairs = 0;
  int64_t stride = 1;
  const auto place = [&](int dimension, int64_t size) {
    if (given.dbias_stride[dimension] == 0) return;
    params.dbias_stride[dimension] = stride;
    stride *= size;
  };
  place(3, p.seqlen_k);
  place(2, p.seqlen_q);
  place(1, p.num_heads_q);
  params.dbias_stride[0] = stride;
  return params;
}

template <class Traits>
BiasSumParams to_bias_sum_params(const sdpa_bwd_params &given) {
  BiasSumParams params = {};
  params.parts =
      reinterpret_cast<const float *>(static_cast<const char *>(given.forward.workspace) + statistics_bytes(given));
  params.num_parts = static_cast<int>(bias_parts<Traits>(given).count);
  params.num_elements = static_cast<int>(num_bias_elements(given));
  params.keys = cutlass::FastDivmod(given.dbias_stride[3] == 0 ? 1 : given.forward.seqlen_k);
  params.rows = cutlass::FastDivmod(given.dbias_stride[2] == 0 ? 1 : given.forward.seqlen_q);
  params.dbias = given.dbias;
  for (int i = 0; i < 4; ++i) params.dbias_stride[i] = given.dbias_stride[i];
  params.dbias_type = static_cast<MaskType>(given.dbias_type);
  return params;
}

// A compiled function and what it was compiled for.
template <class Traits_, void (*kKernel_)(Params)>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
};

// Those that make the gradient of a bias, or its parts, and that add these up.
template <class Traits_, void (*kKernel_)(BiasParams), void (*kSum_)(BiasSumParams)>
struct BiasFunctions {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
  static constexpr auto kSum = kSum_;
};

template <class Bias>
Status launch_bias(const sdpa_bwd_params &p, void *stream) {
  using Traits = typename Bias::Traits;
  const int64_t parts = bias_parts<Traits>(p).count;
  const Status status =
      Traits::Arch::launch(Bias::kKernel, Traits::kFacts.name, parts * num_bias_tiles<Traits>(p), Traits::kThreads,
                           BiasGradient<Traits>::kSmemBytes, to_bias_params<Traits>(p), stream);
  if (!status.ok() || parts == 1) return status;
  return Traits::Arch::launch(Bias::kSum, Traits::kFacts.name, num_blocks(num_bias_elements(p), Traits::kThreads),
                              Traits::kThreads, /*smem_bytes=*/0, to_bias_sum_params<Traits>(p), stream);
}

// Statistics' kernel, then Function's and Bias's as far as anything of theirs is asked for.
template <class Statistics, class Bias, class Function>
Status launch_all(const sdpa_bwd_params &p, void *stream) {
  using Traits = typename Function::Traits;
  const Params params = to_params<Traits>(p);
  const int64_t heads = int64_t{p.forward.batch} * p.forward.num_heads_q;
  Status status = Traits::Arch::launch(Statistics::kKernel, Traits::kFacts.name, heads * params.statistics_ctas.divisor,
                                       Traits::kThreads, /*smem_bytes=*/0, params, stream);
  const int64_t ctas = num_key_ctas<Traits>(p) + num_row_tiles<Traits>(p);
  if (status.ok() && ctas > 0)
    status = Traits::Arch::launch(Function::kKernel, Traits::kFacts.name, ctas, Traits::kThreads, Traits::kSmemBytes,
                                  params, stream);
  if (status.ok() && p.dbias != nullptr) status = launch_bias<Bias>(p, stream);
  return status;
}

// The first function serves problems without a mask, the last one those with.
template <class Statistics, class Bias, class First, class... Last>
Status launch(const sdpa_bwd_params &p, void *stream) {
  static_assert(sizeof...(Last) <= 1);
  if constexpr (sizeof...(Last) > 0) {
    if (p.forward.mask != nullptr) return launch_all<Statistics, Bias, Last...>(p, stream);
  }
  return launch_all<Statistics, Bias, First>(p, stream);
}

// What a kernel takes whose last function has these Traits: the same that the generator says of it.
template <class Traits>
constexpr uint64_t takes() {
  static_assert(Traits::kHasMask, "the last function takes masks");
  return (Traits::kHasDropout ? SDPA_TAKES_DROPOUT : SDPA_TAKES_UNDROPPED) | SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL |
         SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED | SDPA_TAKES_SMALLER_HEAD_DIM | SDPA_TAKES_WINDOW | SDPA_TAKES_SINKS |
         SDPA_TAKES_BOOL | SDPA_TAKES_BIAS16 | SDPA_TAKES_BIAS32;
}

template <class First, class... Last>
struct LastOf {
  using Traits = typename First::Traits;
};
template <class First, class Last>
struct LastOf<First, Last> {
  using Traits = typename Last::Traits;
};

// Where one function serves all, it takes masks.
template <class Statistics, class Bias, class First, class... Last, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename First::Traits;
  static_assert(Traits::kFacts.op == SDPA_OP_BACKWARD);
  static_assert(Traits::kFacts.takes == takes<typename LastOf<First, Last...>::Traits>(),
                "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.check_backward = check<Traits>;
  row.backward_workspace_bytes = workspace_bytes<Traits>;
  row.backward = launch<Statistics, Bias, First, Last...>;
  int index = 0;
  row.functions[index++] = reinterpret_cast<const void *>(First::kKernel);
  ((row.functions[index++] = reinterpret_cast<const void *>(Last::kKernel)), ...);
  row.functions[index++] = reinterpret_cast<const void *>(Bias::kKernel);
  row.functions[index++] = reinterpret_cast<const void *>(Bias::kSum);
  row.functions[index] = reinterpret_cast<const void *>(Statistics::kKernel);
  static_assert(sizeof...(Last) + 4 <= kMaxFunctions);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_bwd
