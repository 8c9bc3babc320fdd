// A mask that is a tensor, added to the exponents of a tile: x = S · scale_log2 - lse_log2.
//
//   boolean   x = mask ? x : -inf            bias   x = x + bias · log2(e)
//
// What it gives to hidden elements is replaced by the masks of positions, which come behind it. Of a tile that lies in the
// sequence whole, and a mask whose keys are neighbours, a thread reads pairs of keys: those of 8 or 16 bits before S is
// multiplied, so that latency hides under it; those of 32 bits, and all in kernels with one stage, when they are added,
// since registers do not hold them longer, and those of 32 bits not at all where dK and dV are made at once. A pair belongs
// to the row l / 4 and the keys 2 (l % 4) + {0, 1} of a block of 8 x 8; where keys are owned, movmatrix gives each lane the
// pair of rows that it needs. Elsewhere elements are read one by one, with any strides, and those outside of the sequence
// are not. Kinds of masks are told apart at run time.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/movmatrix.hpp"
#include "sdpa/attention/constants.hpp"
#include "sdpa/attention/params.hpp"
#include "sdpa/attention/sequence.cuh"

namespace sdpa::fmha_bwd {

// Of one tile at a time. Coords: (rows, cols) of its scores, whose coordinates are (key, row) with kOwnsKeys and
// (row, key) without, within the tile at (first_own, first_stream).
template <class Traits>
class TileMask {
  using Arch = typename Traits::Arch;

  static constexpr bool kOwnsKeys = Traits::kOwnsKeys;
  static constexpr int kRows = Traits::kRowsPerThread;
  static constexpr int kPairs = Traits::kStream / 8;  // of neighbouring columns, in a row of the thread

  static constexpr bool kReadsAhead = Traits::kStages > 1;
  static constexpr bool kReadsPairsOfFloats = !kOwnsKeys || !kReadsAhead;

  const MaskRef &mask;
  const bool has_pairs;  // of 8 or 16 bits
  const bool has_pairs_of_floats;
  uint32_t pairs[kRows][kPairs];

 public:
  SDPA_DEVICE TileMask(const MaskRef &mask_, int first_own, int first_stream, const Sequence &sequence)
      : mask(mask_),
        has_pairs(mask.type != MaskType::kF32 && is_whole(first_own, first_stream, sequence)),
        has_pairs_of_floats(mask.type == MaskType::kF32 && is_whole(first_own, first_stream, sequence)) {}

  // Reads what can be read ahead.
  template <class Coords>
  SDPA_DEVICE void fetch(const Coords &coords, int bidb, int bidh, int first_own, int first_stream) {
    if (has_pairs) read_pairs(coords, head_of(bidb, bidh), first_own, first_stream);
  }

  // scores: (rows, cols)
  template <class Scores, class Coords>
  SDPA_DEVICE void add(Scores &scores, const Coords &coords, int bidb, int bidh, int first_own, int first_stream,
                       const Sequence &sequence) {
    const char *const head = head_of(Arch::forget_origin(bidb), bidh);
    if (has_pairs) {
      if constexpr (!kReadsAhead) read_pairs(coords, head, first_own, first_stream);
      with_type([&](auto add_one) SDPA_INLINE_LAMBDA {
        for_each_pair([&](int i, int j) SDPA_INLINE_LAMBDA {
          const uint32_t pair = kOwnsKeys ? arch::transpose(pairs[i][j]) : pairs[i][j];
          add_one(scores(i, 2 * j), pair & 0xffffu);
          add_one(scores(i, 2 * j + 1), pair >> 16);
        });
      });
      return;
    }
    const auto for_each = [&](auto body) SDPA_INLINE_LAMBDA {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const int own = first_own + get<0>(coords(i, 0));
        CUTE_UNROLL
        for (int j = 0; j < 2 * kPairs; ++j) {
          const int streamed = first_stream + get<1>(coords(i, j));
          const int row = kOwnsKeys ? streamed : own, key = kOwnsKeys ? own : streamed;
          if (row < sequence.seqlen_q && key < sequence.seqlen_k)
            body(scores(i, j), head + row * mask.row_stride + key * mask.column_stride);
        }
      }
    };
    if (kReadsPairsOfFloats && has_pairs_of_floats) {
      for_each_pair([&](int i, int j) SDPA_INLINE_LAMBDA {
        const char *const at = pair_at<4>(head, coords, i, j, first_own, first_stream);
        Arch::check_alignment(at, 8);
        float2 pair = *reinterpret_cast<const float2 *>(at);
        if constexpr (kOwnsKeys) pair = arch::transpose(pair);
        scores(i, 2 * j) = fmaf(pair.x, kLog2e, scores(i, 2 * j));
        scores(i, 2 * j + 1) = fmaf(pair.y, kLog2e, scores(i, 2 * j + 1));
      });
    } else if (mask.type == MaskType::kF32) {
      for_each([](float &score, const char *at)
                   SDPA_INLINE_LAMBDA { score = fmaf(*reinterpret_cast<const float *>(at), kLog2e, score); });
    } else {
      with_type([&](auto add_one) SDPA_INLINE_LAMBDA {
        for_each([&](float &score, const char *at) SDPA_INLINE_LAMBDA {
          add_one(score, mask.type == MaskType::kBool ? *reinterpret_cast<const uint8_t *>(at)
                                                      : *reinterpret_cast<const uint16_t *>(at));
        });
      });
    }
  }

 private:
  // Whether the tile lies in the sequence whole, and all of its keys are pairs of neighbours.
  SDPA_DEVICE bool is_whole(int first_own, int first_stream, const Sequence &sequence) const {
    return mask.is_vectorised && first_own + Traits::kOwn <= (kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q) &&
           first_stream + Traits::kStream <= (kOwnsKeys ? sequence.seqlen_q : sequence.seqlen_k);
  }

  SDPA_DEVICE const char *head_of(int bidb, int bidh) const {
    return mask.data + bidb * mask.batch_stride + bidh * mask.head_stride;
  }

  template <class Coords>
  SDPA_DEVICE void read_pairs(const Coords &coords, const char *head, int first_own, int first_stream) {
    if (mask.type == MaskType::kBool) {
      for_each_pair([&](int i, int j) SDPA_INLINE_LAMBDA {
        const char *const at = pair_at<1>(head, coords, i, j, first_own, first_stream);
        Arch::check_alignment(at, 2);
        pairs[i][j] = Arch::byte_pair(*reinterpret_cast<const uint16_t *>(at), 0);
      });
    } else {
      for_each_pair([&](int i, int j) SDPA_INLINE_LAMBDA {
        const char *const at = pair_at<2>(head, coords, i, j, first_own, first_stream);
        Arch::check_alignment(at, 4);
        pairs[i][j] = *reinterpret_cast<const uint32_t *>(at);
      });
    }
  }

  // Where the pair of keys (i, j) lies that this lane reads.
  template <int kBytes, class Coords>
  SDPA_DEVICE const char *pair_at(const char *head, const Coords &coords, int i, int j, int first_own,
                                  int first_stream) const {
    const int lane = Arch::thread_idx() % 32, turned = kOwnsKeys ? lane / 4 - 2 * (lane % 4) : 0;
    const int own = first_own + get<0>(coords(i, 0)) - turned;
    const int streamed = first_stream + get<1>(coords(0, 2 * j)) + turned;
    const int row = kOwnsKeys ? streamed : own, key = kOwnsKeys ? own : streamed;
    return head + int64_t{row} * static_cast<int32_t>(mask.row_stride) + key * kBytes;
  }

  // Calls `body` with what adds an element of 8 or 16 bits, as `bits`, to a score.
  template <class Body>
  SDPA_DEVICE void with_type(Body body) const {
    if (mask.type == MaskType::kBool) {
      body([](float &score, uint32_t bits) SDPA_INLINE_LAMBDA { score = bits != 0 ? score : -INFINITY; });
    } else if (mask.type == MaskType::kF16) {
      body([](float &score, uint32_t bits) SDPA_INLINE_LAMBDA {
        score = fmaf(static_cast<float>(cutlass::half_t::bitcast(static_cast<uint16_t>(bits))), kLog2e, score);
      });
    } else {
      body([](float &score, uint32_t bits) SDPA_INLINE_LAMBDA {
        score = fmaf(static_cast<float>(cutlass::bfloat16_t::bitcast(static_cast<uint16_t>(bits))), kLog2e, score);
      });
    }
  }

  template <class Body>
  SDPA_DEVICE static void for_each_pair(Body &&body) {
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < kPairs; ++j) body(i, j);
    }
  }
};

}  // namespace sdpa::fmha_bwd
