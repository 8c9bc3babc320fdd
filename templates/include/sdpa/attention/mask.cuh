// Which scores count by position. A row i sees the keys j with j < seqlen_k and, when causal, j <= i + causal_offset.
//
// `KeyRange` says how far a query tile has to look and from which block on no mask is needed; `apply_mask` replaces
// the scores of unseen keys by -inf. It selects, never adds: a NaN in an unseen key must not survive.
// Masks that are tensors are dense_mask.cuh's business.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"

namespace sdpa {

struct KeyRange {
  int n_block_max;   // one past the last block that any row of the tile sees
  int n_block_full;  // blocks [0, n_block_full) are seen whole by every row

  template <class Traits>
  SDPA_DEVICE static KeyRange make(const typename Traits::Params &params, const Sequence &sequence, int m_block) {
    int seen_by_last = sequence.seqlen_k;
    int seen_by_first = sequence.seqlen_k;
    if constexpr (Traits::kMayBeCausal) {
      const int first_row = m_block * Traits::kBlockM;
      const int last_row = cute::min(first_row + Traits::kBlockM, sequence.seqlen_q) - 1;
      const int last_key = Traits::position(params, last_row) + sequence.causal_offset;
      const int first_key = Traits::position(params, first_row) + sequence.causal_offset;
      seen_by_last = cute::max(cute::min(seen_by_last, last_key + 1), 0);
      seen_by_first = cute::max(cute::min(seen_by_first, first_key + 1), 0);
    }
    return {(seen_by_last + Traits::kBlockN - 1) / Traits::kBlockN, seen_by_first / Traits::kBlockN};
  }
};

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
