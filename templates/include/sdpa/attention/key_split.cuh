// One CTA's share of its tile's keys, where num_splits CTAs share them: split s takes the s-th run of neighbouring key
// blocks, all equally many but for the last. How many splits have any follows from the tile's keys, so every CTA of the
// tile computes the same number. How their results meet is the kernel's business.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"

namespace sdpa {

struct KeySplit {
  int index;
  int first_block;
  int num_blocks;
  int num_active;  // splits that have any keys: [0, num_active)

  SDPA_DEVICE static KeySplit make(int index, int num_splits, int num_blocks) {
    const int share = (num_blocks + num_splits - 1) / num_splits;
    KeySplit s;
    s.index = index;
    s.first_block = index * share;
    s.num_blocks = cute::min(share, num_blocks - s.first_block);
    s.num_active = share == 0 ? 0 : (num_blocks + share - 1) / share;
    return s;
  }

  // The sequence as if this split's keys were all there are.
  template <class Traits>
  SDPA_DEVICE Sequence of(Sequence sequence) const {
    const int first_key = first_block * Traits::kBlockN;
    sequence.first_row_k += first_key;
    sequence.causal_offset -= first_key;
    sequence.seqlen_k = cute::min(sequence.seqlen_k - first_key, num_blocks * Traits::kBlockN);
    return sequence;
  }
};

}  // namespace sdpa
