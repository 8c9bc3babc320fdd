// The mirror of attention/key_range.cuh and mask.cuh for a CTA that owns keys: which rows see them, in blocks of kBlockM
// rows, and which scores of a block at an end count. A row i sees the keys j with i + window_offset <= j <= i +
// causal_offset; both offsets are there always, and show everything where nothing is hidden.
//
//   0 ... m_block_min ... m_block_full_min ... m_block_full_max ... m_block_max
//     unseen       first rows           whole              last rows
//
// Keys at or beyond seqlen_k are no reason to visit a block or to mask one: their gradients are not stored, and those of
// other keys do not know them. dQ does: fmha_bwd_fused masks all blocks of such a tile.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"
#include "sdpa/fmha_bwd/params.hpp"

namespace sdpa::fmha_bwd {

// Blocks of what streams by: [min, max) are visited, [full_min, full_max) are seen whole by all that is owned.
struct Range {
  int min;
  int max;
  int full_min;
  int full_max;
};

// n_block * kBlockN < seqlen_k.
template <class Traits>
SDPA_DEVICE Range row_range(const Sequence &sequence, int n_block) {
  const int first_key = n_block * Traits::kBlockN;
  const int last_key = cute::min(first_key + Traits::kBlockN, sequence.seqlen_k) - 1;
  const int first_row = cute::max(first_key - sequence.causal_offset, 0);
  const int first_full = cute::max(last_key - sequence.causal_offset, 0);
  const int end_row = cute::min(last_key - sequence.window_offset + 1, sequence.seqlen_q);
  const int end_full = cute::max(cute::min(first_key - sequence.window_offset + 1, sequence.seqlen_q), 0);
  if (end_row <= first_row) return {0, 0, 0, 0};
  return {first_row / Traits::kBlockM, (end_row + Traits::kBlockM - 1) / Traits::kBlockM,
          (first_full + Traits::kBlockM - 1) / Traits::kBlockM, end_full / Traits::kBlockM};
}

// scores, coords: (keys, rows); a coordinate is (key, row) within the tile at (first_key, first_row).
template <class Scores, class Coords>
SDPA_DEVICE void apply_row_mask(Scores &scores, const Coords &coords, int first_key, int first_row,
                                const Sequence &sequence) {
  using namespace cute;
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    const int key = first_key + get<0>(coords(i, 0));
    const int first = key - sequence.causal_offset - first_row;
    const int num_seeing = key < sequence.seqlen_k ? sequence.seqlen_q : 0;
    const int end = cute::min(key - sequence.window_offset + 1, num_seeing) - first_row;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      const int row = get<1>(coords(i, j));
      if (row < first || row >= end) scores(i, j) = -INFINITY;
    }
  }
}

// Keys of sequence `bidb` that dk and dv have rows for; those that no row sees, or beyond a length, become 0.
SDPA_DEVICE int num_keys(const Params &params, int bidb) {
  const LengthsRef &lengths = params.lengths_k;
  if (lengths.cu_seqlens == nullptr) return params.seqlen_k;
  const int begin = cute::max(0, cute::min(lengths.cu_seqlens[bidb], lengths.total));
  const int end = cute::max(begin, cute::min(lengths.cu_seqlens[bidb + 1], lengths.total));
  return cute::min(params.seqlen_k, end - begin);
}

}  // namespace sdpa::fmha_bwd
