// One CTA's share of its tile's keys, where num_splits CTAs share them: split s takes the s-th run of neighbouring ones
// of the key blocks that the tile sees, all equally many but for the last. How many splits have any follows from the
// tile's keys, so every CTA of the tile computes the same number. How their results meet is the kernel's business.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/sequence.cuh"

namespace sdpa {

struct KeySplit {
  int index;
  int first_block;
  int num_blocks;
  int num_active;  // splits that have any keys: [0, num_active)

  // The only split of a tile.
  SDPA_DEVICE static KeySplit whole(const KeyRange &keys) {
    return {0, keys.n_block_min, keys.n_block_max - keys.n_block_min, 1};
  }

  SDPA_DEVICE static KeySplit make(int index, int num_splits, const KeyRange &keys) {
    const int num_blocks = keys.n_block_max - keys.n_block_min;
    const int share = (num_blocks + num_splits - 1) / num_splits;
    KeySplit s;
    s.index = index;
    s.first_block = keys.n_block_min + index * share;
    s.num_blocks = cute::min(share, keys.n_block_max - s.first_block);
    s.num_active = share == 0 ? 0 : (num_blocks + share - 1) / share;
    return s;
  }

  // The sequence as if this split's keys were all there are.
  template <class Traits>
  SDPA_DEVICE Sequence of(Sequence sequence) const {
    const int first_key = first_block * Traits::kBlockN;
    sequence.first_row_k += first_key;
    sequence.causal_offset -= first_key;
    sequence.window_offset -= first_key;
    sequence.seqlen_k = cute::min(sequence.seqlen_k - first_key, num_blocks * Traits::kBlockN);
    return sequence;
  }

  // This split's blocks of `keys`, whose numbers stay what they are. None where it has none.
  SDPA_DEVICE KeyRange within(const KeyRange &keys) const {
    const int end = first_block + cute::max(num_blocks, 0);
    return {end, cute::min(keys.n_block_full, end), first_block, cute::max(keys.n_block_full_min, first_block)};
  }
};

}  // namespace sdpa
