// Hopper's sections of heads, and how many CTAs share the tiles (sdpa/fmha_fwd_sm90/grid.hpp).
#define SDPA_TARGET_HOST

#include <cstdint>
#include <vector>

#include "harness.hpp"
#include "sdpa/fmha_fwd_sm90/grid.hpp"

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

SIMT_CASE(hopper_ctas_take_short_causal_tiles_in_turn) {
  using Causal = Traits<true, 64, 2>;
  CHECK((num_ctas<Traits<false, 64, 3>>(4096, kSms, 8192)) == kSms);  // full: always
  CHECK((num_ctas<Traits<false, 64, 3>>(100, kSms, 512)) == 100);
  CHECK((num_ctas<Causal>(100, kSms, 512)) == 100);
  CHECK((num_ctas<Causal>(4096, kSms, 512)) == kSms);
  CHECK((num_ctas<Causal>(4096, kSms, 1024)) == kSms);
  CHECK((num_ctas<Causal>(4096, kSms, 1025)) == 4096);  // long
  CHECK((num_ctas<Causal>(300, kSms, 1024)) == 300);    // few
}
