// Row statistics: what both roles of the backward need of every query row, once for all of them.
//
//   lse_log2 = LSE · log2(e)        +inf for a row without keys and for rows that do not exist
//   delta    = p_keep · (Σ_d dO_d · O_d - dLSE)
//
// P = exp2(S - lse_log2) is exactly 0 under +inf, so no loop has to ask. With dropout, dS is computed times p_keep: one
// select an element, and no multiplication. Eight lanes share a row, whose sum has a fixed order. Rows are padded to a
// multiple of kPaddedRows, and statistics are written for those too.
#pragma once

#include <cfloat>
#include <cstring>

#include "sdpa/attention/constants.hpp"
#include "sdpa/attention/sequence.cuh"
#include "sdpa/fmha_bwd/kernel_traits.cuh"

namespace sdpa::fmha_bwd {

template <class Traits>
struct Preprocess {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;

  static constexpr int kLanes = 8;  // that share a row
  static constexpr int kRowsPerPass = Traits::kThreads / kLanes;
  static constexpr int kPasses = 2;
  static constexpr int kRowsPerCta = kPasses * kRowsPerPass;
  static constexpr int kVectors = (Traits::kHeadDim / 8 + kLanes - 1) / kLanes;  // of 16 bytes, of a lane
  // Lower ones have no finite value in log2 units. Only biases of the lowest finite numbers lead there, and P is 0 then.
  static constexpr float kLowest = -2e38f;
  static_assert(kPaddedRows % kRowsPerCta == 0);

  SDPA_DEVICE static void run(const Params &params) {
    int bidbh, part, bidb, bidh;
    params.statistics_ctas(bidbh, part, Arch::block_idx());
    params.heads_q(bidb, bidh, bidbh);
    const Sequence sequence = Sequence::make(params, bidb);
    const int lane = Arch::thread_idx() % kLanes;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = part * kRowsPerCta + pass * kRowsPerPass + Arch::thread_idx() / kLanes;
      float lse = -INFINITY, dlse = 0.f;
      if (row < sequence.seqlen_q) {
        const int64_t at = bidb * params.lse_batch_stride + bidh * params.lse_head_stride + sequence.first_row_q + row;
        lse = params.softmax_lse[at];
        if (params.dlse != nullptr) dlse = params.dlse[at];
      }
      const bool is_empty = lse == -INFINITY;
      const float lse_log2 = lse < kLowest ? -FLT_MAX : lse * kLog2e;
      float delta = 0.f;
      if (!is_empty) {
        const auto row_of = [&](const TensorRef &tensor) SDPA_INLINE_LAMBDA {
          return static_cast<const Element *>(tensor.data) + bidb * tensor.batch_stride + bidh * tensor.head_stride +
                 (sequence.first_row_q + row) * tensor.row_stride;
        };
        const Element *const out = row_of(params.out), *const dout = row_of(params.dout);
        CUTE_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          const int col = (v * kLanes + lane) * 8;
          if (col < params.head_dim_v) delta += dot(out + col, dout + col);
        }
      }
      CUTE_UNROLL
      for (int step = kLanes / 2; step > 0; step /= 2) delta += Arch::shfl_xor(delta, step);
      if (lane == 0)
        params.statistics[int64_t{bidbh} * params.padded_rows + row] =
            is_empty ? make_float2(INFINITY, 0.f) : make_float2(lse_log2, params.p_keep * (delta - dlse));
    }
  }

 private:
  // Of eight neighbours.
  SDPA_DEVICE static float dot(const Element *a, const Element *b) {
    Arch::check_alignment(a, 16);
    Arch::check_alignment(b, 16);
    const uint4 words[2] = {*reinterpret_cast<const uint4 *>(a), *reinterpret_cast<const uint4 *>(b)};
    Element elements[2][8];
    memcpy(elements, words, sizeof(words));
    float sum = 0.f;
    CUTE_UNROLL
    for (int i = 0; i < 8; ++i) sum += static_cast<float>(elements[0][i]) * static_cast<float>(elements[1][i]);
    return sum;
  }
};

}  // namespace sdpa::fmha_bwd
