// How far a query tile has to look, in blocks of kBlockN keys. A row i sees the keys j with j < seqlen_k and, when
// causal, j <= i + causal_offset; under a window, which general kernels alone may have, also j >= i + window_offset.
//
//   0 ... n_block_min ... n_block_full_min ... n_block_full ... n_block_max
//     unseen        left end             whole          right end
//
// Where the two ends meet, n_block_full_min may be larger than n_block_full, and every block needs the mask.
// Which scores of the ends count is mask.cuh's business.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"

namespace sdpa {

struct KeyRange {
  int n_block_max;       // one past the last block that any row of the tile sees; 0 when there is none
  int n_block_full;      // blocks [n_block_full_min, n_block_full) are seen whole by every row
  int n_block_min;       // the first block that any row of the tile sees
  int n_block_full_min;  // at least n_block_min

  // Where every row sees every key.
  template <class Traits>
  SDPA_DEVICE static KeyRange whole(const Sequence &sequence) {
    return {(sequence.seqlen_k + Traits::kBlockN - 1) / Traits::kBlockN, sequence.seqlen_k / Traits::kBlockN, 0, 0};
  }

  template <class Traits>
  SDPA_DEVICE static KeyRange make(const typename Traits::Params &params, const Sequence &sequence, int m_block) {
    int seen_by_last = sequence.seqlen_k;
    int seen_by_first = sequence.seqlen_k;
    int before_first = 0;  // keys before those that the first row sees
    int before_last = 0;
    if constexpr (Traits::kMayBeCausal) {
      const int first_row = m_block * Traits::kBlockM;
      const int last_row = cute::min(first_row + Traits::kBlockM, sequence.seqlen_q) - 1;
      const int last_position = Traits::position(params, last_row);
      const int first_position = Traits::position(params, first_row);
      const int last_key = last_position + sequence.causal_offset;
      const int first_key = first_position + sequence.causal_offset;
      seen_by_last = cute::max(cute::min(seen_by_last, last_key + 1), 0);
      seen_by_first = cute::max(cute::min(seen_by_first, first_key + 1), 0);
      if constexpr (Traits::kMayHaveWindow) {
        before_first = cute::max(first_position + sequence.window_offset, 0);
        before_last = cute::max(last_position + sequence.window_offset, 0);
      }
    }
    if (Traits::kMayHaveWindow && before_first >= seen_by_last) return {0, 0, 0, 0};
    return {(seen_by_last + Traits::kBlockN - 1) / Traits::kBlockN, seen_by_first / Traits::kBlockN,
            before_first / Traits::kBlockN, (before_last + Traits::kBlockN - 1) / Traits::kBlockN};
  }
};

}  // namespace sdpa
