// Masks that are tensors: boolean (0: the key is not seen) or a bias that is added to the scaled scores.
//
//   boolean   S_ij = mask_ij ? S_ij : -inf        selected: whatever an unseen key holds is gone
//   bias      S_ij = scale · S_ij + bias_ij       natural units; the softmax's own factor is then log2(e)
//
// A consumer's thread reads its own elements straight from global memory into registers, in the order of a wgmma's
// accumulator: two rows, and two neighbours of every 8 columns. As many of them as kMaskPairsAhead are asked for before
// the products that make the scores, under which they arrive, the rest behind those. attention/dense_mask.cuh takes keys
// in another order, for longer loads; here TMA brings K and V as they lie.
// Where a boolean mask is all true for a warp it costs no selection. What is so for a whole block is known before: see
// mask_blocks.cuh.
#pragma once

#include <cstring>

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/attention/params.hpp"
#include "sdpa/attention/sequence.cuh"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
struct DenseMask {
  using Arch = typename Traits::Arch;

  static constexpr MaskKind kMask = Traits::kMask;
  static constexpr int kBytes = kMask == MaskKind::kBool ? 1 : kMask == MaskKind::kBias16 ? 2 : 4;  // of an element
  static constexpr int kPairs = Traits::kBlockN / 8;  // of neighbouring columns, in a row of a thread
  static constexpr int kAhead = Traits::kMaskPairsAhead;
  static constexpr int kWords = kBytes == 4 ? 2 : 1;  // of a pair
  static constexpr uint32_t kAllSeen = 0x0101u;       // a pair of a boolean mask
  static_assert(kPairs % kAhead == 0);

  const MaskRef &ref;
  const char *rows[2];  // the thread's first elements
  uint32_t words[2][kAhead][kWords];

  // coords (2, cols) → (row, column) within the consumer's tile at `first_row`. Rows that do not attend read the last one
  // that does.
  template <class Coords>
  SDPA_DEVICE DenseMask(const MaskRef &mask, const WorkTile &tile, const Sequence &sequence, const Coords &coords,
                        int first_row)
      : ref(mask) {
    const char *const head = mask.data + tile.bidb * mask.batch_stride + tile.bidh * mask.head_stride +
                             static_cast<int64_t>(cute::get<1>(coords(0, 0))) * mask.column_stride;
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = cute::min(first_row + static_cast<int>(cute::get<0>(coords(i, 0))), sequence.seqlen_q - 1);
      rows[i] = head + row * mask.row_stride;
    }
  }

  // Asks for the first elements of the block of keys from `first_col` on.
  template <class Coords>
  SDPA_DEVICE void fetch(const Coords &coords, int first_col, int seqlen_k) {
    fetch_pairs(0, coords, first_col, seqlen_k);
  }

  // scores, coords: (2, cols).
  template <class Scores, class Coords>
  SDPA_DEVICE void apply(Scores &scores, const Coords &coords, int first_col, int seqlen_k) {
    CUTE_UNROLL
    for (int first = 0; first < kPairs; first += kAhead) {
      if (first > 0) fetch_pairs(first, coords, first_col, seqlen_k);
      if (kMask == MaskKind::kBool) {
        uint32_t every = kAllSeen;
        for_each_pair([&](int i, int u) SDPA_INLINE_LAMBDA { every &= words[i][u][0]; });
        if (!Arch::any(every != kAllSeen)) continue;
        for_each_pair([&](int i, int u) SDPA_INLINE_LAMBDA {
          if ((words[i][u][0] & 0xffu) == 0) scores(i, 2 * (first + u)) = -INFINITY;
          if ((words[i][u][0] & 0xff00u) == 0) scores(i, 2 * (first + u) + 1) = -INFINITY;
        });
      } else if (kMask == MaskKind::kBias32) {
        add(scores, first, [&](int i, int u, int c) SDPA_INLINE_LAMBDA { return as_float(words[i][u][c % kWords]); });
      } else if (ref.type == MaskType::kF16) {
        add(scores, first, [&](int i, int u, int c) SDPA_INLINE_LAMBDA {
          const auto bits = static_cast<uint16_t>(words[i][u][0] >> (16 * c));
          return static_cast<float>(cutlass::half_t::bitcast(bits));
        });
      } else {
        add(scores, first, [&](int i, int u, int c) SDPA_INLINE_LAMBDA {
          return as_float(c == 0 ? words[i][u][0] << 16 : words[i][u][0] & 0xffff0000u);
        });
      }
    }
  }

 private:
  template <class Body>
  SDPA_DEVICE static void for_each_pair(Body &&body) {
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTE_UNROLL
      for (int u = 0; u < kAhead; ++u) body(i, u);
    }
  }

  template <class Scores, class Bias>
  SDPA_DEVICE void add(Scores &scores, int first, const Bias &bias) const {
    const float scale = ref.scores_scale;
    for_each_pair([&](int i, int u) SDPA_INLINE_LAMBDA {
      CUTE_UNROLL
      for (int c = 0; c < 2; ++c) {
        float &score = scores(i, 2 * (first + u) + c);
        score = score * scale + bias(i, u, c);
      }
    });
  }

  SDPA_DEVICE static float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // kAhead pairs from `first` on, of both rows. Columns from seqlen_k on are not read and count as 0.
  template <class Coords>
  SDPA_DEVICE void fetch_pairs(int first, const Coords &coords, int first_col, int seqlen_k) {
    if (ref.is_vectorised && first_col + Traits::kBlockN <= seqlen_k) {
      const int64_t offset = static_cast<int64_t>(first_col) * kBytes;
      const char *const from[2] = {rows[0] + offset, rows[1] + offset};
      for_each_pair([&](int i, int u)
                        SDPA_INLINE_LAMBDA { load_pair(words[i][u], from[i] + (first + u) * 8 * kBytes); });
    } else {
      fetch_elements(first, coords, first_col, seqlen_k);
    }
  }

  // The same one by one. A few pairs at a time, which come in from behind, so that the registers keep constant indices
  // and few addresses are live at once.
  template <class Coords>
  SDPA_DEVICE void fetch_elements(int first, const Coords &coords, int first_col, int seqlen_k) {
    constexpr int kStep = kAhead % 4 == 0 ? 4 : kAhead % 2 == 0 ? 2 : 1;
    const int num_cols = seqlen_k - first_col - static_cast<int>(cute::get<1>(coords(0, 0)));
    CUTE_NO_UNROLL
    for (int step = 0; step < kAhead; step += kStep) {
      const int first_of_step = 8 * (first + step);
      const int64_t offset = (first_col + first_of_step) * ref.column_stride;
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int u = 0; u < kAhead - kStep; ++u) {
          CUTE_UNROLL
          for (int w = 0; w < kWords; ++w) words[i][u][w] = words[i][u + kStep][w];
        }
        CUTE_UNROLL
        for (int u = 0; u < kStep; ++u) {
          uint32_t elements[2] = {0, 0};
          CUTE_UNROLL
          for (int c = 0; c < 2; ++c) {
            if (first_of_step + 8 * u + c < num_cols)
              elements[c] = load_element(rows[i] + offset + (8 * u + c) * ref.column_stride);
          }
          uint32_t (&into)[kWords] = words[i][kAhead - kStep + u];
          if constexpr (kWords == 2) {
            into[0] = elements[0];
            into[1] = elements[1];
          } else {
            into[0] = elements[0] | elements[1] << (8 * kBytes % 32);
          }
        }
      }
    }
  }

  SDPA_DEVICE static uint32_t load_element(const char *from) {
    if constexpr (kBytes == 1) return *reinterpret_cast<const uint8_t *>(from);
    if constexpr (kBytes == 2) return *reinterpret_cast<const uint16_t *>(from);
    if constexpr (kBytes == 4) return *reinterpret_cast<const uint32_t *>(from);
  }

  SDPA_DEVICE static void load_pair(uint32_t (&into)[kWords], const char *from) {
    Arch::check_alignment(from, 2 * kBytes);
    if constexpr (kBytes == 1) into[0] = *reinterpret_cast<const uint16_t *>(from);
    if constexpr (kBytes == 2) into[0] = *reinterpret_cast<const uint32_t *>(from);
    if constexpr (kBytes == 4) {
      const uint2 two = *reinterpret_cast<const uint2 *>(from);
      into[0] = two.x;
      into[kWords - 1] = two.y;
    }
  }
};

}  // namespace sdpa::fmha_fwd_sm90
