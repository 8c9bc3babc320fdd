// Streaming softmax over key blocks (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//
//   P = exp2(scale_log2 · S - row_max)     row_sum += Σ_j P     O += P V
//
// row_max is a running reference in log2 units, not always the exact maximum: it only moves when some score of the
// warp exceeds it by more than kSlack (Dao's FlashAttention-4 does the same), and then O and row_sum are rescaled by
// exp2(old - new). Until then P may reach 2^kSlack, which fp16 and bf16 hold with full precision; the final division
// by row_sum makes the result exact whatever the reference. So the common block needs no shuffle and no rescale.
// One thread holds kRows rows of scores, each shared with the three other lanes of its quad; row_sum stays a lane's
// own part until `finish`.
#pragma once

#include <cmath>

#include <cute/tensor.hpp>

#include "sdpa/arch/target.hpp"

namespace sdpa::fmha_fwd {

using namespace cute;

// Accumulator ((2, 2), MMA_M, MMA_N) → (rows, cols) = ((2, MMA_M), (2, MMA_N))
template <class Layout_>
SDPA_HOST_DEVICE auto accumulator_rows_cols(Layout_ const &acc) {
  return make_layout(make_layout(get<0, 1>(acc), get<1>(acc)), make_layout(get<0, 0>(acc), get<2>(acc)));
}

// Accumulator ((2, 2), MMA_M, MMA_N) → A operand of m16n8k16 ((2, 2, 2), MMA_M, MMA_N / 2), same registers
template <class Layout_>
SDPA_HOST_DEVICE auto accumulator_as_operand_a(Layout_ const &acc) {
  auto const l = logical_divide(acc, Shape<Underscore, Underscore, _2>{});  // ((2, 2), MMA_M, (2, MMA_N / 2))
  return make_layout(make_layout(get<0, 0>(l), get<0, 1>(l), get<2, 0>(l)), get<1>(l), get<2, 1>(l));
}

template <class Arch, int kRows>
struct Softmax {
  // Below every finite score, so that a row without keys keeps P = exp2(-inf - kNoKey) = 0 and not NaN.
  static constexpr float kNoKey = -1.7e38f;
  static constexpr float kSlack = 8.f;
  static constexpr float kHuge = 16777216.f;  // 2^24
  static constexpr float kLargest = 1e38f;    // times log2(e), above kNoKey
  static constexpr float kLn2 = 0.6931471805599453f;

  float row_max[kRows];  // log2 units
  float row_sum[kRows];

  SDPA_DEVICE Softmax() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = kNoKey;
      row_sum[i] = 0.f;
    }
  }

  // scores (kRows, cols): S → P. out (kRows, head_dim part): rescaled where the reference moved. With kHasBias, S may
  // hold the largest floats there are: see `to_log2`.
  template <bool kHasBias, class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float softmax_scale_log2) {
    float block_max[kRows];  // of this lane's columns
    bool is_huge = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      block_max[i] = scores(i, 0);
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) block_max[i] = fmaxf(block_max[i], scores(i, j));
      is_huge |= fabsf(block_max[i]) > kHuge && fabsf(block_max[i]) != INFINITY;
    }
    if (kHasBias && Arch::any(is_huge)) {
      to_log2(scores, block_max, softmax_scale_log2);
      softmax_scale_log2 = 1.f;
    }
    bool exceeds = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      block_max[i] *= softmax_scale_log2;
      exceeds |= block_max[i] > row_max[i] + kSlack;
    }
    if (Arch::any(exceeds)) move_reference(block_max, out);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2(scores(i, j) * softmax_scale_log2 - row_max[i]);
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
  // Large negative biases, -1e9 or the least finite number, are a common way to write "not seen". For a row that has no
  // other keys, the exact product in `scale_log2 · S - row_max` and the rounded one in row_max would differ by more than
  // an exponent holds, and the least numbers overflow in log2 units. So such blocks are brought to log2 units first,
  // rounded alike and cut to what does not overflow. Rows that also have other keys are not changed by that; infinities
  // stay what they are.
  template <class Scores>
  SDPA_DEVICE static void to_log2(Scores &scores, float (&block_max)[kRows], float softmax_scale_log2) {
    auto const convert = [&](float &x) SDPA_INLINE_LAMBDA {
      if (fabsf(x) != INFINITY) x = fmaxf(fminf(x, kLargest), -kLargest) * softmax_scale_log2;
    };
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      convert(block_max[i]);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) convert(scores(i, j));
    }
  }

  template <class Out>
  SDPA_DEVICE void move_reference(float const (&block_max)[kRows], Out &out) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float max = fmaxf(block_max[i], Arch::shfl_xor(block_max[i], 2));
      max = fmaxf(row_max[i], fmaxf(max, Arch::shfl_xor(max, 1)));
      float const scores_scale = Arch::exp2(row_max[i] - max);
      row_max[i] = max;
      row_sum[i] *= scores_scale;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(out); ++j) out(i, j) *= scores_scale;
    }
  }
};

}  // namespace sdpa::fmha_fwd
