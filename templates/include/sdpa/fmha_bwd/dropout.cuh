// Which elements of a tile dropout keeps: a bit each, the same as in the forward (attention/dropout.cuh).
//
// Where query rows are owned, a thread holds what it holds in the forward, and whole Philox blocks. Where keys are owned,
// the tile is transposed: lane l has the keys l / 4 and l / 4 + 8 of 16, and the rows 2 (l % 4) + {0, 1} of every 8. The
// blocks of its two rows decide for the lanes l and l ^ 4 alike, whose keys differ in their lowest bit. So each of the two
// computes one block of 16 rows, and they exchange two words and a threshold.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/dropout.cuh"

namespace sdpa::fmha_bwd {

// Without dropout.
struct KeepAll {
  SDPA_DEVICE constexpr bool operator()(int) const { return true; }
};

template <class Traits>
struct KeepBits {
  using Arch = typename Traits::Arch;

  static constexpr int kMmaM = Traits::kMmaM;
  static constexpr int kMmaN = Traits::kStream / 8;
  static constexpr int kElements =
      4 * kMmaM * kMmaN;  // of a thread, in the order of accumulators ((2, 2), MMA_M, MMA_N)

  uint32_t words[(kElements + 31) / 32];

  SDPA_DEVICE bool operator()(int element) const { return (words[element / 32] >> element % 32 & 1u) != 0; }

  // coords: (rows, cols) of the scores of the tile at (first_own, first_stream).
  template <class Coords>
  SDPA_DEVICE void draw(const Dropout<Traits> &dropout, const Coords &coords, int first_own, int first_stream) {
    CUTE_UNROLL
    for (int w = 0; w < (kElements + 31) / 32; ++w) words[w] = 0;
    if constexpr (Traits::kOwnsKeys) {
      draw_transposed(dropout, coords, first_own, first_stream);
    } else {
      Tensor elements = cute::make_tensor<typename Traits::Element>(
          cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<kMmaM>, cute::Int<kMmaN>>>{});
      Tensor pairs = cute::recast<uint32_t>(elements);  // ((1, 2), MMA_M, MMA_N)
      CUTE_UNROLL
      for (int i = 0; i < cute::size(pairs); ++i) pairs(i) = ~0u;
      dropout.apply(pairs, coords, first_own, first_stream);
      CUTE_UNROLL
      for (int i = 0; i < cute::size(pairs); ++i) {
        set(2 * i, (pairs(i) & 0xffffu) != 0);
        set(2 * i + 1, (pairs(i) >> 16) != 0);
      }
    }
  }

 private:
  SDPA_DEVICE void set(int element, bool is_kept) { words[element / 32] |= (is_kept ? 1u : 0u) << element % 32; }

  template <class Coords>
  SDPA_DEVICE void draw_transposed(const Dropout<Traits> &dropout, const Coords &coords, int first_key, int first_row) {
    using namespace cute;
    const uint32_t parity = (first_key + get<0>(coords(0, 0))) % 2;
    CUTE_UNROLL
    for (int m = 0; m < kMmaM; ++m) {
      const uint32_t key = first_key + get<0>(coords(2 * m, 0));  // the other one of this m is key + 8
      const bool is_high = key / 16 % 2 != 0;
      CUTE_UNROLL
      for (int g = 0; g < kMmaN / 2; ++g) {
        const uint32_t row = first_row + get<1>(coords(0, 4 * g)) + parity;
        uint32_t block[1][4] = {{key / 32 * 4 + key / 2 % 4, row / 16 * 8 + row % 8, dropout.head, dropout.offset}};
        dropout.philox(block);
        constexpr uint32_t kTop = 0x80808080u;
        const uint32_t (&w)[4] = block[0];
        const uint32_t shared = (w[0] & kTop) | (w[1] & kTop) >> 1 | (w[2] & kTop) >> 2 | (w[3] & kTop) >> 3;
        const uint32_t own[3] = {is_high ? w[2] : w[0], is_high ? w[3] : w[1],
                                 dropout.threshold_high + (shared < dropout.threshold_low ? 1u : 0u)};
        uint32_t other[3];
        CUTE_UNROLL
        for (int i = 0; i < 3; ++i) other[i] = Arch::shfl_xor(own[i], 4);
        CUTE_UNROLL
        for (int c = 0; c < 2; ++c) {  // the thread's two rows of every 8
          const bool is_own = static_cast<uint32_t>(c) == parity;
          const uint32_t threshold = is_own ? own[2] : other[2];
          CUTE_UNROLL
          for (int r = 0; r < 2; ++r) {  // its two keys
            const uint32_t word = (is_own ? own[r] : other[r]) >> 8 * parity;
            CUTE_UNROLL
            for (int n = 0; n < 2; ++n)  // rows 0 to 7 and 8 to 15
              set(c + 2 * r + 4 * m + 4 * kMmaM * (2 * g + n), (word >> 16 * n & 0x7fu) >= threshold);
          }
        }
      }
    }
  }
};

}  // namespace sdpa::fmha_bwd
