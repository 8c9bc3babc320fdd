// Which tile a block index means (sdpa/attention/tile_scheduler.cuh).
#define SDPA_TARGET_HOST

#include <cstdint>
#include <vector>

#include "harness.hpp"
#include "sdpa/attention/tile_scheduler.cuh"

using namespace simt_test;
using sdpa::CausalOrder;
using sdpa::TileScheduler;
using sdpa::WorkTile;

namespace {

struct Grid {
  int num_m_blocks;
  int batch;
  int num_heads_q;
  int num_heads_kv;
  int64_t kv_bytes_per_head;

  TileScheduler scheduler() const {
    return TileScheduler::make(num_m_blocks, batch, num_heads_q, num_heads_kv, kv_bytes_per_head);
  }
  int tiles() const { return num_m_blocks * batch * num_heads_q; }
};

// Sections that hold all heads, and some of them with a shorter last one.
const Grid kGrids[] = {{1, 1, 1, 1, 64},         {16, 1, 8, 8, 1 << 16},  {32, 1, 8, 2, 1 << 16},
                       {8, 2, 8, 8, 1 << 16},    {5, 3, 7, 7, 1 << 16},   {21, 2, 6, 3, 9 << 20},
                       {64, 2, 10, 10, 8 << 20}, {9, 1, 5, 1, 100 << 20}, {40, 3, 4, 4, 7 << 20}};

template <bool kIsCausal, CausalOrder kOrder>
void check_every_tile_once(const Grid &grid) {
  const TileScheduler scheduler = grid.scheduler();
  std::vector<int> seen(grid.tiles());
  for (int block = 0; block < grid.tiles(); ++block) {
    const WorkTile tile = scheduler.tile<kIsCausal, false, kOrder>(block);
    CHECK(0 <= tile.m_block && tile.m_block < grid.num_m_blocks);
    CHECK(0 <= tile.bidh && tile.bidh < grid.num_heads_q);
    CHECK(0 <= tile.bidb && tile.bidb < grid.batch);
    CHECK(tile.bidh_kv == tile.bidh / (grid.num_heads_q / grid.num_heads_kv));
    ++seen[(tile.bidb * grid.num_heads_q + tile.bidh) * grid.num_m_blocks + tile.m_block];
  }
  for (const int times : seen) CHECK(times == 1);
}

}  // namespace

SIMT_CASE(scheduler_gives_every_tile_to_one_block) {
  for (const Grid &grid : kGrids) {
    check_every_tile_once<false, CausalOrder::kLongestFirst>(grid);
    check_every_tile_once<true, CausalOrder::kLongestFirst>(grid);
    check_every_tile_once<true, CausalOrder::kInRuns>(grid);
  }
}

SIMT_CASE(scheduler_starts_the_longest_causal_tiles_first) {
  const Grid grid = {16, 1, 8, 8, 1 << 16};
  for (int block = 0; block < grid.tiles(); ++block) {
    const WorkTile tile = grid.scheduler().tile<true, false, CausalOrder::kLongestFirst>(block);
    CHECK(tile.m_block == 15 - block / 8);
    CHECK(tile.bidh == block % 8);
  }
}

SIMT_CASE(scheduler_keeps_runs_of_a_head_together) {
  const Grid grid = {19, 1, 3, 3, 1 << 16};  // two whole runs and three tiles
  const int run = TileScheduler::kRun;
  for (int block = 0; block < grid.tiles(); ++block) {
    const WorkTile tile = grid.scheduler().tile<true, false, CausalOrder::kInRuns>(block);
    const int beyond = block - 2 * run * 3;
    CHECK(tile.bidh == (beyond < 0 ? block / run % 3 : beyond % 3));
    CHECK(tile.m_block == 18 - (beyond < 0 ? block / (3 * run) * run + block % run : 2 * run + beyond / 3));
  }
}
