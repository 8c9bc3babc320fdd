// From the C ABI to a fused kernel: may it run this problem, with which Params, and the registry row that says so.
// The only header that generated units of this family include.
#pragma once

#include <climits>
#include <cmath>

#include "sdpa/fmha_fwd/kernel.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::fmha_fwd {

inline constexpr float kLog2e = 1.4426950408889634f;

// cp.async and the epilogue move 16 bytes at a time.
inline Status check_tensor(char const *name, void const *data, int64_t const (&stride)[3], int const (&extent)[3]) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: address %p must be a multiple of 16 bytes", name, data);
  static char const *const kAxis[3] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i) {
    if (extent[i] > 1 && stride[i] % 8 != 0)
      return make_status(SDPA_INVALID_ARGUMENT, "%s: %s stride %lld must be a multiple of 8 elements", name, kAxis[i],
                         static_cast<long long>(stride[i]));
  }
  return {};
}

template <class Traits>
Status can_implement(sdpa_params const &p) {
  if (p.is_causal != static_cast<int>(Traits::kIsCausal))
    return make_status(SDPA_NOT_SUPPORTED, "is_causal is %d; this kernel is built for %d", p.is_causal,
                       static_cast<int>(Traits::kIsCausal));
  if ((p.p_dropout > 0.f) != Traits::kHasDropout)
    return make_status(SDPA_NOT_SUPPORTED, "p_dropout is %g; this kernel is built %s dropout", p.p_dropout,
                       Traits::kHasDropout ? "with" : "without");
  if (!std::isfinite(p.softmax_scale))
    return make_status(SDPA_INVALID_ARGUMENT, "softmax_scale is %g; it must be finite", p.softmax_scale);
  if (p.seqlen_q > INT_MAX - 2 * Traits::kBlockM || p.seqlen_k > INT_MAX - 2 * Traits::kBlockN)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d must be below 2^31 - 256", p.seqlen_q,
                       p.seqlen_k);
  int64_t const ctas = (int64_t{p.seqlen_q} + Traits::kBlockM - 1) / Traits::kBlockM * p.batch * p.num_heads_q;
  if (ctas > INT_MAX)
    return make_status(SDPA_NOT_SUPPORTED, "batch %d, num_heads_q %d and seqlen_q %d make %lld CTAs; one launch has at most %d",
                       p.batch, p.num_heads_q, p.seqlen_q, static_cast<long long>(ctas), INT_MAX);
  int const extent_q[3] = {p.batch, p.num_heads_q, p.seqlen_q};
  int const extent_kv[3] = {p.batch, p.num_heads_kv, p.seqlen_k};
  Status status = check_tensor("q", p.q, p.q_stride, extent_q);
  if (status.ok()) status = check_tensor("k", p.k, p.k_stride, extent_kv);
  if (status.ok()) status = check_tensor("v", p.v, p.v_stride, extent_kv);
  if (status.ok()) status = check_tensor("out", p.out, p.out_stride, extent_q);
  return status;
}

template <class Traits>
Params to_params(sdpa_params const &p) {
  Params params;
  params.q = {const_cast<void *>(p.q), p.q_stride[0], p.q_stride[1], p.q_stride[2]};
  params.k = {const_cast<void *>(p.k), p.k_stride[0], p.k_stride[1], p.k_stride[2]};
  params.v = {const_cast<void *>(p.v), p.v_stride[0], p.v_stride[1], p.v_stride[2]};
  params.out = {p.out, p.out_stride[0], p.out_stride[1], p.out_stride[2]};
  params.softmax_lse = p.softmax_lse;
  params.lse_batch_stride = p.lse_stride[0];
  params.lse_head_stride = p.lse_stride[1];
  params.seqlen_q = p.seqlen_q;
  params.seqlen_k = p.seqlen_k;
  params.causal_offset = p.is_causal ? p.causal_offset : 0;
  if (p.is_causal) {
    int64_t const seen = static_cast<int64_t>(p.seqlen_q) + p.causal_offset;
    if (seen < params.seqlen_k) params.seqlen_k = seen > 0 ? static_cast<int32_t>(seen) : 0;
  }
  // A maximum needs a positive factor: a negative one gives its sign to Q, and 0 (uniform attention) becomes a factor
  // that no finite score survives.
  params.negate_q = p.softmax_scale < 0.f;
  params.softmax_scale_log2 = p.softmax_scale == 0.f ? 1e-30f : std::fabs(p.softmax_scale) * kLog2e;
  int const num_m_blocks = (p.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  params.scheduler = TileScheduler::make(num_m_blocks, p.batch, p.num_heads_q, p.num_heads_kv,
                                         int64_t{4} * params.seqlen_k * Traits::kHeadDim);
  return params;
}

template <class Traits, void (*kKernel)(Params)>
Status launch(sdpa_params const &p, void *stream) {
  Params const params = to_params<Traits>(p);
  int64_t const grid = int64_t{params.scheduler.num_m_blocks} * p.batch * p.num_heads_q;
  return Traits::Arch::launch(kKernel, Traits::kName, grid, Traits::kThreads, Traits::kSmemBytes, params, stream);
}

inline uint64_t no_workspace(sdpa_params const &) { return 0; }

// Traits adds kName to KernelTraits.
template <class Traits, void (*kKernel)(Params)>
KernelRow make_row() {
  KernelRow row = {};
  row.info.struct_size = sizeof(sdpa_kernel_info);
  row.info.dtype = std::is_same_v<typename Traits::Element, cutlass::half_t> ? SDPA_DTYPE_F16 : SDPA_DTYPE_BF16;
  row.info.name = Traits::kName;
  row.info.family = "fmha_fwd";
  row.info.arch = 89;
  row.info.head_dim = Traits::kHeadDim;
  row.info.block_m = Traits::kBlockM;
  row.info.block_n = Traits::kBlockN;
  row.info.stages = Traits::kStages;
  row.info.warps = Traits::kNWarps;
  row.info.kv_groups = Traits::kKvGroups;
  row.info.q_in_regs = Traits::kQInRegs;
  row.info.is_causal = Traits::kIsCausal;
  row.info.has_dropout = Traits::kHasDropout;
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.can_implement = can_implement<Traits>;
  row.workspace_bytes = no_workspace;
  row.launch = launch<Traits, kKernel>;
  row.kernel = reinterpret_cast<void const *>(kKernel);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_fwd
