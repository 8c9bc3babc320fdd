// Which blocks of a boolean mask are hidden whole, and which seen whole: found once, ahead of the kernel, for all heads
// that share the mask.
//
// For the rows of a tile and 32 blocks of kBlockN keys there are four words, a bit for each block: whether rows of the
// first consumer see any of its keys, the same of the second one; whether those rows see all of its keys, and again.
// A warp leaves a block as soon as it has met both: of a mask without structure after its first rows.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_fwd_sm90/kernel_traits.cuh"

namespace sdpa::fmha_fwd_sm90 {

inline constexpr int kBlocksOfAGroup = 32;

// How far a tile looks, and a consumer's rows in it.
struct TileRange {
  WorkTile tile;
  KeyRange keys;
  KeyRange own;
};

// The blocks in a tile's range that the mask does not hide from all of its rows, from the last to the first. The warp that
// loads and every consumer go through them by themselves, and all meet the same ones.
template <class Traits>
struct VisibleBlocks {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;

  int group;                  // of the block at hand
  int index = 0;              // of the block at hand
  uint32_t left = 0;          // of the group, behind the block at hand
  uint32_t seen, seen_whole;  // of the group, by a consumer's rows

  SDPA_DEVICE VisibleBlocks(const KeyRange &keys) : group((keys.n_block_max + kBlocksOfAGroup - 1) / kBlocksOfAGroup) {}

  // False behind the last one. `make_range()`, a TileRange, is asked for once in a group.
  template <class MakeRange>
  SDPA_DEVICE bool next(const Params &params, int consumer, const MakeRange &make_range) {
    while (left == 0) {
      const TileRange range = make_range();
      if (group * kBlocksOfAGroup <= range.keys.n_block_min) return false;
      --group;
      const MaskBlocksRef &ref = params.mask_blocks;
      uint4 words = {~0u, ~0u, 0, 0};
      if (ref.words != nullptr) {
        const int64_t row = int64_t{range.tile.bidb} * ref.tiles_per_batch + range.tile.m_block;
        words = ref.words[row * ref.groups + group];
      }
      left = (words.x | words.y) & bits_of(range.keys);
      seen = (consumer == 0 ? words.x : words.y) & bits_of(range.own);
      seen_whole = consumer == 0 ? words.z : words.w;
    }
    const int bit = Arch::highest_bit(left);
    left ^= 1u << bit;
    index = group * kBlocksOfAGroup + bit;
    return true;
  }

  // Whether the consumer's rows see any key of the block at hand, and whether its mask hides none from them.
  SDPA_DEVICE bool is_seen() const { return (seen >> (index % kBlocksOfAGroup) & 1) != 0; }
  SDPA_DEVICE bool is_seen_whole() const { return (seen_whole >> (index % kBlocksOfAGroup) & 1) != 0; }

 private:
  // Bits of the group's blocks in a range.
  SDPA_DEVICE uint32_t bits_of(const KeyRange &range) const {
    const int first = cute::max(range.n_block_min - group * kBlocksOfAGroup, 0);
    const int last = cute::min(range.n_block_max - group * kBlocksOfAGroup, int{kBlocksOfAGroup});
    return first >= last ? 0 : ~0u >> (kBlocksOfAGroup - (last - first)) << first;
  }
};

// A CTA finds the words of a tile and a group; a warp looks at a block and a consumer's rows at a time.
template <class Traits>
struct MaskBlocks {
  using Arch = typename Traits::Arch;

  static constexpr int kBytes = 16;  // of a load; elements have one
  static constexpr int kLanesOfARow = Traits::kBlockN / kBytes;
  static constexpr int kRows = 32 / kLanesOfARow;  // of a warp's load
  static constexpr int kLoads = 4;                 // at once
  static constexpr int kUnits = 2 * kBlocksOfAGroup;
  static constexpr uint32_t kAllSeen = 0x01010101u;
  static constexpr uint32_t kAnySeen = 1, kAnyHidden = 2;  // what was found of a block
  static_assert(Traits::kConsumers == 2 && Traits::kBlockN % kBytes == 0);

  struct SharedStorage {
    uint32_t found[kUnits];
  };

  SDPA_DEVICE static void run(const typename Traits::Params &params) {
    SharedStorage &smem = *reinterpret_cast<SharedStorage *>(Arch::dynamic_smem());
    const MaskBlocksRef &ref = params.mask_blocks;
    const int index = Arch::block_idx();
    const int group = index % ref.groups;
    const int m_block = index / ref.groups % ref.tiles_per_mask;
    const char *const mask = params.mask.data + index / ref.groups / ref.tiles_per_mask * params.mask.batch_stride;
    const int thread = Arch::thread_idx();
    for (int unit = thread / 32; unit < kUnits; unit += Traits::kThreads / 32) {
      const int first_row = m_block * Traits::kBlockM + unit / kBlocksOfAGroup * kWarpgroupRows;
      const int first_col = (group * kBlocksOfAGroup + unit % kBlocksOfAGroup) * Traits::kBlockN;
      const uint32_t found = look(params, mask, first_row, first_col);
      if (thread % 32 == 0) smem.found[unit] = found;
    }
    Arch::syncthreads();
    if (thread >= 4) return;
    uint32_t word = 0;
    for (int block = 0; block < kBlocksOfAGroup; ++block) {
      const uint32_t found = smem.found[thread % 2 * kBlocksOfAGroup + block];
      const bool is_set = thread < 2 ? (found & kAnySeen) != 0 : found == kAnySeen;
      word |= uint32_t{is_set} << block;
    }
    reinterpret_cast<uint32_t *>(ref.words + index)[thread] = word;
  }

 private:
  // The same in all lanes of a warp. Lanes without elements of their own look at the nearest ones again.
  SDPA_DEVICE static uint32_t look(const typename Traits::Params &params, const char *mask, int first_row,
                                   int first_col) {
    const bool is_broadcast = params.mask.row_stride == 0;
    const int last_row = cute::min(int{params.seqlen_q}, first_row + (is_broadcast ? 1 : kWarpgroupRows)) - 1;
    if (first_row > last_row || first_col >= params.seqlen_k) return 0;
    const int lane = Arch::thread_idx() % 32;
    const int last_col = (params.seqlen_k - 1) / kBytes * kBytes;
    const char *const from = mask + cute::min(first_col + lane % kLanesOfARow * kBytes, last_col);
    uint32_t any = 0;
    uint32_t every = kAllSeen;
    uint32_t found = 0;
    for (int base = first_row; base <= last_row && found != (kAnySeen | kAnyHidden); base += kLoads * kRows) {
      uint4 loaded[kLoads];
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        const int row = cute::min(base + i * kRows + lane / kLanesOfARow, last_row);
        Arch::check_alignment(from + row * params.mask.row_stride, kBytes);
        loaded[i] = *reinterpret_cast<const uint4 *>(from + row * params.mask.row_stride);
      }
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i) {
        any |= loaded[i].x | loaded[i].y | loaded[i].z | loaded[i].w;
        every &= loaded[i].x & loaded[i].y & loaded[i].z & loaded[i].w;
      }
      found = (Arch::any(any != 0) ? kAnySeen : 0) | (Arch::any(every != kAllSeen) ? kAnyHidden : 0);
    }
    return found;
  }
};

}  // namespace sdpa::fmha_fwd_sm90
