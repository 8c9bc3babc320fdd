// What one launch of a fused kernel receives: pointers, strides in elements, lengths, and the scheduler's divisors.
// Made from the C ABI's sdpa_params by launch.cuh; holds no compile-time fact of any kernel.
#pragma once

#include <cstdint>

#include "sdpa/fmha_fwd/tile_scheduler.cuh"

namespace sdpa::fmha_fwd {

struct TensorRef {
  void *data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

struct Params {
  TensorRef q;    // [batch, num_heads_q, seqlen_q, head_dim]
  TensorRef k;    // [batch, num_heads_kv, seqlen_k, head_dim]
  TensorRef v;    // [batch, num_heads_kv, seqlen_k, head_dim]
  TensorRef out;  // [batch, num_heads_q, seqlen_q, head_dim]
  float *softmax_lse;  // [batch, num_heads_q, seqlen_q], or null
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  int32_t seqlen_q;
  int32_t seqlen_k;       // keys that at least one query sees
  int32_t causal_offset;  // key j is seen by row i when j <= i + causal_offset
  int32_t negate_q;       // softmax_scale was negative: its sign is moved to Q
  float softmax_scale_log2;  // > 0
  TileScheduler scheduler;
};

}  // namespace sdpa::fmha_fwd
