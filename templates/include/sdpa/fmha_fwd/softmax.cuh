// Streaming softmax over key blocks (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022).
//
//   P = exp2(scale_log2 · S - row_max)     row_sum += Σ_j P     O += P V
//
// row_max is a running reference in log2 units, not always the exact maximum: it only moves when some score of the
// warp exceeds it by more than kSlack (Dao's FlashAttention-4 does the same), and then O and row_sum are rescaled by
// exp2(old - new). Until then P may reach 2^kSlack, which fp16 and bf16 hold with full precision; the final division
// by row_sum makes the result exact whatever the reference. So the common block needs no shuffle and no rescale.
//
// The product in P is not rounded, that in row_max is: they differ by up to half a unit in the last place of row_max.
// Above kSharp that would show in the output, since the weight of a row's largest score would not be 1, and far above
// it P would overflow. A warp with such a reference is sharp: its products are rounded, too, before row_max is taken
// away.
//
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
  // Up to here a residue of half a unit in the last place moves P by less than a quarter of fp16's unit.
  static constexpr float kSharp = 4096.f;
  static constexpr float kLargest = 1.4426950e38f;  // 1e38 in log2 units: larger scores with a bias count as this
  static constexpr float kLow = -1e37f;             // a bias below it may overflow in log2 units
  static constexpr float kLn2 = 0.6931471805599453f;

  float row_max[kRows];  // log2 units
  float row_sum[kRows];

  // Of the warp. While it is sharp, every block takes the branch that moves references, and leaves it in log2 units.
  float slack = kSlack;
  float score_scale;

  SDPA_DEVICE explicit Softmax(float softmax_scale_log2) : score_scale(softmax_scale_log2) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      row_max[i] = kNoKey;
      row_sum[i] = 0.f;
    }
  }

  // scores (kRows, cols): S → P. out (kRows, head_dim part): rescaled where the reference moved. With kHasBias, S may
  // hold the least float there is, a common way to write "not seen", as the only score of a row.
  template <bool kHasBias, class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float softmax_scale_log2) {
    float block_max[kRows];  // of this lane's columns
    bool moves = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      block_max[i] = scores(i, 0);
      CUTE_UNROLL
      for (int j = 1; j < size<1>(scores); ++j) block_max[i] = fmaxf(block_max[i], scores(i, j));
      moves |= block_max[i] * softmax_scale_log2 > row_max[i] + slack;
      if constexpr (kHasBias) moves |= block_max[i] < kLow && block_max[i] != -INFINITY;
    }
    if (Arch::any(moves)) {
      bool const is_sharp = move_reference<kHasBias>(block_max, out, softmax_scale_log2);
      slack = is_sharp ? -INFINITY : kSlack;
      score_scale = is_sharp ? 1.f : softmax_scale_log2;
      if (is_sharp) {
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          CUTE_UNROLL
          for (int j = 0; j < size<1>(scores); ++j) scores(i, j) = to_log2<kHasBias>(scores(i, j), softmax_scale_log2);
        }
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2(fmaf(scores(i, j), score_scale, -row_max[i]));
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
  // A score in log2 units, rounded. The least float as a bias would be infinite in them; infinities stay what they are.
  template <bool kHasBias>
  SDPA_DEVICE static float to_log2(float score, float softmax_scale_log2) {
    float const product = score * softmax_scale_log2;
    if (!kHasBias || fabsf(score) == INFINITY) return product;
    return fmaxf(fminf(product, kLargest), -kLargest);
  }

  // True in all lanes when the warp is sharp then.
  template <bool kHasBias, class Out>
  SDPA_DEVICE bool move_reference(float const (&block_max)[kRows], Out &out, float softmax_scale_log2) {
    bool is_large = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float max = to_log2<kHasBias>(block_max[i], softmax_scale_log2);
      max = fmaxf(max, Arch::shfl_xor(max, 2));
      max = fmaxf(row_max[i], fmaxf(max, Arch::shfl_xor(max, 1)));
      float const scores_scale = Arch::exp2(row_max[i] - max);
      row_max[i] = max;
      row_sum[i] *= scores_scale;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(out); ++j) out(i, j) *= scores_scale;
      is_large |= fabsf(max) > kSharp && max != kNoKey;
    }
    return Arch::any(is_large);
  }
};

}  // namespace sdpa::fmha_fwd
