// What the two launches of one quantised problem receive: what general kernels of attention do, and where the workspace
// holds the quantised keys and values. `Workspace` divides it; the kernels know nothing else of its layout.
//
//   k_hat      s8 [heads, rows, kHeadDim]               v_hat      s8 [heads, kHeadDim, rows]: transposed
//   k_scale    f32 [heads, rows / 64, 4]: of the keys 16 i + 4 l + {0, 1, 2, 3} of a block of 64, l = 0 ... 3
//   v_log2     f32 [heads, rows]: log2 of a token's scale st
//   v_inverse  f32 [heads, rows]: kInverseUnit / st
//   k_mean     f32 [batch, num_heads_kv, kHeadDim]: what was subtracted from every key
//
// `heads` counts batch and key heads, and `rows` are seqlen_k rounded up to whole blocks. Packed sequences share one
// batch, and sequence b starts at row 64 (first_row_k / 64 + b): so none overlaps another, whatever the lengths are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sdpa/arch/target.hpp"
#include "sdpa/attention/params.hpp"
#include "sdpa/attention/sequence.cuh"
#include "sdpa/c_api.h"

namespace sdpa::fmha_fwd_q8 {

inline constexpr int kBlock = 64;  // keys that share a block: of the attention's loop, of groups, of zero tokens

// int8_qk: Q Kᵀ of bytes, P V of the input type. int8: both of bytes.
enum class Math { kInt8Qk, kInt8 };

struct QuantizedParams : GeneralParams {
  int8_t *k_hat;
  int8_t *v_hat;
  float *k_scale;
  float *v_log2;
  float *v_inverse;
  float *k_mean;
  int64_t rows;
  int32_t num_heads_kv;
  int32_t key_blocks;  // that seqlen_k has at most

  SDPA_DEVICE bool is_packed() const { return lengths_k.cu_seqlens != nullptr; }

  // Of all heads in the workspace, the one that holds a sequence's keys, and the block of it where they start.
  SDPA_DEVICE int head(int bidb, int bidh_kv) const { return is_packed() ? bidh_kv : bidb * num_heads_kv + bidh_kv; }
  SDPA_DEVICE int first_block(const Sequence &sequence, int bidb) const {
    return is_packed() ? static_cast<int>(sequence.first_row_k / kBlock) + bidb : 0;
  }

  // The first row of a block, counted over all heads, and its first byte in row 0 of its head's V̂ [kHeadDim, rows].
  SDPA_DEVICE int64_t row(int head, int block) const { return head * rows + int64_t{kBlock} * block; }
  template <int kHeadDim>
  SDPA_DEVICE int64_t byte_of_v(int head, int block) const {
    return head * rows * kHeadDim + int64_t{kBlock} * block;
  }
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Offsets of the parts of the workspace, in bytes, and its size.
struct Workspace {
  int64_t rows;
  uint64_t v_hat, k_scale, v_log2, v_inverse, k_mean, bytes;

  template <Math kMath, int kHeadDim>
  static Workspace make(const sdpa_params &p) {
    constexpr uint64_t kAlignment = 256;
    const bool is_packed = p.cu_seqlens_k != nullptr;
    const int64_t blocks = is_packed ? int64_t{p.total_k} / kBlock + p.batch + 1 : ceil_div(p.seqlen_k, kBlock);
    const auto heads = static_cast<uint64_t>(is_packed ? p.num_heads_kv : int64_t{p.num_heads_kv} * p.batch);
    const uint64_t of_all = heads * static_cast<uint64_t>(blocks) * kBlock;  // rows of all heads
    Workspace w;
    w.rows = blocks * kBlock;
    uint64_t end = 0;
    const auto take = [&](uint64_t bytes) {
      const uint64_t begin = end;
      end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return begin;
    };
    take(of_all * kHeadDim);  // k_hat
    w.v_hat = take(kMath == Math::kInt8 ? of_all * kHeadDim : 0);
    w.k_scale = take(of_all / 16 * sizeof(float));
    w.v_log2 = take(kMath == Math::kInt8 ? of_all * sizeof(float) : 0);
    w.v_inverse = take(kMath == Math::kInt8 ? of_all * sizeof(float) : 0);
    w.k_mean = take(static_cast<uint64_t>(p.batch) * static_cast<uint64_t>(p.num_heads_kv) * kHeadDim * sizeof(float));
    w.bytes = end;
    return w;
  }
};

}  // namespace sdpa::fmha_fwd_q8
