// Streaming softmax over key blocks (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//
//   P = exp2(scale_log2 · S - row_max)     row_sum += Σ_j P     O += P V
//
// row_max is a running reference in log2 units, not always the exact maximum: it only moves when some score of the
// warp exceeds it by more than kSlack (Dao's FlashAttention-4 does the same), and then O and row_sum are rescaled by
// exp2(old - new). Until then P may reach 2^kSlack, which fp16 and bf16 hold with full precision; the final division
// by row_sum makes the result exact whatever the reference. So the common block needs no shuffle and no rescale.
// The multiply-add does not round scale_log2 · S and row_max has, so the largest P of a row is off by up to half a unit
// in the last place of row_max. Where that could be seen, blocks are *sharp*: see kSharp.
// One thread holds kRows rows of scores, each shared with the three other lanes of its quad; row_sum stays a lane's
// own part until `finish`.
#pragma once

#include <cmath>

#include <cute/tensor.hpp>

#include "sdpa/arch/target.hpp"
#include "sdpa/attention/constants.hpp"

namespace sdpa {

using namespace cute;

// Accumulator ((2, 2), MMA_M, MMA_N) → (rows, cols) = ((2, MMA_M), (2, MMA_N))
template <class Layout_>
SDPA_HOST_DEVICE auto accumulator_rows_cols(const Layout_ &acc) {
  return make_layout(make_layout(get<0, 1>(acc), get<1>(acc)), make_layout(get<0, 0>(acc), get<2>(acc)));
}

// Accumulator ((2, 2), MMA_M, MMA_N) → A operand of m16n8k16 ((2, 2, 2), MMA_M, MMA_N / 2), same registers
template <class Layout_>
SDPA_HOST_DEVICE auto accumulator_as_operand_a(const Layout_ &acc) {
  const auto l = logical_divide(acc, Shape<Underscore, Underscore, _2>{});  // ((2, 2), MMA_M, (2, MMA_N / 2))
  return make_layout(make_layout(get<0, 0>(l), get<0, 1>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

template <class Arch, int kRows>
struct Softmax {
  // Below every score, so that a row without keys keeps P = exp2(-inf - kNoKey) = 0 and not NaN.
  static constexpr float kNoKey = -1.7e38f;
  static constexpr float kSlack = 8.f;
  // While a warp has a row whose reference is larger than this, in log2 units, its blocks are sharp: all references
  // follow their maxima, and the products are rounded before the reference is subtracted, as they were in it. So the
  // largest P is exactly 1, however large the scores.
  static constexpr float kSharp = 1024.f;
  static constexpr float kLargest = 1e38f;  // times log2(e), above kNoKey

  float row_max[kRows];  // log2 units
  float row_sum[kRows];

  SDPA_DEVICE Softmax() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = kNoKey;
      row_sum[i] = 0.f;
    }
  }

  // scores (kRows, cols): S → P. out (kRows, head_dim part): rescaled where the reference moved. A warp with a row that
  // has no key yet takes the rare branch, in which nothing happens to that row. With kHasBias that may last for many
  // blocks, so it is avoided.
  template <bool kHasBias, class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float softmax_scale_log2) {
    float block_max[kRows];  // of this lane's columns
    bool moves = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      block_max[i] = scores(i, 0);
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) block_max[i] = fmaxf(block_max[i], scores(i, j));
      moves |= block_max[i] * softmax_scale_log2 - row_max[i] > kSlack;
      moves |= fabsf(row_max[i]) > kSharp && (!kHasBias || block_max[i] > -INFINITY);
    }
    float factor = softmax_scale_log2;  // of what `scores` holds
    if (Arch::any(moves)) {
      const bool is_sharp = move_reference<kHasBias>(block_max, out, softmax_scale_log2);
      if (is_sharp) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          CUTE_UNROLL
          for (int j = 0; j < size<1>(scores); ++j) scores(i, j) = to_log2<kHasBias>(scores(i, j), softmax_scale_log2);
        }
        factor = 1.f;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2(fmaf(scores(i, j), factor, -row_max[i]));
        row_sum[i] += scores(i, j);
      }
    }
  }

  // Completes the row sums across the quad.
  SDPA_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_sum[i] = across_quad(row_sum[i]);
  }

  SDPA_DEVICE static float across_quad(float sum) {
    sum += Arch::shfl_xor(sum, 2);
    return sum + Arch::shfl_xor(sum, 1);
  }

  SDPA_DEVICE static float inverse(float sum) { return sum == 0.f ? 0.f : Arch::reciprocal(sum); }

  SDPA_DEVICE static float lse(float max, float sum) { return sum == 0.f ? -INFINITY : (max + Arch::log2(sum)) * kLn2; }

 private:
  // Only biases make finite scores beyond kLargest: the lowest finite number is a common way to write "not seen". Those
  // count as kLargest. Infinities and NaN stay what they are.
  template <bool kHasBias>
  SDPA_DEVICE static float to_log2(float score, float softmax_scale_log2) {
    if (kHasBias && fabsf(score) > kLargest && fabsf(score) != INFINITY) score = copysignf(kLargest, score);
    return Arch::multiply(score, softmax_scale_log2);
  }

  // True, in all lanes, when the block is sharp. A lane asks that of its own columns, so that the answer does not wait for
  // the other lanes. A warp whose rows have no key yet has nothing to rescale.
  template <bool kHasBias, class Out>
  SDPA_DEVICE bool move_reference(const float (&block_max)[kRows], Out &out, float softmax_scale_log2) {
    float max[kRows], factors[kRows];
    bool is_large = false, has_keys = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      max[i] = fmaxf(row_max[i], to_log2<kHasBias>(block_max[i], softmax_scale_log2));
      is_large |= fabsf(max[i]) > kSharp && max[i] != kNoKey;
      has_keys |= row_max[i] != kNoKey;
    }
    const bool is_sharp = Arch::any(is_large);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      max[i] = fmaxf(max[i], Arch::shfl_xor(max[i], 2));
      max[i] = fmaxf(max[i], Arch::shfl_xor(max[i], 1));
      factors[i] = Arch::exp2(row_max[i] - max[i]);
      row_max[i] = max[i];
      row_sum[i] *= factors[i];
    }
    if (!Arch::any(has_keys)) return is_sharp;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(out); ++j) out(i, j) *= factors[i];
    }
    return is_sharp;
  }
};

}  // namespace sdpa
