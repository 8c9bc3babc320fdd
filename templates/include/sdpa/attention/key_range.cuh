// How far a query tile has to look, in blocks of kBlockN keys. A row i sees the keys j with j < seqlen_k and, when
// causal, j <= i + causal_offset; so a tile needs blocks [0, n_block_max), and the first n_block_full need no mask.
// Which scores of the others count is mask.cuh's business.
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

}  // namespace sdpa
