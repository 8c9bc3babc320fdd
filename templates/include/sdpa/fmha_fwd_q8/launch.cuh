// From the C ABI to the two launches of a quantised problem: may this kernel run it, with which Params, how much
// workspace, and the registry row that says so. The only header that generated units of this family include.
#pragma once

#include <algorithm>
#include <climits>

#include "sdpa/attention/checks.hpp"
#include "sdpa/attention/set_params.hpp"
#include "sdpa/fmha_fwd_q8/kernel.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::fmha_fwd_q8 {

// Tiles of query rows: a CTA each, or with split kernels num_splits CTAs.
template <class Traits>
int64_t num_m_blocks(const sdpa_params &p) {
  const int64_t heads = Traits::kIsSplit ? p.num_heads_q / p.num_heads_kv : 1;
  return ceil_div(p.seqlen_q * heads, Traits::kBlockM);
}
template <class Traits>
int64_t num_tiles(const sdpa_params &p) {
  return num_m_blocks<Traits>(p) * p.batch * (Traits::kIsSplit ? p.num_heads_kv : p.num_heads_q);
}

// CTAs of the two launches.
template <class Traits>
int64_t num_ctas(const sdpa_params &p) {
  return num_tiles<Traits>(p) * (Traits::kIsSplit ? p.num_splits : 1);
}
template <class Traits>
int64_t num_quantized_tiles(const sdpa_params &p) {
  return Quantize<Traits>::kRoles * ceil_div(p.seqlen_k, kBlock) * p.batch * p.num_heads_kv;
}

template <class Traits>
Status can_implement(const sdpa_params &p) {
  if (int64_t{p.seqlen_q} + p.seqlen_k > INT_MAX - 2 * Traits::kBlockM)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d: this kernel takes sums below 2^31 - 256",
                       p.seqlen_q, p.seqlen_k);
  if constexpr (Traits::kIsSplit) {
    Status status = check_split(p, num_tiles<Traits>(p));
    if (status.ok()) status = check_packed_heads(p, Traits::kBlockM);
    if (!status.ok()) return status;
  }
  for (const int64_t ctas : {num_ctas<Traits>(p), num_quantized_tiles<Traits>(p)})
    if (ctas > INT_MAX)
      return make_status(SDPA_NOT_SUPPORTED,
                         "batch %d, num_heads_q %d, num_heads_kv %d, seqlen_q %d and seqlen_k %d make %lld CTAs; one "
                         "launch has at most %d",
                         p.batch, p.num_heads_q, p.num_heads_kv, p.seqlen_q, p.seqlen_k, static_cast<long long>(ctas),
                         INT_MAX);
  if (p.cu_seqlens_k == nullptr && p.total_k > 0 && p.total_k < p.seqlen_k)
    return make_status(SDPA_INVALID_ARGUMENT, "total_k is %d; it must be 0, or at least seqlen_k, which is %d",
                       p.total_k, p.seqlen_k);
  const uint64_t quantized = Workspace::make<Traits::kMath, Traits::kHeadDim>(p).bytes;
  if (p.quantized != nullptr && p.quantized_bytes != quantized)
    return make_status(SDPA_INVALID_ARGUMENT, "quantized has %llu bytes; this kernel's first launch leaves %llu",
                       static_cast<unsigned long long>(p.quantized_bytes), static_cast<unsigned long long>(quantized));
  return check_operands(p);
}

// What the first launch leaves, if it is not there already, and behind it, of a split kernel, O and the statistics of
// every split of every tile.
template <class Traits>
uint64_t workspace_bytes(const sdpa_params &p) {
  uint64_t bytes = p.quantized != nullptr ? 0 : Workspace::make<Traits::kMath, Traits::kHeadDim>(p).bytes;
  if (Traits::kIsSplit && p.num_splits > 1) {
    const uint64_t rows = static_cast<uint64_t>(num_ctas<Traits>(p)) * Traits::kBlockM;
    bytes += rows * (Traits::kHeadDim * sizeof(float) + sizeof(float2));
  }
  return bytes;
}

template <class Traits>
typename Traits::Params to_params(const sdpa_params &p) {
  typename Traits::Params params = {};
  set_general_params<Traits>(params, p);
  if constexpr (Traits::kHasMask) {
    params.mask = to_mask(p, Traits::kMaskRun);
    if (p.mask_stride[0] == 0 && p.mask_stride[1] != 0) params.scheduler.take_batches_first(p.batch);
  }

  const auto workspace = Workspace::make<Traits::kMath, Traits::kHeadDim>(p);
  char *const memory = static_cast<char *>(p.quantized != nullptr ? const_cast<void *>(p.quantized) : p.workspace);
  params.blocks = memory;
  params.k_scale = reinterpret_cast<float *>(memory + workspace.k_scale);
  params.k_mean = reinterpret_cast<float *>(memory + workspace.k_mean);
  params.blocks_per_head = workspace.blocks_per_head;
  params.num_heads_kv = p.num_heads_kv;
  params.key_blocks = static_cast<int32_t>(ceil_div(p.seqlen_k, kBlock));
  if constexpr (Traits::kIsSplit) {
    const int m_blocks = static_cast<int>(num_m_blocks<Traits>(p));
    params.heads_per_kv = cutlass::FastDivmod(p.num_heads_q / p.num_heads_kv);
    params.m_blocks = cutlass::FastDivmod(m_blocks);
    params.scheduler = TileScheduler::make(m_blocks * p.num_splits, p.batch, p.num_heads_kv, p.num_heads_kv, 0);
    params.num_splits = p.num_splits;
    char *const parts = static_cast<char *>(p.workspace) + (p.quantized != nullptr ? 0 : workspace.bytes);
    params.partial_out = reinterpret_cast<float *>(parts);
    params.partial_stats =
        reinterpret_cast<float2 *>(params.partial_out + num_ctas<Traits>(p) * Traits::kBlockM * Traits::kHeadDim);
    params.arrivals = p.split_arrivals;
  }
  return params;
}

// A compiled function and what it was compiled for.
template <class Traits_, void (*kKernel_)(typename Traits_::Params)>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
};

// Launches the function for the problem's kind of mask.
template <class Function, class... Others>
Status launch_attention(const sdpa_params &p, void *stream) {
  using Traits = typename Function::Traits;
  if constexpr (sizeof...(Others) > 0) {
    if (mask_kind(static_cast<MaskType>(p.mask_type)) != Traits::kMask) return launch_attention<Others...>(p, stream);
  }
  return Traits::Arch::launch(Function::kKernel, Traits::kFacts.name, num_ctas<Traits>(p), Traits::kThreads,
                              Traits::kSmemBytes, to_params<Traits>(p), stream);
}

// `Pass` makes the bytes of K and V, unless they are there already. Without q nothing attends to them yet.
template <class Pass, class... Functions>
Status launch(const sdpa_params &p, void *stream) {
  using Traits = typename Pass::Traits;
  using Pre = Quantize<Traits>;
  if (p.quantized == nullptr) {
    const Status status = Traits::Arch::launch(Pass::kKernel, Traits::kFacts.name, num_quantized_tiles<Traits>(p),
                                               Pre::kThreads, Pre::kSmemBytes, to_params<Traits>(p), stream);
    if (!status.ok() || p.q == nullptr) return status;
  }
  return launch_attention<Functions...>(p, stream);
}

// What a kernel of this family takes: the same that the generator says of it.
template <class Traits>
constexpr uint64_t takes() {
  return SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL | SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED | SDPA_TAKES_UNDROPPED |
         SDPA_TAKES_SMALLER_HEAD_DIM | SDPA_TAKES_WINDOW | SDPA_TAKES_SINKS |
         (Traits::kIsSplit ? SDPA_TAKES_SPLITS : SDPA_TAKES_BOOL | SDPA_TAKES_BIAS16 | SDPA_TAKES_BIAS32);
}

// Behind `Pass` one function for each kind of mask that the kernel takes, no mask first; their Traits differ in kMask alone, and add kFacts to
// KernelTraits.
template <class Pass, class First, class... Others, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename First::Traits;
  static_assert(sizeof...(Others) + 2 <= kMaxFunctions);
  static_assert(!Traits::kHasMask && sizeof...(Others) == (Traits::kIsSplit ? 0 : 3),
                "there is a function for every kind of mask, or for none");
  static_assert(Traits::kFacts.takes == takes<Traits>(), "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  static_assert(Traits::kFacts.accuracy == (Traits::kMath == Math::kInt8 ? SDPA_ACCURACY_INT8 : SDPA_ACCURACY_INT8_QK),
                "the generator and the kernel disagree on how exact it is");
  static_assert(Traits::kThreads >= Quantize<Traits>::kThreads, "a row says one number of threads");
  static_assert(Traits::kSmemBytes >= Quantize<Traits>::kSmemBytes, "and one of bytes");
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm =
      std::min(Traits::kCtasPerSm, (kMaxSmemBytes + kReservedSmemBytes) / (Traits::kSmemBytes + kReservedSmemBytes));
  row.can_implement = can_implement<Traits>;
  row.workspace_bytes = workspace_bytes<Traits>;
  row.launch = launch<Pass, First, Others...>;
  int index = 0;
  for (const auto kernel : {First::kKernel, Others::kKernel..., Pass::kKernel})
    row.functions[index++] = reinterpret_cast<const void *>(kernel);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_fwd_q8
