// How a finished tile leaves: O is normalised, cut to the largest number of its type, rounded, staged in shared memory
// over K and V, and stored 16 bytes a lane; softmax_lse is one float a row.
//
// Every key had the mean c subtracted, so softmax_scale · q·c comes back to a row's reference before a sink joins it and
// before softmax_lse leaves. Rows without keys, and beyond their sequence, are those of fmha_fwd/epilogue.cuh.
// P̂ is rounded and row_sum is not, so O may exceed the largest |v| by a little: cut, finite numbers stay finite. Where V
// keeps its 16 bits, nothing is cut: an infinite value has to show.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/fmha_fwd/epilogue.cuh"
#include "sdpa/fmha_fwd_q8/biased_softmax.cuh"
#include "sdpa/fmha_fwd_q8/q_prologue.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct Epilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = SoftmaxOf<Traits>;
  using Rows = fmha_fwd::Epilogue<Traits>;  // where rows lie, and those that saw no key

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr float kLargest = std::is_same_v<Element, cutlass::half_t> ? 65504.f : 3.38953139e38f;

  // tOrO ((2, 2), MMA_M, MMA_K).
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(const Params &params, const WorkTile &tile, const Sequence &sequence, char *smem,
                                     Accumulator &tOrO, SoftmaxState &softmax) {
    const int tid = Traits::row_thread_again();
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)
    const bool needs_mean = params.softmax_lse != nullptr || params.sinks.data != nullptr;
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const int row = tile.m_block * kBlockM + QPrologue<Traits>::row_of(tid, i);
      if (row >= sequence.seqlen_q) softmax.row_sum[i] = 0.f;
      float row_max = softmax.row_max[i] + SoftmaxState::kLseShift;
      if (needs_mean) row_max += QPrologue<Traits>::mean_logit(params, tile, sequence, row, tid % 4);
      // A sink adds to the sum in the units of row_sum, which are not those of P.
      const float scale = Rows::with_sink(params, tile, sequence, row, row_max, softmax.row_sum[i]);
      const float inverse = SoftmaxState::inverse(softmax.row_sum[i]) * (scale * SoftmaxState::kOutScale);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); ++j) {
        tOrO_rows(i, j) = cut(tOrO_rows(i, j) * inverse);
        if constexpr (Traits::kHasBias || !Traits::kQuantizesV) {  // of rows beyond the sequence it may be NaN
          if (softmax.row_sum[i] == 0.f) tOrO_rows(i, j) = 0.f;
        }
      }
      if (params.softmax_lse && tid % 4 == 0 && row < sequence.num_rows)
        *Rows::lse_at(params, tile, sequence, row) = SoftmaxState::lse(row_max, softmax.row_sum[i]);
    }

    Traits::sync_before_out();
    Element *const staged = reinterpret_cast<Element *>(smem + Traits::kOffsetO);
    Rows::Staged::stage(staged, tid, [&](int i, int j) SDPA_INLINE_LAMBDA {
      return arch::pack<Element>(tOrO_rows(i, j), tOrO_rows(i, j + 1));
    });
    Arch::syncwarp();  // the warp's rows of O are in shared memory
    Rows::store_staged(params, tile, sequence, staged, tid);
  }

  // NaN stays NaN.
  SDPA_DEVICE static float cut(float x) {
    if constexpr (!Traits::kQuantizesV) return x;
    return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
  }
};

}  // namespace sdpa::fmha_fwd_q8
