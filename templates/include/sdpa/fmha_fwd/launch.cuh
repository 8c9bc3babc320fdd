// From the C ABI to a fused kernel: may it run this problem, with which Params, and the registry row that says so.
// The only header that generated units of this family include.
#pragma once

#include <algorithm>
#include <climits>

#include "sdpa/attention/checks.hpp"
#include "sdpa/attention/set_params.hpp"
#include "sdpa/fmha_fwd/kernel.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::fmha_fwd {

// Tiles of query rows: a CTA each, or with split kernels num_splits CTAs.
template <class Traits>
int64_t num_m_blocks(const sdpa_params &p) {
  const int64_t heads = Traits::kIsSplit ? p.num_heads_q / p.num_heads_kv : 1;
  return (p.seqlen_q * heads + Traits::kBlockM - 1) / Traits::kBlockM;
}

template <class Traits>
int64_t num_tiles(const sdpa_params &p) {
  return num_m_blocks<Traits>(p) * p.batch * (Traits::kIsSplit ? p.num_heads_kv : p.num_heads_q);
}

// From so many bytes of a tile's parts on, a launch of its own merges them sooner than the CTA that arrives last.
constexpr int64_t kMergedByLastCta = 32 << 10;

template <class Traits>
bool merges_in_second_launch(const sdpa_params &p) {
  if (!Traits::kIsSplit || p.num_splits <= 1) return false;
  const int64_t rows = std::min<int64_t>(Traits::kBlockM, int64_t{p.seqlen_q} * (p.num_heads_q / p.num_heads_kv));
  return p.num_splits * rows * Traits::kHeadDim * int64_t{sizeof(float)} > kMergedByLastCta;
}

template <class Traits>
Status can_implement(const sdpa_params &p) {
  if (p.seqlen_q > INT_MAX - 2 * Traits::kBlockM || p.seqlen_k > INT_MAX - 2 * Traits::kBlockN)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d must be below 2^31 - 256", p.seqlen_q,
                       p.seqlen_k);
  if (Traits::kIsGeneral && int64_t{p.seqlen_q} + p.seqlen_k > INT_MAX - 2 * Traits::kBlockM)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d: a general kernel takes sums below 2^31 - 256",
                       p.seqlen_q, p.seqlen_k);
  if constexpr (Traits::kIsSplit) {
    Status status = check_split(p, num_tiles<Traits>(p));
    if (status.ok()) status = check_packed_heads(p, Traits::kBlockM);
    if (!status.ok()) return status;
  }
  const int64_t ctas = num_tiles<Traits>(p) * (Traits::kIsSplit ? p.num_splits : 1);
  if (ctas > INT_MAX)
    return make_status(SDPA_NOT_SUPPORTED,
                       "batch %d, num_heads_q %d and seqlen_q %d make %lld CTAs; one launch has at most %d", p.batch,
                       p.num_heads_q, p.seqlen_q, static_cast<long long>(ctas), INT_MAX);
  return check_operands(p);
}

template <class Traits>
typename Traits::Params to_params(const sdpa_params &p) {
  typename Traits::Params params = {};
  if constexpr (Traits::kIsGeneral) {
    set_general_params<Traits>(params, p);
    if constexpr (Traits::kHasMask) params.mask = to_mask(p, Traits::kMaskRun);
    if constexpr (Traits::kHasBias) params.softmax_scale_log2 = kLog2e;
    if (p.mask && p.mask_stride[0] == 0 && p.mask_stride[1] != 0) params.scheduler.take_batches_first(p.batch);
    params.dropout = to_dropout(p);
  } else {
    set_params<Traits>(params, p);
  }
  if constexpr (Traits::kIsSplit) {
    const int m_blocks = static_cast<int>(num_m_blocks<Traits>(p));
    params.heads_per_kv = cutlass::FastDivmod(p.num_heads_q / p.num_heads_kv);
    params.m_blocks = cutlass::FastDivmod(m_blocks);
    params.scheduler = TileScheduler::make(m_blocks * p.num_splits, p.batch, p.num_heads_kv, p.num_heads_kv, 0);
    params.num_splits = p.num_splits;
    params.sees_all = !(p.is_causal || p.has_window || p.seqlens_q || p.seqlens_k || p.cu_seqlens_q || p.cu_seqlens_k);
    const int64_t rows = num_tiles<Traits>(p) * p.num_splits * Traits::kBlockM;
    params.partial_out = static_cast<float *>(p.workspace);
    params.partial_stats = reinterpret_cast<float2 *>(params.partial_out + rows * Traits::kHeadDim);
    params.arrivals = merges_in_second_launch<Traits>(p) ? nullptr : p.split_arrivals;
  }
  return params;
}

// A compiled function and what it was compiled for; kMerge_ is what a split kernel's parts may be merged by.
template <class Traits_, void (*kKernel_)(typename Traits_::Params),
          void (*kMerge_)(typename Traits_::Params) = nullptr>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
  static constexpr auto kMerge = kMerge_;
};

template <class Function>
Status launch_function(const sdpa_params &p, void *stream) {
  using Traits = typename Function::Traits;
  const auto params = to_params<Traits>(p);
  const int64_t grid = num_tiles<Traits>(p) * (Traits::kIsSplit ? p.num_splits : 1);
  Status status = Traits::Arch::launch(Function::kKernel, Traits::kFacts.name, grid, Traits::kThreads,
                                       Traits::kSmemBytes, params, stream);
  if constexpr (Traits::kIsSplit) {
    if (status.ok() && merges_in_second_launch<Traits>(p))
      status = Traits::Arch::launch(Function::kMerge, Traits::kFacts.name,
                                    num_tiles<Traits>(p) * SplitMerge<Traits>::kCtasPerTile, Traits::kThreads, 0,
                                    params, stream);
  }
  return status;
}

// Launches the function for the problem's kind of mask.
template <class Function, class... Others>
Status launch(const sdpa_params &p, void *stream) {
  if (mask_kind(static_cast<MaskType>(p.mask_type)) == Function::Traits::kMask)
    return launch_function<Function>(p, stream);
  if constexpr (sizeof...(Others) > 0) {
    return launch<Others...>(p, stream);
  } else {
    return make_status(SDPA_NOT_SUPPORTED, "mask_type %d: %s takes no such mask", p.mask_type,
                       Function::Traits::kFacts.name);
  }
}

// Of a split kernel: O and the statistics of every split of every tile.
template <class Traits>
uint64_t workspace_bytes(const sdpa_params &p) {
  if (!Traits::kIsSplit || p.num_splits <= 1) return 0;
  const uint64_t rows = static_cast<uint64_t>(num_tiles<Traits>(p)) * p.num_splits * Traits::kBlockM;
  return rows * (Traits::kHeadDim * sizeof(float) + sizeof(float2));
}

// What a kernel of these functions takes: the same that the generator says of it.
template <class Traits, class... Others>
constexpr uint64_t takes() {
  uint64_t bits = Traits::kHasDropout ? SDPA_TAKES_DROPOUT : SDPA_TAKES_UNDROPPED;
  if constexpr (!Traits::kIsGeneral) return bits | (Traits::kIsCausal ? SDPA_TAKES_CAUSAL : SDPA_TAKES_FULL);
  bits |= SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL | SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED | SDPA_TAKES_SMALLER_HEAD_DIM |
          SDPA_TAKES_SINKS;
  if (Traits::kMayHaveWindow) bits |= SDPA_TAKES_WINDOW;
  if (Traits::kIsSplit) bits |= SDPA_TAKES_SPLITS;
  for (const MaskKind mask : {Traits::kMask, Others::Traits::kMask...}) {
    if (mask == MaskKind::kBool) bits |= SDPA_TAKES_BOOL;
    if (mask == MaskKind::kBias16) bits |= SDPA_TAKES_BIAS16;
    if (mask == MaskKind::kBias32) bits |= SDPA_TAKES_BIAS32;
  }
  return bits;
}

// One function for each kind of mask that the kernel takes, no mask first; their Traits differ in kMask alone, and add
// kFacts to KernelTraits.
template <class First, class... Others, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename First::Traits;
  static_assert(sizeof...(Others) + Traits::kIsSplit < kMaxFunctions);
  static_assert(Traits::kFacts.takes == takes<Traits, Others...>(),
                "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.can_implement = can_implement<Traits>;
  row.workspace_bytes = workspace_bytes<Traits>;
  row.launch = launch<First, Others...>;
  row.functions[0] = reinterpret_cast<const void *>(First::kKernel);
  int index = 1;
  ((row.functions[index++] = reinterpret_cast<const void *>(Others::kKernel)), ...);
  if constexpr (Traits::kIsSplit) row.functions[index++] = reinterpret_cast<const void *>(First::kMerge);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_fwd
