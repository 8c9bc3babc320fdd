// The middle of the baseline: every row of logits becomes a row of probabilities, in place.
//
//   P[i, j] = 2^15 * exp(S[i, j] - max_j S[i, j]) / sum_j exp(...)   for the keys j that row i sees, 0 elsewhere
//   softmax_lse[i] = max + ln(sum), -inf for a row that sees nothing
//
// S is fp16 or fp32, P fp16 at the start of the row's memory; arithmetic is fp32. Every access is 16 bytes, except where
// a row's keys end within such a vector. A row that fits in registers passes through memory once: a warp holds up to
// 1024 elements, a CTA up to 8192. Longer rows are read twice. Zeros are written as far as the second GEMM reads
// (KeyRange::depth_of_tile), so what CUTLASS left in the padding, and the tiles that a causal first GEMM skipped, never
// matter.
#pragma once

#include <cuda_fp16.h>

#include "sdpa/attention/constants.hpp"
#include "sdpa/unfused/problem.hpp"

namespace sdpa::unfused {

struct SoftmaxParams {
  void *logits;        // [num_rows, ld]
  int64_t ld;          // elements of the logits' type
  float *softmax_lse;  // or null
  int64_t lse_batch_stride;
  int64_t lse_head_stride;
  KeyRange keys;
  int32_t num_rows;  // batch * num_heads * seqlen_q
  int32_t num_heads;
  int32_t pv_block_m;  // the second GEMM's tile
  int32_t pv_block_k;
};

CUTLASS_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Eight logits. An fp16 logit that overflowed counts as the largest finite one; NaN stays NaN.
CUTLASS_DEVICE void load_logits(const __half *from, float (&x)[kVectorElements]) {
  const uint4 raw = *reinterpret_cast<const uint4 *>(from);
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    __half2 pair;
    memcpy(&pair, &words[i], sizeof(pair));
    pair = __hmax2_nan(__hmin2_nan(pair, __float2half2_rn(kMaxHalf)), __float2half2_rn(-kMaxHalf));
    const float2 both = __half22float2(pair);
    x[2 * i] = both.x;
    x[2 * i + 1] = both.y;
  }
}

CUTLASS_DEVICE void load_logits(const float *from, float (&x)[kVectorElements]) {
  const float4 low = reinterpret_cast<const float4 *>(from)[0];
  const float4 high = reinterpret_cast<const float4 *>(from)[1];
  const float all[kVectorElements] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kVectorElements; ++i) x[i] = all[i];
}

CUTLASS_DEVICE float load_logit(const __half *from) {
  return __half2float(__hmax_nan(__hmin_nan(*from, __float2half_rn(kMaxHalf)), __float2half_rn(-kMaxHalf)));
}
CUTLASS_DEVICE float load_logit(const float *from) { return *from; }

// The logits at [col, col + 8), -inf where the row sees no key. Nothing is read behind its last key.
template <class Logit>
CUTLASS_DEVICE void load_visible(const Logit *row, int col, int num_keys, float (&x)[kVectorElements]) {
  if (col + kVectorElements <= num_keys) {
    load_logits(row + col, x);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) x[i] = col + i < num_keys ? load_logit(row + col + i) : -INFINITY;
  }
}

CUTLASS_DEVICE void store_probs(__half *to, const float (&p)[kVectorElements]) {
  uint32_t words[4];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const __half2 pair = __floats2half2_rn(p[2 * i], p[2 * i + 1]);
    memcpy(&words[i], &pair, sizeof(pair));
  }
  *reinterpret_cast<uint4 *>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

// All threads of a row get the result. With more than a warp it holds one barrier, after which every load of the row
// that fed `x` is complete; `scratch` must not be in use.
template <int kThreads, class Op>
CUTLASS_DEVICE float reduce_row(float x, float *scratch, Op op) {
  CUTLASS_PRAGMA_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) x = op(x, __shfl_xor_sync(0xffffffffu, x, mask));
  if constexpr (kThreads > 32) {
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
    CUTLASS_PRAGMA_UNROLL
    for (int warp = 1; warp < kThreads / 32; ++warp) x = op(x, scratch[warp]);
  }
  return x;
}

struct Max {
  CUTLASS_DEVICE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  CUTLASS_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Where one row's data lies and how far it reaches.
template <class Logit>
struct Row {
  Logit *logits;
  __half *probs;
  int num_keys;  // keys that the row sees
  int zero_end;  // P is written up to here, a multiple of 8 that never exceeds the row's ld

  CUTLASS_DEVICE Row(const SoftmaxParams &params, int row) {
    logits = static_cast<Logit *>(params.logits) + row * params.ld;
    probs = reinterpret_cast<__half *>(logits);
    const int row_in_head = row % params.keys.seqlen_q;
    num_keys = params.keys.keys_seen_by(row_in_head);
    const int depth = params.keys.depth_of_tile(row_in_head / params.pv_block_m, params.pv_block_m, params.pv_block_k);
    zero_end = (depth + kVectorElements - 1) / kVectorElements * kVectorElements;
  }

  CUTLASS_DEVICE static void store_lse(const SoftmaxParams &params, int row, float row_max, float row_sum) {
    if (params.softmax_lse == nullptr) return;
    const int bidbh = row / params.keys.seqlen_q;
    params.softmax_lse[bidbh / params.num_heads * params.lse_batch_stride +
                       bidbh % params.num_heads * params.lse_head_stride + row % params.keys.seqlen_q] =
        row_sum == 0.f ? -INFINITY : row_max + logf(row_sum);
  }
};

// A maximum that can be subtracted: rows without a finite logit have -inf.
CUTLASS_DEVICE float finite_max(float row_max) { return row_max == -INFINITY ? 0.f : row_max; }

CUTLASS_DEVICE float probs_factor(float row_sum) { return row_sum == 0.f ? 0.f : kProbsScale / row_sum; }

constexpr int softmax_cta_threads(int threads_per_row) { return threads_per_row < 128 ? 128 : threads_per_row; }

// Rows of up to 8 * kThreadsPerRow * kVectors elements.
template <class Logit, int kThreadsPerRow, int kVectors>
__global__ void __launch_bounds__(softmax_cta_threads(kThreadsPerRow))
    unfused_softmax(const __grid_constant__ SoftmaxParams params) {
  constexpr int kRowsPerCta = softmax_cta_threads(kThreadsPerRow) / kThreadsPerRow;
  __shared__ float scratch[2][kThreadsPerRow / 32];
  const int lane = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const int64_t row_index = int64_t{blockIdx.x} * kRowsPerCta + threadIdx.x / kThreadsPerRow;
  if (row_index >= params.num_rows) return;
  const int row_id = static_cast<int>(row_index);
  const Row<Logit> row(params, row_id);

  float x[kVectors][kVectorElements];
  float row_max = -INFINITY;
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    load_visible(row.logits, (v * kThreadsPerRow + lane) * kVectorElements, row.num_keys, x[v]);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) row_max = fmaxf(row_max, x[v][i]);
  }
  row_max = finite_max(reduce_row<kThreadsPerRow>(row_max, scratch[0], Max{}));

  float row_sum = 0.f;
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    if ((v * kThreadsPerRow + lane) * kVectorElements < row.num_keys) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectorElements; ++i) {
        x[v][i] = exp2_approx(x[v][i] * kLog2e - row_max * kLog2e);
        row_sum += x[v][i];
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectorElements; ++i) x[v][i] = 0.f;
    }
  }
  row_sum = reduce_row<kThreadsPerRow>(row_sum, scratch[1], Sum{});

  const float factor = probs_factor(row_sum);
  CUTLASS_PRAGMA_UNROLL
  for (int v = 0; v < kVectors; ++v) {
    const int col = (v * kThreadsPerRow + lane) * kVectorElements;
    if (col >= row.zero_end) continue;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) x[v][i] *= factor;
    store_probs(row.probs + col, x[v]);
  }
  if (lane == 0) Row<Logit>::store_lse(params, row_id, row_max, row_sum);
}

inline constexpr int kLongRowThreads = 512;

// Rows of any length, one CTA each: an online maximum and sum, then a second pass.
template <class Logit>
__global__ void __launch_bounds__(kLongRowThreads) unfused_softmax_long(const __grid_constant__ SoftmaxParams params) {
  constexpr int kStep = kLongRowThreads * kVectorElements;
  __shared__ float scratch[2][kLongRowThreads / 32];
  const int row_id = static_cast<int>(blockIdx.x);
  const int lane_col = static_cast<int>(threadIdx.x) * kVectorElements;
  const Row<Logit> row(params, row_id);

  float thread_max = -INFINITY;
  float thread_sum = 0.f;
  for (int64_t start = 0; start + lane_col < row.num_keys; start += kStep) {
    float x[kVectorElements];
    load_visible(row.logits, static_cast<int>(start) + lane_col, row.num_keys, x);
    float new_max = thread_max;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) new_max = fmaxf(new_max, x[i]);
    const float shift = finite_max(new_max) * kLog2e;
    thread_sum *= exp2_approx(thread_max * kLog2e - shift);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) thread_sum += exp2_approx(x[i] * kLog2e - shift);
    thread_max = new_max;
  }
  const float row_max = finite_max(reduce_row<kLongRowThreads>(thread_max, scratch[0], Max{}));
  const float thread_scale = exp2_approx(thread_max * kLog2e - row_max * kLog2e);
  const float row_sum = reduce_row<kLongRowThreads>(thread_sum * thread_scale, scratch[1], Sum{});

  const float factor = probs_factor(row_sum);
  for (int64_t start = 0; start < row.zero_end; start += kStep) {
    const int64_t col = start + lane_col;
    float x[kVectorElements];
    if (col < row.zero_end) load_visible(row.logits, static_cast<int>(col), row.num_keys, x);
    // P's first half of the step covers the fp32 logits of the step: all must be read before any is written. Later
    // steps' logits lie past what this step writes.
    if (sizeof(Logit) > sizeof(__half)) __syncthreads();
    if (col >= row.zero_end) continue;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVectorElements; ++i) {
      x[i] = col + i < row.num_keys ? exp2_approx(x[i] * kLog2e - row_max * kLog2e) * factor : 0.f;
    }
    store_probs(row.probs + col, x);
  }
  if (threadIdx.x == 0) Row<Logit>::store_lse(params, row_id, row_max, row_sum);
}

}  // namespace sdpa::unfused
