// attention/mask.cuh for the accumulator of a wgmma, where a thread holds the columns c, c + 1, c + 8, c + 9, c + 16, ...
// of a row, c being 2 · (lane % 4). Those before any column are the first ones of these, so a word of bits says which
// scores count: R2P makes predicates of seven bits at once, where comparisons with both ends of a window need two
// instructions for each. Kernels that are causal and nothing else gain nothing by it (H200, 2026-11-27).
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"

namespace sdpa::fmha_fwd_sm90 {

// The lowest bits, one for each of a thread's columns before `end`; the thread's first column is `first`.
SDPA_HOST_DEVICE uint32_t columns_before(int end, int first) {
  const auto left = static_cast<uint32_t>(cute::max(end - first, 0));
  const uint32_t count = left / 8 * 2 + cute::min(left % 8, 2u);
  return count >= 32 ? ~0u : (1u << count) - 1;
}

// scores, coords: (2, cols); a coordinate is (row, column) within the consumer's tile at (first_row, first_col).
template <class Traits, class Scores, class Coords>
SDPA_DEVICE void apply_position_mask(Scores &scores, const Coords &coords, int first_row, int first_col,
                                     const typename Traits::Params &params, const Sequence &sequence) {
  using namespace cute;
  static_assert(decltype(size<1>(scores))::value <= 32, "a word has a bit for each column of a thread");
  const int first = get<1>(coords(0, 0));
  CUTE_UNROLL
  for (int i = 0; i < size<0>(scores); ++i) {
    int num_seen = sequence.seqlen_k - first_col;
    uint32_t hidden = 0;  // by the window
    if constexpr (Traits::kMayBeCausal) {
      const int row = Traits::position(params, first_row + get<0>(coords(i, 0)));
      num_seen = min(num_seen, row + sequence.causal_offset + 1 - first_col);
      if constexpr (Traits::kMayHaveWindow) hidden = columns_before(row + sequence.window_offset - first_col, first);
    }
    const uint32_t seen = columns_before(num_seen, first) & ~hidden;
    CUTE_UNROLL
    for (int j = 0; j < size<1>(scores); ++j) {
      if ((seen >> j & 1) == 0) scores(i, j) = -INFINITY;
    }
  }
}

}  // namespace sdpa::fmha_fwd_sm90
