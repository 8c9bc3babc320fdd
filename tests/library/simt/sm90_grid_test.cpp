// Hopper's sections of heads, and how many CTAs share the tiles (sdpa/fmha_fwd_sm90/grid.hpp); a thread's columns before a
// key (position_mask.cuh).
#define SDPA_TARGET_HOST

#include <cstdint>
#include <vector>

#include "harness.hpp"
#include "sdpa/fmha_fwd_sm90/grid.hpp"
#include "sdpa/fmha_fwd_sm90/position_mask.cuh"

using namespace simt_test;
using namespace sdpa::fmha_fwd_sm90;
using sdpa::CausalOrder;
using sdpa::TileScheduler;
using sdpa::WorkTile;

namespace {

constexpr int kSms = 132;

template <bool kIsCausal_, int kHeadDim_, int kConsumers_>
struct Traits {
  static constexpr bool kIsCausal = kIsCausal_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kConsumers_;
};

struct WholeHeads {
  TileScheduler scheduler;
  uint32_t num_tiles_of_whole_heads;
};

// Heads of the full sections and of the last one.
void check_sections(int64_t heads, int64_t fitting, int64_t filling, int64_t per_section, int64_t last) {
  CHECK(heads_per_section(heads, fitting, filling) == per_section);
  CHECK(heads % per_section == last);
}

}  // namespace

SIMT_CASE(hopper_sections_hold_every_tile_once) {
  for (const int heads : {1, 7, 16, 33, 200}) {
    for (const int m_blocks : {1, 5, 64}) {
      for (const int64_t bytes : {int64_t{0}, int64_t{1} << 20, int64_t{9} << 20, int64_t{100} << 20}) {
        TileScheduler scheduler = TileScheduler::make(m_blocks, 1, heads, heads, bytes);
        make_sections(scheduler, heads, 1, bytes, 2);
        std::vector<int> seen(size_t(heads * m_blocks));
        for (int block = 0; block < heads * m_blocks; ++block) {
          const WorkTile tile = scheduler.tile<true, false, CausalOrder::kLongestFirst>(block);
          CHECK(0 <= tile.m_block && tile.m_block < m_blocks);
          CHECK(0 <= tile.bidh && tile.bidh < heads);
          ++seen[size_t(tile.bidh * m_blocks + tile.m_block)];
        }
        for (const int times : seen) CHECK(times == 1);
      }
    }
  }
}

SIMT_CASE(hopper_sections_end_with_no_short_one) {
  check_sections(8, 6, 1, 8, 0);   // and not 6 and 2
  check_sections(16, 3, 6, 6, 4);  // tiles for every SM
  check_sections(32, 8, 8, 8, 0);
  check_sections(10, 3, 1, 5, 0);  // and not 4, 4 and 2
  check_sections(64, 16, 21, 22, 20);
  check_sections(5, 100, 1, 5, 0);
  check_sections(1, 1, 1, 1, 0);
}

SIMT_CASE(hopper_ctas_take_whole_heads) {
  constexpr int64_t kBytes = int64_t{4} * 512 * 64;  // of a head's K and V
  const auto takes = [](int64_t heads, int64_t heads_per_kv, int64_t bytes, int64_t num_keys) {
    return takes_whole_heads(heads, heads_per_kv, bytes, num_keys, kSms);
  };
  CHECK(takes(1024, 1, kBytes, 512));
  CHECK(takes(kSms, 1, kBytes, 512));
  CHECK(!takes(kSms - 1, 1, kBytes, 512));   // a CTA for each tile
  CHECK(takes(kSms + 88, 1, kBytes, 512));   // the last round has two thirds of the CTAs
  CHECK(!takes(kSms + 87, 1, kBytes, 512));  // most would wait
  CHECK(takes(512, 1, 2 * kBytes, 1024));
  CHECK(!takes(512, 1, 2 * kBytes, 1025));
  CHECK(!takes(512, 1, 3 * kBytes, 512));  // more than L2 holds
  CHECK(takes(512, 2, 3 * kBytes, 512));   // heads that share K and V
}

// A CTA's tiles are those of one head at a time, odd heads backwards, and the last section's go round.
SIMT_CASE(hopper_whole_heads_hold_every_tile_once) {
  for (const int heads : {4, 7, 8, 11}) {
    for (const int m_blocks : {1, 2, 5}) {
      constexpr int kAtOnce = 4;
      WholeHeads params;
      params.scheduler = TileScheduler::make(m_blocks, 1, heads, heads, 0);
      set_sections(params.scheduler, heads, kAtOnce);
      params.num_tiles_of_whole_heads = heads / kAtOnce * kAtOnce * m_blocks;
      std::vector<int> seen(size_t(heads * m_blocks));
      for (int cta = 0; cta < kAtOnce; ++cta) {
        for (int block = cta, nth = 0; block < heads * m_blocks; block += kAtOnce, ++nth) {
          const WorkTile tile = causal_tile(params, uint32_t(block));
          ++seen[size_t(tile.bidh * m_blocks + tile.m_block)];
          if (block >= int(params.num_tiles_of_whole_heads)) continue;
          CHECK(tile.bidh == nth / m_blocks * kAtOnce + cta);
          CHECK(tile.m_block == (tile.bidh % 2 ? nth % m_blocks : m_blocks - 1 - nth % m_blocks));
        }
      }
      for (const int times : seen) CHECK(times == 1);
    }
  }
}

SIMT_CASE(hopper_ctas_take_short_causal_tiles_in_turn) {
  using Causal = Traits<true, 64, 2>;
  CHECK((num_ctas<Traits<false, 64, 3>>(4096, kSms, 8192, false)) == kSms);  // full: always
  CHECK((num_ctas<Traits<false, 64, 3>>(100, kSms, 512, false)) == 100);
  CHECK((num_ctas<Causal>(100, kSms, 512, true)) == 100);
  CHECK((num_ctas<Causal>(4096, kSms, 512, true)) == kSms);
  CHECK((num_ctas<Causal>(4096, kSms, 1024, true)) == kSms);
  CHECK((num_ctas<Causal>(4096, kSms, 1025, true)) == 4096);  // long
  CHECK((num_ctas<Causal>(300, kSms, 1024, true)) == 300);    // few
  using Three = Traits<true, 64, 3>;
  CHECK((num_ctas<Three>(8 * kSms, kSms, 2048, true)) == kSms);
  CHECK((num_ctas<Three>(8 * kSms - 1, kSms, 2048, true)) == 8 * kSms - 1);  // few
  CHECK((num_ctas<Three>(8 * kSms, kSms, 2049, true)) == 8 * kSms);          // long
  CHECK((num_ctas<Three>(300, kSms, 1024, true)) == 300);
}

SIMT_CASE(hopper_bits_of_the_columns_before_a_key) {
  for (int first = 0; first < 8; first += 2) {
    for (int end = -3; end < 140; ++end) {
      uint32_t expected = 0;
      for (int j = 0; j < 32; ++j) expected |= uint32_t{first + j / 2 * 8 + j % 2 < end} << j;
      CHECK(columns_before(end, first) == expected);
    }
  }
}
