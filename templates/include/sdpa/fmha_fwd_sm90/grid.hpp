// Which CTAs a launch has, and in which order they take tiles: host code.
//
// Tiles of full attention are equal: as many CTAs as SMs take them in turn, and the loads of a tile run under the end of
// the one before. Causal tiles differ. Where they are short and many, CTAs take them in turn all the same, every other
// round backwards, so that nobody gets the longer one each time. Where they are long, each has a CTA, and the hardware
// hands them out, the longest first. Tiles of general kernels have a CTA each, because their lengths are not known here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sdpa/attention/tile_scheduler.cuh"

namespace sdpa::fmha_fwd_sm90 {

// What K and V of a section (tile_scheduler.cuh) may take of the 50 MB of L2 that an H100 or H200 has.
inline constexpr int64_t kSectionBytes = 32 << 20;

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

inline void make_sections(TileScheduler &scheduler, int64_t heads, int64_t heads_per_kv, int64_t kv_bytes_per_head,
                          int64_t num_sms) {
  const int64_t fitting = kSectionBytes / std::max<int64_t>(kv_bytes_per_head, 1) * heads_per_kv;
  const int64_t m_blocks = std::max(scheduler.num_m_blocks, 1);
  const int64_t filling = (5 * num_sms / 2 + m_blocks - 1) / m_blocks;
  const int64_t per_section = heads_per_section(heads, fitting, filling);
  const int64_t last = heads % per_section;
  scheduler.num_full_sections = static_cast<int>(heads / per_section);
  scheduler.section_tiles = cutlass::FastDivmod(static_cast<int>(per_section * scheduler.num_m_blocks));
  scheduler.section_heads = cutlass::FastDivmod(static_cast<int>(per_section));
  scheduler.last_heads = cutlass::FastDivmod(static_cast<int>(last > 0 ? last : 1));
}

// CTAs of a plain kernel. `num_keys`: of the longest tile.
template <class Traits>
uint32_t num_ctas(uint32_t num_tiles, uint32_t num_sms, int64_t num_keys) {
  if (num_tiles <= num_sms) return num_tiles;
  if constexpr (Traits::kIsCausal) {
    // In clocks: what a tile's beginning and end cost where nothing runs under them, against the longest tile, which is
    // as much as SMs may end apart. Estimates; sdpa_cutlass/choice/cost/fmha_fwd_sm90.py has the same.
    constexpr int64_t kMostKeys = 1024;
    constexpr int64_t kSavedByTile = 2000;
    constexpr int64_t kClocksByKey = Traits::kConsumers * (Traits::kHeadDim / 16 + 2);
    if (num_keys > kMostKeys || num_keys * kClocksByKey * 5 / 4 > kSavedByTile * num_tiles / num_sms) return num_tiles;
  }
  return num_sms;
}

}  // namespace sdpa::fmha_fwd_sm90
