// From the C ABI's sdpa_params to Params: what every kernel of attention needs, in any family.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "sdpa/attention/constants.hpp"
#include "sdpa/attention/params.hpp"
#include "sdpa/c_api.h"

namespace sdpa {

// Traits: kBlockM and kHeadDim.
template <class Traits>
void set_params(Params &params, const sdpa_params &p) {
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
  if (p.is_causal && !p.causal_bottom_right) {
    const int64_t seen = static_cast<int64_t>(p.seqlen_q) + p.causal_offset;
    if (seen < params.seqlen_k) params.seqlen_k = seen > 0 ? static_cast<int32_t>(seen) : 0;
  }
  // A maximum needs a positive factor: a negative one gives its sign to Q, and 0 (uniform attention) becomes a factor
  // that hardly any finite score survives. An infinite one would make NaN of a score of 0.
  params.negate_q = p.softmax_scale < 0.f;
  params.softmax_scale_log2 =
      p.softmax_scale == 0.f ? FLT_MIN : std::fmin(std::fabs(p.softmax_scale) * kLog2e, FLT_MAX);
  const int num_m_blocks = (p.seqlen_q + Traits::kBlockM - 1) / Traits::kBlockM;
  params.scheduler = TileScheduler::make(num_m_blocks, p.batch, p.num_heads_q, p.num_heads_kv,
                                         int64_t{4} * params.seqlen_k * Traits::kHeadDim);
}

// The same for a general kernel, whatever its family. Masks and dropout are the family's.
template <class Traits>
void set_general_params(GeneralParams &params, const sdpa_params &p) {
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
  if (p.cu_seqlens_q) params.q.batch_stride = params.out.batch_stride = params.lse_batch_stride = 0;
  if (p.cu_seqlens_k) params.k.batch_stride = params.v.batch_stride = 0;
}

// Runs of a thread's columns start at multiples of `run` elements.
inline MaskRef to_mask(const sdpa_params &p, int run) {
  constexpr int kBytes[] = {0, 1, 2, 2, 4};
  const int bytes = kBytes[p.mask_type];
  MaskRef mask = {};
  mask.data = static_cast<const char *>(p.mask);
  mask.type = static_cast<MaskType>(p.mask_type);
  mask.batch_stride = p.mask_stride[0] * bytes;
  mask.head_stride = p.mask_stride[1] * bytes;
  mask.row_stride = p.mask_stride[2] * bytes;
  mask.column_stride = p.mask_stride[3] * bytes;
  mask.scores_scale = std::fabs(p.softmax_scale);
  const int64_t alignment = run * bytes < 16 ? run * bytes : 16;
  const int64_t all = reinterpret_cast<int64_t>(p.mask) | (p.batch > 1 ? mask.batch_stride : 0) |
                      (p.num_heads_q > 1 ? mask.head_stride : 0) | (p.seqlen_q > 1 ? mask.row_stride : 0);
  mask.is_vectorised = mask.column_stride == bytes && (all & (alignment - 1)) == 0 && mask.row_stride >= 0 &&
                       mask.row_stride <= INT32_MAX;
  return mask;
}

// The 16 bits of `low`, from the highest on, at bits 31-28, 23-20, 15-12 and 7-4: where a Philox block has its top
// bits after dropout.cuh has shifted them together.
inline uint32_t spread(uint32_t low) {
  uint32_t bits = 0;
  for (int nibble = 0; nibble < 4; ++nibble) bits |= (low >> (4 * nibble) & 0xfu) << (8 * nibble + 4);
  return bits;
}

inline DropoutRef to_dropout(const sdpa_params &p) {
  const double scaled = std::nearbyint(std::ldexp(static_cast<double>(p.p_dropout), 23));
  const auto threshold = static_cast<uint32_t>(scaled < 8388607. ? scaled : 8388607.);
  return {p.philox_seed,
          p.philox_offset,
          p.philox_state,
          threshold >> 16,
          spread(threshold & 0xffffu),
          1.f / (1.f - p.p_dropout)};
}

}  // namespace sdpa
