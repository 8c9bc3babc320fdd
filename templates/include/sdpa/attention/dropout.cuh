// Dropout of P, decided by the element alone: (seed, offset, batch, head, row, column), whatever the tile or machine.
//
// One Philox4x32 block (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; 7 rounds, the fewest that
// pass BigCrush) decides 16 elements, those that one thread holds of an MMA tile of 16 rows and 32 keys:
//
//   key      (seed low, seed high ^ offset high)
//   counter  (key / 32 · 4 + key / 2 % 4,  row / 16 · 8 + row % 8,  batch · num_heads_q + head,  offset low)
//   byte     2 · (row / 8 % 2) + key % 2  of word  key / 8 % 4
//
// Seven bits of the byte are the element's own. The 16 top bits of the block are a fraction that its elements share:
// an element is dropped when byte % 128 < threshold_high + (fraction < threshold_low), so the probability has 23 bits
// at the price of 8 an element, and two elements of one block are correlated by less than 2e-4. threshold_low has its
// bits where the top bits lie (see `spread` in launch.cuh). sdpa_cutlass/dropout.py is the same in Python.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/static_for.hpp"
#include "sdpa/attention/params.hpp"
#include "sdpa/attention/tile_scheduler.cuh"

namespace sdpa {

template <class Traits>
struct Dropout {
  using Arch = typename Traits::Arch;

  uint32_t key[2];
  uint32_t offset;
  uint32_t head;
  uint32_t threshold_high;
  uint32_t threshold_low;

  SDPA_DEVICE Dropout(const GeneralParams &params, const WorkTile &tile) {
    const DropoutRef &ref = params.dropout;
    const uint64_t seed = ref.philox_state ? ref.philox_state[0] : ref.philox_seed;
    const uint64_t philox_offset = ref.philox_state ? ref.philox_state[1] : ref.philox_offset;
    key[0] = static_cast<uint32_t>(seed);
    key[1] = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(philox_offset >> 32);
    offset = static_cast<uint32_t>(philox_offset);
    head = static_cast<uint32_t>(tile.bidb) * params.num_heads_q + tile.bidh;
    key[0] = Arch::uniform(key[0]);
    key[1] = Arch::uniform(key[1]);
    offset = Arch::uniform(offset);
    head = Arch::uniform(head);
    threshold_high = ref.threshold_high;
    threshold_low = ref.threshold_low;
  }

  // pairs ((1, 2), MMA_M, MMA_N): P, two neighbouring keys in a register. coords (rows, cols) as for the scores.
  template <class Pairs, class Coords>
  SDPA_DEVICE void apply(Pairs &pairs, const Coords &coords, int first_row, int first_col) const {
    using namespace cute;
    static_assert(kBlockN % 32 == 0 && !Traits::kPermuteKeys, "a thread holds whole Philox blocks");
    arch::static_for<kBlockN / kColumns>([&](auto part) SDPA_INLINE_LAMBDA {
      constexpr int kFirst = decltype(part)::value * kColumns;
      uint32_t words[kBlocks][4];
      arch::static_for<kBlocks>([&](auto block) SDPA_INLINE_LAMBDA {
        constexpr int b = decltype(block)::value;
        const uint32_t row = first_row + get<0>(coords(2 * (b % kMmaM), 0));
        const uint32_t column = first_col + get<1>(coords(0, (kFirst + b / kMmaM * 32) / 4));
        words[b][0] = column / 32 * 4 + column / 2 % 4;
        words[b][1] = row / 16 * 8 + row % 8;
        words[b][2] = head;
        words[b][3] = offset;
      });
      philox(words);
      arch::static_for<kBlocks>([&](auto block) SDPA_INLINE_LAMBDA {
        constexpr int b = decltype(block)::value;
        constexpr uint32_t kTop = 0x80808080u;
        const uint32_t (&w)[4] = words[b];
        const uint32_t shared = (w[0] & kTop) | (w[1] & kTop) >> 1 | (w[2] & kTop) >> 2 | (w[3] & kTop) >> 3;
        const uint32_t threshold = (threshold_high + (shared < threshold_low ? 1u : 0u)) * 0x00010001u;
        arch::static_for<8>([&](auto pair) SDPA_INLINE_LAMBDA {
          constexpr int t = decltype(pair)::value / 2, half = decltype(pair)::value % 2;
          pairs(half, b % kMmaM, kFirst / 8 + b / kMmaM * 4 + t) &=
              Arch::at_least_mask(Arch::byte_pair(w[t] & ~kTop, half), threshold);
        });
      });
    });
  }

  // Several blocks round by round, so that they share the key's schedule.
  template <int kCount>
  SDPA_DEVICE void philox(uint32_t (&words)[kCount][4]) const {
    uint32_t k0 = key[0], k1 = key[1];
    CUTE_UNROLL
    for (int round = 0; round < 7; ++round) {
      CUTE_UNROLL
      for (int b = 0; b < kCount; ++b) {
        uint32_t (&c)[4] = words[b];
        const uint64_t product0 = uint64_t{0xD2511F53u} * c[0];
        const uint64_t product1 = uint64_t{0xCD9E8D57u} * c[2];
        c[0] = static_cast<uint32_t>(product1 >> 32) ^ c[1] ^ k0;
        c[1] = static_cast<uint32_t>(product1);
        c[2] = static_cast<uint32_t>(product0 >> 32) ^ c[3] ^ k1;
        c[3] = static_cast<uint32_t>(product0);
      }
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }

 private:
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kMmaM = Traits::kMmaM;
  static constexpr int kColumns = kMmaM == 1 && kBlockN % 64 == 0 ? 64 : 32;  // keys that are decided together
  static constexpr int kBlocks = kMmaM * kColumns / 32;                       // Philox blocks of a thread then
};

}  // namespace sdpa
