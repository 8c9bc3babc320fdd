// What one launch of a fused kernel receives: pointers, strides in elements, lengths, and the scheduler's divisors.
// Made from the C ABI's sdpa_params by launch.cuh; holds no compile-time fact of any kernel.
// Plain kernels take Params, general ones GeneralParams, split ones SplitParams.
#pragma once

#include <cstdint>

#include <vector_types.h>

#include "sdpa/attention/tile_scheduler.cuh"

namespace sdpa {

struct TensorRef {
  void *data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;
};

struct Params {
  TensorRef q;         // [batch, num_heads_q, seqlen_q, head_dim]
  TensorRef k;         // [batch, num_heads_kv, seqlen_k, head_dim]
  TensorRef v;         // [batch, num_heads_kv, seqlen_k, head_dim]
  TensorRef out;       // [batch, num_heads_q, seqlen_q, head_dim]
  float *softmax_lse;  // [batch, num_heads_q, seqlen_q], or null
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  int32_t seqlen_q;
  int32_t seqlen_k;          // keys that at least one query sees
  int32_t causal_offset;     // key j is seen by row i when j <= i + causal_offset
  int32_t negate_q;          // softmax_scale was negative: its sign is moved to Q
  float softmax_scale_log2;  // > 0; with a bias log2(e), since bias and scores meet in natural units
  TileScheduler scheduler;
};

enum class MaskType : int32_t { kNone, kBool, kF16, kBf16, kF32 };

// What a function is compiled for; kBias16 serves fp16 and bf16.
enum class MaskKind { kNone, kBool, kBias16, kBias32 };

SDPA_HOST_DEVICE constexpr MaskKind mask_kind(MaskType type) {
  switch (type) {
    case MaskType::kNone: return MaskKind::kNone;
    case MaskType::kBool: return MaskKind::kBool;
    case MaskType::kF32: return MaskKind::kBias32;
    default: return MaskKind::kBias16;
  }
}

// A dense mask or bias, broadcast by strides of 0.
struct MaskRef {
  const char *data;
  int64_t batch_stride;  // bytes, like the others
  int64_t head_stride;
  int64_t row_stride;
  int64_t column_stride;
  MaskType type;
  int32_t is_vectorised;  // columns are neighbours and every run of a thread's columns starts aligned
  float scores_scale;     // with a bias: |softmax_scale|
};

// Lengths of the sequences of a batch in device memory; each pointer may be null.
struct LengthsRef {
  const int32_t *seqlens;     // [batch]
  const int32_t *cu_seqlens;  // [batch + 1], first rows of packed sequences
  int32_t total;              // rows of the packed tensor
};

struct DropoutRef {
  uint64_t philox_seed;
  uint64_t philox_offset;
  const uint64_t *philox_state;  // {seed, offset} in device memory, instead of the two above; or null
  uint32_t threshold_high;       // see dropout.cuh
  uint32_t threshold_low;
  float keep_scale;  // 1 / p_keep
};

// One logit a query head that joins the denominator and no sum: elements of 16 or 32 bits, or null.
struct SinksRef {
  const void *data;  // [num_heads_q]
  MaskType type;     // an element's
};

struct GeneralParams : Params {
  int32_t head_dim;    // of q and k, a multiple of 8, at most the kernel's
  int32_t head_dim_v;  // of v and out
  int32_t num_heads_q;
  int32_t is_causal;
  int32_t is_bottom_right;  // the offset is each sequence's own seqlen_k - seqlen_q, and not causal_offset
  int32_t window_left;      // row i sees key j when i + offset - window_left <= j <= i + offset + window_right;
  int32_t window_right;     // -1: no limit. 0 when causal
  SinksRef sinks;
  LengthsRef lengths_q;
  LengthsRef lengths_k;
  MaskRef mask;
  DropoutRef dropout;
};

// Where the CTAs that share a tile's keys meet; see split.cuh. A tile is one of num_m_blocks * batch * num_heads_kv.
struct SplitParams : GeneralParams {
  cutlass::FastDivmod heads_per_kv;
  cutlass::FastDivmod m_blocks;  // the scheduler counts m_blocks of all splits
  int32_t num_splits;
  int32_t sees_all;       // neither lengths, nor a causal mask, nor a window: every row sees every key
  float *partial_out;     // [tiles][num_splits][kBlockM][kHeadDim]
  float2 *partial_stats;  // [tiles][num_splits][kBlockM]: row_max in log2 units, row_sum
  uint32_t *arrivals;     // [tiles], zero before and after a launch
};

}  // namespace sdpa
