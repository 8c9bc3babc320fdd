// What one launch of the backward receives: everything of the forward that it follows, and what belongs to gradients.
// Made from the C ABI's sdpa_bwd_params by launch.cuh; holds no compile-time fact of any kernel.
//
// Of GeneralParams: `out` and `softmax_lse` are the forward's results, softmax_scale_log2 has the sign of the scale, and
// `scheduler` counts tiles of query rows.
#pragma once

#include <cstdint>

#include <cutlass/fast_math.h>

#include "sdpa/attention/params.hpp"

namespace sdpa::fmha_bwd {

// Row statistics are padded to a multiple of this, so that every tile of rows reads whole vectors of them.
inline constexpr int kPaddedRows = 128;

struct Params : GeneralParams {
  TensorRef dout;      // [batch, num_heads_q, seqlen_q, head_dim_v]
  TensorRef dq;        // like q; null data: not asked for
  TensorRef dk;        // like k
  TensorRef dv;        // like v
  const float *dlse;   // strides of softmax_lse; or null
  float2 *statistics;  // [batch, num_heads_q, padded_rows]: see preprocess.cuh
  int32_t padded_rows;
  int32_t heads_per_kv;
  float score_scale;  // of dq and dk: softmax_scale / p_keep
  float p_keep;
  int32_t num_key_tiles;                // CTAs of each role that owns keys; those that make dq follow
  TileScheduler key_scheduler;          // counts tiles of keys
  cutlass::FastDivmod statistics_ctas;  // of one head, in the launch that makes the statistics
  cutlass::FastDivmod heads_q;
};

}  // namespace sdpa::fmha_bwd
