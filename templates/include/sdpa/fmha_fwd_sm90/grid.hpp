// Which CTAs a launch has, and in which order they take tiles.
//
// Tiles of full attention are equal: as many CTAs as SMs take them in turn, and the loads of a tile run under the end of
// the one before. Causal tiles differ. Where they are short and many, CTAs take them in turn all the same: the tiles of a
// head one after another, every other head backwards, so that not all load from memory at the same time; or, where the
// heads do not come out even, one of each round, every other round backwards, so that nobody gets the longer one each
// time. Where they are long, each has a CTA, and the hardware hands them out, the longest first. General kernels do the
// same without lengths and masks; short windows count as full attention. With these their tiles have a CTA each, because
// how long a tile is is not known here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sdpa/attention/tile_scheduler.cuh"

namespace sdpa::fmha_fwd_sm90 {

// What K and V of a section (tile_scheduler.cuh) may take of the 50 MB of L2 that an H100 or H200 has.
inline constexpr int64_t kSectionBytes = 32 << 20;
// What those of the heads that are computed at once may, where each CTA takes one.
inline constexpr int64_t kWholeHeadsBytes = 44 << 20;
inline constexpr int64_t kShortKeys = 1024;

// Heads of a section. Sections begin with their longest tiles. So that the last one does not end with these alone, it has
// at least two thirds of the heads of the others, and all have so many tiles that an SM gets two or three.
inline int64_t heads_per_section(int64_t heads, int64_t fitting, int64_t filling) {
  const int64_t wanted = std::max<int64_t>({fitting, filling, 1});
  for (int64_t sections = (heads + wanted / 2) / wanted; sections > 1; --sections) {
    const int64_t some = (heads + sections - 1) / sections;
    const int64_t last = heads % some;
    if (last == 0 || 3 * last >= 2 * some) return some;
  }
  return heads;
}

inline void set_sections(TileScheduler &scheduler, int64_t heads, int64_t per_section) {
  const int64_t last = heads % per_section;
  scheduler.num_full_sections = static_cast<int>(heads / per_section);
  scheduler.section_tiles = cutlass::FastDivmod(static_cast<int>(per_section * scheduler.num_m_blocks));
  scheduler.section_heads = cutlass::FastDivmod(static_cast<int>(per_section));
  scheduler.last_heads = cutlass::FastDivmod(static_cast<int>(last > 0 ? last : 1));
}

inline void make_sections(TileScheduler &scheduler, int64_t heads, int64_t heads_per_kv, int64_t kv_bytes_per_head,
                          int64_t num_sms) {
  const int64_t fitting = kSectionBytes / std::max<int64_t>(kv_bytes_per_head, 1) * heads_per_kv;
  const int64_t m_blocks = std::max(scheduler.num_m_blocks, 1);
  const int64_t filling = (5 * num_sms / 2 + m_blocks - 1) / m_blocks;
  set_sections(scheduler, heads, heads_per_section(heads, fitting, filling));
}

// Whether each CTA takes all tiles of a head: the heads come out even, or nearly, and K and V of those that are computed
// at once stay in L2. Then a section has a head for every CTA; the tiles of the last, shorter one go round.
inline bool takes_whole_heads(int64_t heads, int64_t heads_per_kv, int64_t kv_bytes_per_head, int64_t num_keys,
                              int64_t at_once) {
  const int64_t last = heads % at_once;
  return num_keys <= kShortKeys && heads >= at_once && (last == 0 || 3 * last >= 2 * at_once) &&
         at_once * kv_bytes_per_head <= kWholeHeadsBytes * heads_per_kv;
}

// The tile of a causal kernel at `index`.
template <class Params>
SDPA_DEVICE WorkTile causal_tile(const Params &params, uint32_t index) {
  WorkTile tile = params.scheduler.template tile<true, false, CausalOrder::kLongestFirst>(static_cast<int>(index));
  if (index < params.num_tiles_of_whole_heads && tile.bidh % 2 != 0)
    tile.m_block = params.scheduler.num_m_blocks - 1 - tile.m_block;
  return tile;
}

// CTAs where these do not take whole heads. `num_keys`: of the longest tile.
template <class Traits>
uint32_t num_ctas(uint32_t num_tiles, uint32_t at_once, int64_t num_keys, bool is_causal) {
  if (num_tiles <= at_once) return num_tiles;
  if (is_causal) {
    // In clocks, estimated: what a tile's beginning and end cost where nothing runs under them, against the longest tile,
    // which is as much as SMs may end apart. Three consumers that get many tiles end closer together: in turn they are
    // 1.04 to 1.13 times as fast at 2048 keys (H100, 2026-11-25, head_dim 64 to 128).
    constexpr int64_t kMostKeys = Traits::kConsumers == 3 ? 2048 : kShortKeys;
    constexpr uint32_t kManyRounds = 8;
    constexpr int64_t kSavedByTile = 2000;
    constexpr int64_t kClocksByKey = Traits::kConsumers * (Traits::kHeadDim / 16 + 2);
    if (num_keys > kMostKeys) return num_tiles;
    if (Traits::kConsumers == 3 && num_tiles / at_once >= kManyRounds) return at_once;
    if (num_keys > kShortKeys || num_keys * kClocksByKey * 5 / 4 > kSavedByTile * num_tiles / at_once) return num_tiles;
  }
  return at_once;
}

}  // namespace sdpa::fmha_fwd_sm90
