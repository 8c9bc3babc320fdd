// Masks that are tensors: boolean (0: the key is not seen) or a bias that is added to the scaled scores.
//
//   boolean   S_ij = mask_ij ? S_ij : -inf        selected: whatever an unseen key holds is gone
//   bias      S_ij = scale · S_ij + bias_ij       natural units; the softmax's own factor is then log2(e).
//                                                 Quantised kernels say otherwise what is added to what
//
// A thread reads its own elements straight from global memory into registers, as many of them as kCapacity holds
// before the multiplication that makes the scores, so that the latency hides under it, the rest after it. The keys of
// a block are taken in an order (KeyOrder in kernel_traits.cuh) in which a thread's columns of one row are runs of
// kRun neighbours: 8 to 16 bytes a load where addresses and strides allow it, single elements elsewhere.
// A block of a boolean mask that is all true for a warp costs no selection, one that is all false no softmax and no
// second multiplication: paddings, documents and windows are made of such blocks.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/attention/params.hpp"
#include "sdpa/attention/sequence.cuh"

namespace sdpa {

template <class Traits>
struct DenseMask {
  using Arch = typename Traits::Arch;

  static constexpr MaskKind kMask = Traits::kMask;
  static constexpr int kBytes = kMask == MaskKind::kBool ? 1 : kMask == MaskKind::kBias16 ? 2 : 4;  // of an element
  static constexpr int kRun = Traits::kMaskRun;             // neighbouring columns that a thread holds
  static constexpr int kRuns = Traits::kBlockN / 4 / kRun;  // of one row
  static constexpr int kRows = Traits::kRowsPerThread;
  static constexpr int kWords = (kRun * kBytes + 3) / 4;
  static constexpr int kCapacity = kRun == 2 ? 2 : kRun == 4 ? kRuns : kRuns == 1 ? 4 : 2 * kRuns;  // words of a row
  static constexpr int kCacheLine = 128;
  static constexpr int kAhead = kCapacity / kWords < kRuns ? kCapacity / kWords : kRuns;  // runs that fit

  const MaskRef &ref;
  const char *head;  // the mask of this batch and head
  uint32_t words[kRows][kCapacity];

  SDPA_DEVICE DenseMask(const MaskRef &mask, const WorkTile &tile) : ref(mask) { find_head(tile); }

  SDPA_DEVICE void find_head(const WorkTile &tile) {
    head = ref.data + tile.bidb * ref.batch_stride + tile.bidh * ref.head_stride;
  }

  // Reads what the tile at (first_row, first_col) needs, as far as there is room. kWhole: all its columns exist.
  template <bool kWhole, class Coords>
  SDPA_DEVICE void fetch(const Coords &coords, int first_row, int first_col, const Sequence &sequence) {
    if constexpr (kMask != MaskKind::kBias32) fetch_runs<kWhole>(0, kAhead, coords, first_row, first_col, sequence);
  }

  // Asks for the lines of the tile at (first_row, first_col), a row a thread. All of the tile's columns exist.
  SDPA_DEVICE void prefetch(int thread, int first_row, int first_col, const Sequence &sequence) const {
    if (!ref.is_vectorised) return;
    const char *const from = vector_at(cute::min(first_row + thread, sequence.seqlen_q - 1), first_col);
    CUTE_UNROLL
    for (int byte = 0; byte < Traits::kBlockN * kBytes; byte += kCacheLine) Arch::prefetch(from + byte);
  }

  // coords: (rows, cols) of the tile of the scores. False: no row of this warp sees a key of the block, and the scores
  // are left as they were.
  template <bool kWhole, class Scores, class Coords>
  SDPA_DEVICE bool apply(Scores &scores, const Coords &coords, int first_row, int first_col, const Sequence &sequence) {
    return apply<kWhole>(scores, coords, first_row, first_col, sequence,
                         [&](int, float &score, float bias)
                             SDPA_INLINE_LAMBDA { score = score * ref.scores_scale + bias; });
  }

  // The same with scores that are in other units: add(i, score, bias) does to a score of the thread's row i what its
  // bias does.
  template <bool kWhole, class Scores, class Coords, class Add>
  SDPA_DEVICE bool apply(Scores &scores, const Coords &coords, int first_row, int first_col, const Sequence &sequence,
                         const Add &add) {
    if constexpr (kMask == MaskKind::kBool) return select<kWhole>(scores, coords, first_row, first_col, sequence);
    if constexpr (kMask == MaskKind::kBias16) add_16<kWhole>(scores, coords, first_row, first_col, sequence, add);
    if constexpr (kMask == MaskKind::kBias32) add_32<kWhole>(scores, coords, first_row, first_col, sequence, add);
    return true;
  }

 private:
  static constexpr uint32_t kAllSeen = kRun == 2 ? 0x0101u : 0x01010101u;

  template <bool kWhole, class Scores, class Coords>
  SDPA_DEVICE bool select(Scores &scores, const Coords &coords, int first_row, int first_col,
                          const Sequence &sequence) {
    if constexpr (kAhead == kRuns) {
      uint32_t every = kAllSeen, some = 0;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTE_UNROLL
        for (int w = 0; w < kRuns * kWords; ++w) {
          every &= words[i][w];
          some |= words[i][w];
        }
      }
      if (!Arch::any(every != kAllSeen)) return true;
      if (!Arch::any(some != 0)) return false;
    }
    CUTE_UNROLL
    for (int first = 0; first < kRuns; first += kAhead) {
      if (first > 0) fetch_runs<kWhole>(first, first + kAhead, coords, first_row, first_col, sequence);
      for_each_run(first, first + kAhead, [&](int i, int u) SDPA_INLINE_LAMBDA {
        CUTE_UNROLL
        for (int c = 0; c < kRun; ++c) {
          const bool is_seen = (words[i][(u - first) * kWords + c / 4] & 0xffu << (c % 4 * 8)) != 0;
          if (!is_seen) scores(i, u * kRun + c) = -INFINITY;
        }
      });
    }
    return true;
  }

  // Nothing is read ahead: kCapacity holds too little of it.
  template <bool kWhole, class Scores, class Coords, class Add>
  SDPA_DEVICE void add_32(Scores &scores, const Coords &coords, int first_row, int first_col, const Sequence &sequence,
                          const Add &add) {
    const auto add_runs = [&](auto fetch) SDPA_INLINE_LAMBDA {
      for_each_run(0, kRuns, [&](int i, int u) SDPA_INLINE_LAMBDA {
        uint32_t wide[kWords];
        fetch(wide, row_of(coords, i, first_row, sequence), column_of(coords, u, first_col));
        CUTE_UNROLL
        for (int c = 0; c < kRun; ++c) add(i, scores(i, u * kRun + c), as_float(wide[c]));
      });
    };
    if (ref.is_vectorised) {
      add_runs([&](uint32_t *into, int row, int column)
                   SDPA_INLINE_LAMBDA { fetch_vector<kWhole>(into, row, column, sequence.seqlen_k); });
    } else {
      add_runs([&](uint32_t *into, int row, int column)
                   SDPA_INLINE_LAMBDA { fetch_elements(into, row, column, sequence.seqlen_k); });
    }
  }

  template <bool kWhole, class Scores, class Coords, class Add>
  SDPA_DEVICE void add_16(Scores &scores, const Coords &coords, int first_row, int first_col, const Sequence &sequence,
                          const Add &add) {
    CUTE_UNROLL
    for (int first = 0; first < kRuns; first += kAhead) {
      if (first > 0) fetch_runs<kWhole>(first, first + kAhead, coords, first_row, first_col, sequence);
      if (ref.type == MaskType::kF16) {
        for_each_run(first, first + kAhead, [&](int i, int u) SDPA_INLINE_LAMBDA {
          CUTE_UNROLL
          for (int c = 0; c < kRun; ++c) {
            const uint32_t word = words[i][(u - first) * kWords + c / 2];
            const auto bits = static_cast<uint16_t>(word >> (c % 2 * 16));
            add(i, scores(i, u * kRun + c), static_cast<float>(cutlass::half_t::bitcast(bits)));
          }
        });
      } else {
        for_each_run(first, first + kAhead, [&](int i, int u) SDPA_INLINE_LAMBDA {
          CUTE_UNROLL
          for (int c = 0; c < kRun; ++c) {
            const uint32_t word = words[i][(u - first) * kWords + c / 2];
            add(i, scores(i, u * kRun + c), as_float(c % 2 == 0 ? word << 16 : word & 0xffff0000u));
          }
        });
      }
    }
  }

  template <class Body>
  SDPA_DEVICE static void for_each_run(int first, int last, Body &&body) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int u = first; u < last; ++u) body(i, u);
    }
  }

  SDPA_DEVICE static float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
  }

  // Runs first to last - 1 of every row, to the front of `words`. Rows that do not attend read the last one that does;
  // columns beyond seqlen_k are not read and count as 0.
  template <bool kWhole, class Coords>
  SDPA_DEVICE void fetch_runs(int first, int last, const Coords &coords, int first_row, int first_col,
                              const Sequence &sequence) {
    if (ref.is_vectorised) {
      for_each_run(first, last, [&](int i, int u) SDPA_INLINE_LAMBDA {
        fetch_vector<kWhole>(&words[i][(u - first) * kWords], row_of(coords, i, first_row, sequence),
                             column_of(coords, u, first_col), sequence.seqlen_k);
      });
    } else {
      for_each_run(first, last, [&](int i, int u) SDPA_INLINE_LAMBDA {
        fetch_elements(&words[i][(u - first) * kWords], row_of(coords, i, first_row, sequence),
                       column_of(coords, u, first_col), sequence.seqlen_k);
      });
    }
  }

  template <class Coords>
  SDPA_DEVICE static int row_of(const Coords &coords, int i, int first_row, const Sequence &sequence) {
    return cute::min(first_row + static_cast<int>(cute::get<0>(coords(i, 0))), sequence.seqlen_q - 1);
  }

  template <class Coords>
  SDPA_DEVICE static int column_of(const Coords &coords, int u, int first_col) {
    return first_col + static_cast<int>(cute::get<1>(coords(0, u * kRun)));
  }

  // In a mask that allows vectors: its rows are less than 2^31 bytes apart.
  SDPA_DEVICE const char *vector_at(int row, int column) const {
    return head + static_cast<int64_t>(column) * kBytes + int64_t{row} * static_cast<int32_t>(ref.row_stride);
  }

  // One run.
  template <bool kWhole>
  SDPA_DEVICE void fetch_vector(uint32_t *into, int row, int column, int seqlen_k) const {
    if (kWhole || column + kRun <= seqlen_k) {
      load_vector(into, vector_at(row, column));
    } else {
      fetch_elements(into, row, column, seqlen_k);
    }
  }

  SDPA_DEVICE void fetch_elements(uint32_t *into, int row, int column, int seqlen_k) const {
    const char *const from = head + row * ref.row_stride + column * ref.column_stride;
    const int valid = cute::min(int{kRun}, seqlen_k - column);
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) into[w] = 0;
    CUTE_NO_UNROLL
    for (int c = kRun - 1; c >= 0; --c) {  // shifted in from above, so that the registers keep constant indices
      CUTE_UNROLL
      for (int w = kWords - 1; w > 0; --w)
        into[w] = kBytes == 4 ? into[w - 1] : into[w] << (8 * kBytes % 32) | into[w - 1] >> (32 - 8 * kBytes) % 32;
      into[0] = kBytes == 4 ? 0 : into[0] << (8 * kBytes % 32);
      if (c < valid) into[0] |= load_element(from + c * ref.column_stride);
    }
  }

  SDPA_DEVICE static uint32_t load_element(const char *from) {
    if constexpr (kBytes == 1) return *reinterpret_cast<const uint8_t *>(from);
    if constexpr (kBytes == 2) return *reinterpret_cast<const uint16_t *>(from);
    if constexpr (kBytes == 4) return *reinterpret_cast<const uint32_t *>(from);
  }

  SDPA_DEVICE static void load_vector(uint32_t *into, const char *from) {
    constexpr int kRunBytes = kRun * kBytes;
    Arch::check_alignment(from, kRunBytes < 16 ? kRunBytes : 16);
    if constexpr (kRunBytes == 2) into[0] = *reinterpret_cast<const uint16_t *>(from);
    if constexpr (kRunBytes == 4) into[0] = *reinterpret_cast<const uint32_t *>(from);
    if constexpr (kRunBytes == 8) {
      const uint2 two = *reinterpret_cast<const uint2 *>(from);
      into[0] = two.x;
      into[1] = two.y;
    }
    if constexpr (kRunBytes >= 16) {
      CUTE_UNROLL
      for (int v = 0; v < kRunBytes / 16; ++v) {
        const uint4 four = reinterpret_cast<const uint4 *>(from)[v];
        into[4 * v] = four.x;
        into[4 * v + 1] = four.y;
        into[4 * v + 2] = four.z;
        into[4 * v + 3] = four.w;
      }
    }
  }
};

}  // namespace sdpa
