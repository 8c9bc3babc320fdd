// A mask that is a tensor, added to the exponents of a tile: x = S · scale_log2 - lse_log2.
//
//   boolean   x = mask ? x : -inf            bias   x = x + bias · log2(e)
//
// Elements are read one by one from global memory, in either role and with any strides; kinds of masks are told apart at
// run time. Elements outside of the sequence are not read.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/attention/constants.hpp"
#include "sdpa/attention/params.hpp"
#include "sdpa/attention/sequence.cuh"

namespace sdpa::fmha_bwd {

// scores, coords: (rows, cols), whose coordinates are (key, row) with kOwnsKeys and (row, key) without, within the tile
// at (first_own, first_stream).
template <bool kOwnsKeys, class Scores, class Coords>
SDPA_DEVICE void add_mask(Scores &scores, const Coords &coords, const MaskRef &mask, int bidb, int bidh, int first_own,
                          int first_stream, const Sequence &sequence) {
  using namespace cute;
  const char *const head = mask.data + bidb * mask.batch_stride + bidh * mask.head_stride;
  const auto for_each = [&](auto body) SDPA_INLINE_LAMBDA {
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      const int own = first_own + get<0>(coords(i, 0));
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) {
        const int streamed = first_stream + get<1>(coords(i, j));
        const int row = kOwnsKeys ? streamed : own, key = kOwnsKeys ? own : streamed;
        if (row < sequence.seqlen_q && key < sequence.seqlen_k)
          body(scores(i, j), head + row * mask.row_stride + key * mask.column_stride);
      }
    }
  };
  if (mask.type == MaskType::kBool) {
    for_each([](float &score, const char *at) SDPA_INLINE_LAMBDA { score = *at != 0 ? score : -INFINITY; });
  } else if (mask.type == MaskType::kF32) {
    for_each([](float &score, const char *at)
                 SDPA_INLINE_LAMBDA { score = fmaf(*reinterpret_cast<const float *>(at), kLog2e, score); });
  } else if (mask.type == MaskType::kF16) {
    for_each([](float &score, const char *at) SDPA_INLINE_LAMBDA {
      score = fmaf(static_cast<float>(*reinterpret_cast<const cutlass::half_t *>(at)), kLog2e, score);
    });
  } else {
    for_each([](float &score, const char *at) SDPA_INLINE_LAMBDA {
      score = fmaf(static_cast<float>(*reinterpret_cast<const cutlass::bfloat16_t *>(at)), kLog2e, score);
    });
  }
}

}  // namespace sdpa::fmha_bwd
