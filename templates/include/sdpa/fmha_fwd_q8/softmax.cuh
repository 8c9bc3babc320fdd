// Streaming softmax of integer sums: S from Q̂ K̂ᵀ becomes P, and O and the statistics follow a reference that moves.
//
// The sums arrive as floats kMagic + S. With c = min(q_scale · k_scale, kCap), one number for the 16 keys of a block that
// a lane holds of a row, S · c are the logits in log2 units. Two ways from there, by what multiplies V:
//
//   16 bits   P = exp2(S c - row_max),   row_sum += Σ P,   O += P V
//   bytes     x' = S c + log2 st,   r = max of x' in this block,   P̂ = rint(252 · exp2(x' - r))   as u8
//             O += exp2(r - row_max) P̂ V̂,   row_sum += exp2(r - row_max) Σ exp2(x' - r) / st      of P before rounding
//
// Where the 16 tokens of every lane share a scale, log2 st joins the subtrahend instead, and Σ is of P alone.
// row_max is a running reference as in attention/softmax.cuh: it only moves when it is exceeded by more than kSlack, and
// then O and row_sum are rescaled. P̂ refers to the block's own exact maximum instead, so none exceeds 252 by more than
// rounding allows, and the token that weighs most has full precision. kMagic · c goes into the subtrahend: both floats
// differ from exact arithmetic by half a unit of kMagic · c < 2^17, 2^-7 at most, which kCap sees to.
//
// With kShiftsO the sums of P̂ V̂ arrive as kMagic + P̂ V̂ too, and O takes them so. `shift` is what O is too large by, from
// the same operations, so that V of zeros leaves exactly 0. It leaves O whenever that is rescaled, and every kTerms
// blocks: until then rounding costs a block 16 at most, in units of the heaviest one, where half a step of V̂ under the
// largest P̂ is 126.
//
// Unseen scores are -inf, set once the sums are floats. A block without keys has r = kNoKey, which is row_max's floor too:
// with two floors exp2(r - row_max) might be infinite.
#pragma once

#include <cmath>

#include <cute/tensor.hpp>

#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_fwd_q8/kernel_traits.cuh"
#include "sdpa/fmha_fwd_q8/rounding.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct QuantizedSoftmax : Softmax<typename Traits::Arch, Traits::kRowsPerThread> {
  using Arch = typename Traits::Arch;
  using Base = Softmax<Arch, Traits::kRowsPerThread>;
  using Base::kNoKey;
  using Base::kSlack;
  using Base::row_max;
  using Base::row_sum;

  static constexpr int kRows = Traits::kRowsPerThread;
  static constexpr int kRuns = Traits::kBlockN / 16;  // of 4 neighbouring keys, in a lane's row
  static constexpr int kTerms = 32;
  // What a score is larger than S by.
  static constexpr float kStart = Traits::kSumsStartAtMagic ? kMagic : 0.f;
  // P̂ · 2^-24 is what exp2 gives: the bits of a half that holds it are the integer.
  static constexpr float kLog2Scale = 7.97727992349992f - 24.f;  // log2(252) - 24
  // What P and row_sum leave for the end: O · kOutScale / row_sum, and row_max + kLseShift in softmax_lse.
  static constexpr float kOutScale = Traits::kQuantizesV ? kInverseUnit / 16777216.f : 1.f;
  static constexpr float kLseShift = Traits::kQuantizesV ? 8.f - 7.97727992349992f : 0.f;

  float q_scale[kRows];  // with the softmax's own, in log2 units
  float shift[kRows] = {};
  float late_weight[kRows] = {};  // with kAddsLate, of the block whose P̂ V̂ is not in O yet
  bool is_due = false;            // shift has to leave O before the next block that is seen

  // The last: O becomes the sums of P V.
  template <class Out>
  SDPA_DEVICE void settle(Out &out) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) scale_row(i, 1.f, out);
  }

  // c of row i. At least the smallest normal number, so that -inf · c is -inf. A NaN stays one.
  SDPA_DEVICE float factor(int i, float k_scale) const {
    float c = q_scale[i] * k_scale;
    c = c > kCap ? kCap : c;
    return c < 0x1p-126f ? 0x1p-126f : c;
  }

  // V of 16 bits. scores (kRows, cols): kMagic + S, or -inf → P.
  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float k_scale) {
    float block_max[kRows];  // of this lane's columns
    bool moves = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      block_max[i] = (largest_sum(scores, i) - kMagic) * factor(i, k_scale);
      moves |= block_max[i] > row_max[i] + kSlack;
    }
    if (Arch::any(moves)) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) move_to(i, fmaxf(row_max[i], across_quad_max(block_max[i])), out);
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float c = factor(i, k_scale);
      const float subtrahend = row_max[i] + Arch::multiply(kMagic, c);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2(fmaf(scores(i, j), c, -subtrahend));
        row_sum[i] += scores(i, j);
      }
    }
  }

  // V of bytes, where the 16 tokens of a lane share a scale. scores (kRows, cols): kMagic + S, or -inf → 252 P · 2^-24.
  // most: the largest S of each of the lane's rows. weight: exp2(reference - row_max).
  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, const float (&most)[kRows], Out &out, float k_scale, float v_log2,
                          float v_inverse, float (&weight)[kRows]) {
    float reference[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) reference[i] = fmaf(most[i], factor(i, k_scale), v_log2);
    refer(reference, out, weight);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float c = factor(i, k_scale);
      const float subtrahend = with_start(c, (reference[i] - v_log2) - kLog2Scale);
      float sum = 0.f;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2(fmaf(scores(i, j), c, -subtrahend));
        sum += scores(i, j);
      }
      row_sum[i] = fmaf(Arch::multiply(sum, v_inverse), weight[i], row_sum[i]);
    }
  }

  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float k_scale, float v_log2, float v_inverse,
                          float (&weight)[kRows]) {
    float most[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) most[i] = largest_sum(scores, i) - kMagic;
    update(scores, most, out, k_scale, v_log2, v_inverse, weight);
  }

  // The same where tokens have scales of their own. `v_log2` and `v_inverse` have this lane's four tokens of every 16.
  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float k_scale, const float *v_log2, const float *v_inverse,
                          float (&weight)[kRows]) {
    float reference[kRows];
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      const float4 log2_st = load4(v_log2 + 16 * run);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const float c = factor(i, k_scale);
        scores(i, 4 * run) = fmaf(scores(i, 4 * run), c, log2_st.x);
        scores(i, 4 * run + 1) = fmaf(scores(i, 4 * run + 1), c, log2_st.y);
        scores(i, 4 * run + 2) = fmaf(scores(i, 4 * run + 2), c, log2_st.z);
        scores(i, 4 * run + 3) = fmaf(scores(i, 4 * run + 3), c, log2_st.w);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) reference[i] = largest(scores, i) - start_of(factor(i, k_scale));
    refer(reference, out, weight);
    float subtrahend[kRows], sum[kRows] = {};
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) subtrahend[i] = (reference[i] + start_of(factor(i, k_scale))) - kLog2Scale;
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      const float4 inverse = load4(v_inverse + 16 * run);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTE_UNROLL
        for (int j = 4 * run; j < 4 * run + 4; ++j) scores(i, j) = Arch::exp2(scores(i, j) - subtrahend[i]);
        sum[i] = fmaf(scores(i, 4 * run), inverse.x, sum[i]);
        sum[i] = fmaf(scores(i, 4 * run + 1), inverse.y, sum[i]);
        sum[i] = fmaf(scores(i, 4 * run + 2), inverse.z, sum[i]);
        sum[i] = fmaf(scores(i, 4 * run + 3), inverse.w, sum[i]);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_sum[i] = fmaf(sum[i], weight[i], row_sum[i]);
  }

  // The largest of a row's scores, of this lane's columns.
  template <class Scores>
  SDPA_DEVICE static float largest(const Scores &scores, int i) {
    float max[2] = {scores(i, 0), scores(i, 1)};  // two, of which neither waits for the other
    CUTE_UNROLL
    for (int j = 2; j < size<1>(scores); ++j) max[j % 2] = fmaxf(max[j % 2], scores(i, j));
    return fmaxf(max[0], max[1]);
  }

  // The same of floats kMagic + S, and -inf, which are in the order of their bits.
  template <class Scores>
  SDPA_DEVICE static float largest_sum(const Scores &scores, int i) {
    if constexpr (Arch::kHasMaxOfThree && !Traits::kIsSplit) {  // a split kernel would spill
      const auto bits = [&](int j) SDPA_INLINE_LAMBDA { return static_cast<int>(to_bits(scores(i, j))); };
      int max = cute::max(bits(0), bits(1));
      CUTE_UNROLL
      for (int j = 2; j < size<1>(scores); j += 2) max = Arch::max3(max, bits(j), bits(j + 1));
      return to_float(static_cast<uint32_t>(max));
    } else {
      return largest(scores, i);
    }
  }

 protected:
  // What kStart is worth in log2 units, and x + that, rounded once.
  SDPA_DEVICE static float start_of(float c) {
    if constexpr (kStart == 0.f) return 0.f;
    return Arch::multiply(kStart, c);
  }
  SDPA_DEVICE static float with_start(float c, float x) {
    if constexpr (kStart == 0.f) return x;
    return fmaf(kStart, c, x);
  }

  // The references of a block, from those of this lane: its own, and row_max with O and row_sum.
  template <class Out>
  SDPA_DEVICE void refer(float (&reference)[kRows], Out &out, float (&weight)[kRows]) {
    bool moves = is_due;
    is_due = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      reference[i] = fmaxf(across_quad_max(reference[i]), kNoKey);
      moves |= reference[i] > row_max[i] + kSlack;
    }
    if (Arch::any(moves)) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) move_to(i, fmaxf(row_max[i], reference[i]), out);
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) weight[i] = Arch::exp2(reference[i] - row_max[i]);
    count(weight);
  }

  // A block is added with these weights next.
  SDPA_DEVICE void count(const float (&weight)[kRows]) {
    if constexpr (Traits::kShiftsO) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) shift[i] = fmaf(kMagic, weight[i], shift[i]);
    }
  }

  SDPA_DEVICE static float across_quad_max(float max) {
    max = fmaxf(max, Arch::shfl_xor(max, 2));
    return fmaxf(max, Arch::shfl_xor(max, 1));
  }

  SDPA_DEVICE static float4 load4(const float *from) {
    Arch::check_alignment(from, 16);
    return *reinterpret_cast<const float4 *>(from);
  }

  template <class Out>
  SDPA_DEVICE void move_to(int i, float reference, Out &out) {
    const float scores_scale = Arch::exp2(row_max[i] - reference);
    row_max[i] = reference;
    scale_row(i, scores_scale, out);
  }

  template <class Out>
  SDPA_DEVICE void scale_row(int i, float scores_scale, Out &out) {
    row_sum[i] *= scores_scale;
    if constexpr (Traits::kAddsLate) late_weight[i] *= scores_scale;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(out); ++j) {
      if constexpr (Traits::kShiftsO) out(i, j) -= shift[i];
      out(i, j) *= scores_scale;
    }
    shift[i] = 0.f;
  }
};

}  // namespace sdpa::fmha_fwd_q8
