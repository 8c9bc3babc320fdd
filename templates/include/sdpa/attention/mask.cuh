// Which scores count by position. A row i sees the keys j with j < seqlen_k and, when causal, j <= i + causal_offset;
// in a general kernel, which may have a window, also j >= i + window_offset.
//
// `apply_mask` replaces the scores of unseen keys by -inf. It selects, never adds: a NaN in an unseen key must not
// survive. Which blocks need it says key_range.cuh; masks that are tensors are dense_mask.cuh's business.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"

namespace sdpa {

// scores, coords: (rows, cols); a coordinate is (row, column) within the tile at (first_row, first_col).
template <class Traits, class Scores, class Coords>
SDPA_DEVICE void apply_mask(Scores &scores, const Coords &coords, int first_row, int first_col,
                            const typename Traits::Params &params, const Sequence &sequence) {
  using namespace cute;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int num_seen = sequence.seqlen_k - first_col;
    [[maybe_unused]] int num_before = 0;  // the window
    if constexpr (Traits::kMayBeCausal) {
      const int row = Traits::position(params, first_row + get<0>(coords(i, 0)));
      num_seen = cute::min(num_seen, row + sequence.causal_offset + 1 - first_col);
      if constexpr (Traits::kMayHaveWindow) num_before = row + sequence.window_offset - first_col;
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      const int col = get<1>(coords(i, j));
      if (col >= num_seen || (Traits::kMayHaveWindow && col < num_before)) scores(i, j) = -INFINITY;
    }
  }
}

}  // namespace sdpa
