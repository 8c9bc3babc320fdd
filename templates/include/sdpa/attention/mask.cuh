// Which scores count by position. A row i sees the keys j with j < seqlen_k and, when causal, j <= i + causal_offset.
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
    if constexpr (Traits::kMayBeCausal) {
      const int row = Traits::position(params, first_row + get<0>(coords(i, 0)));
      num_seen = cute::min(num_seen, row + sequence.causal_offset + 1 - first_col);
    }
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      if (get<1>(coords(i, j)) >= num_seen) scores(i, j) = -INFINITY;
    }
  }
}

}  // namespace sdpa
