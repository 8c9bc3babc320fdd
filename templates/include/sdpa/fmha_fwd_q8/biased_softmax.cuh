// Streaming softmax where biases were added: of logits instead of integer sums, and of any size.
//
//   x = S c + log2(e) · bias,   in log2 units; c caps the product alone (softmax.cuh)
//
// From there as in softmax.cuh, with two differences, because of biases like the lowest finite number, which all keys of
// a row may have:
//
//   16 bits   row_max is subtracted from x as it is: the largest P of a row that just moved is exactly 1
//   bytes     log2 st would be lost in a large x. So the block's largest x goes first:  y = x - max x,
//             x' = y + log2 st,   r = max of x',   P̂ = rint(252 · exp2(x' - r)),   and row_max counts from row_base:
//             O += exp2((max x - row_base) + (r - row_max)) P̂ V̂
//
// A finite bias beyond kLargest counts as kLargest, so that no finite bias becomes infinite in log2 units and none lies
// below kNoKey. Infinities and NaN stay what they are: -inf hides a key, the others make the row NaN.
#pragma once

#include <cmath>

#include "sdpa/fmha_fwd_q8/softmax.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct BiasedSoftmax : QuantizedSoftmax<Traits> {
  using Base = QuantizedSoftmax<Traits>;
  using Arch = typename Traits::Arch;
  using Base::across_quad_max;
  using Base::kLargest;
  using Base::kLog2Scale;
  using Base::kNoKey;
  using Base::kRows;
  using Base::kRuns;
  using Base::kSlack;
  using Base::largest;
  using Base::load4;
  using Base::row_max;
  using Base::row_sum;

  float row_base[kRows];  // log2 units

  SDPA_DEVICE BiasedSoftmax() {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_base[i] = 0.f;
  }

  // score: kMagic + S → x. c: `factor` of its row.
  SDPA_DEVICE static void add_bias(float &score, float bias, float c) {
    if (fabsf(bias) > kLargest && fabsf(bias) != INFINITY) bias = copysignf(kLargest, bias);
    score = fmaf(score - kMagic, c, Arch::multiply(bias, kLog2e));
  }

  // V of 16 bits. scores (kRows, cols): x → P.
  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float) {
    float block_max[kRows];  // of this lane's columns
    bool moves = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      block_max[i] = largest(scores, i);
      moves |= block_max[i] > row_max[i] + kSlack;
    }
    if (Arch::any(moves)) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) this->move_to(i, fmaxf(row_max[i], across_quad_max(block_max[i])), out);
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2(scores(i, j) - row_max[i]);
        row_sum[i] += scores(i, j);
      }
    }
  }

  // V of bytes, where the 16 tokens of a lane share a scale. scores (kRows, cols): x → 252 P · 2^-24.
  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float, float v_log2, float v_inverse, float (&weight)[kRows]) {
    float block_max[kRows], reference[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float lane_max = largest(scores, i);
      block_max[i] = fmaxf(across_quad_max(lane_max), kNoKey);
      reference[i] = (lane_max - block_max[i]) + v_log2;
    }
    refer(block_max, reference, out, weight);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float subtrahend = (reference[i] - v_log2) - kLog2Scale;
      float sum = 0.f;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        scores(i, j) = Arch::exp2((scores(i, j) - block_max[i]) - subtrahend);
        sum += scores(i, j);
      }
      row_sum[i] = fmaf(Arch::multiply(sum, v_inverse), weight[i], row_sum[i]);
    }
  }

  // The same where tokens have scales of their own. `v_log2` and `v_inverse` have this lane's four tokens of every 16.
  template <class Scores, class Out>
  SDPA_DEVICE void update(Scores &scores, Out &out, float, const float *v_log2, const float *v_inverse,
                          float (&weight)[kRows]) {
    float block_max[kRows], reference[kRows];
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) block_max[i] = fmaxf(across_quad_max(largest(scores, i)), kNoKey);
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      const float4 log2_st = load4(v_log2 + 16 * run);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        scores(i, 4 * run) = (scores(i, 4 * run) - block_max[i]) + log2_st.x;
        scores(i, 4 * run + 1) = (scores(i, 4 * run + 1) - block_max[i]) + log2_st.y;
        scores(i, 4 * run + 2) = (scores(i, 4 * run + 2) - block_max[i]) + log2_st.z;
        scores(i, 4 * run + 3) = (scores(i, 4 * run + 3) - block_max[i]) + log2_st.w;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) reference[i] = largest(scores, i);
    refer(block_max, reference, out, weight);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) reference[i] -= kLog2Scale;
    float sum[kRows] = {};
    CUTE_UNROLL
    for (int run = 0; run < kRuns; ++run) {
      const float4 inverse = load4(v_inverse + 16 * run);
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTE_UNROLL
        for (int j = 4 * run; j < 4 * run + 4; ++j) scores(i, j) = Arch::exp2(scores(i, j) - reference[i]);
        sum[i] = fmaf(scores(i, 4 * run), inverse.x, sum[i]);
        sum[i] = fmaf(scores(i, 4 * run + 1), inverse.y, sum[i]);
        sum[i] = fmaf(scores(i, 4 * run + 2), inverse.z, sum[i]);
        sum[i] = fmaf(scores(i, 4 * run + 3), inverse.w, sum[i]);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_sum[i] = fmaf(sum[i], weight[i], row_sum[i]);
  }

  // Completes the row sums across the quad; row_max is whole.
  SDPA_DEVICE void finish() {
    Base::finish();
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) row_max[i] += row_base[i];
  }

 private:
  // The references of a block, from those of this lane: its own, and the row's with O and row_sum.
  template <class Out>
  SDPA_DEVICE void refer(const float (&block_max)[kRows], float (&reference)[kRows], Out &out, float (&weight)[kRows]) {
    float excess[kRows];
    bool moves = this->is_due;
    this->is_due = false;
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      reference[i] = fmaxf(across_quad_max(reference[i]), kNoKey);
      excess[i] = (block_max[i] - row_base[i]) + (reference[i] - row_max[i]);
      moves |= excess[i] > kSlack;
    }
    if (Arch::any(moves)) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const bool is_larger = excess[i] > 0.f;
        const float scores_scale = is_larger ? Arch::exp2(-excess[i]) : 1.f;
        row_base[i] = is_larger ? block_max[i] : row_base[i];
        row_max[i] = is_larger ? reference[i] : row_max[i];
        excess[i] = is_larger ? 0.f : excess[i];
        this->scale_row(i, scores_scale, out);
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) weight[i] = Arch::exp2(excess[i]);
    this->count(weight);
  }
};

// The softmax of a function with these Traits.
template <class Traits>
using SoftmaxOf = std::conditional_t<Traits::kHasBias, BiasedSoftmax<Traits>, QuantizedSoftmax<Traits>>;

}  // namespace sdpa::fmha_fwd_q8
