// The state of one warp: which of its lanes can run, which of them meet where, and what they hand to each other.
//
// Lanes meet in collectives: each leaves its operands in the warp's slots and stops, and the last to arrive executes
// the collective for all. A lane only writes its own operands, before it arrives, and only reads its own results,
// after the execution; nothing but the execution looks at other lanes' slots. So a lane that runs ahead to the next
// collective spoils nothing for those that have not read their results yet. Data only: block.hpp moves the lanes.
#pragma once

#include <cstdint>

#include "sdpa/arch/simt/byte_mma.hpp"
#include "sdpa/arch/simt/mma.hpp"

namespace sdpa::simt {

constexpr int kWarpSize = 32;
constexpr uint32_t kFullWarp = 0xffffffffu;

class Block;
struct Warp;

// What the lanes of a warp do together. Two collectives are the same when they are the same object.
struct Collective {
  const char *name;
  bool needs_full_warp;
  void (*execute)(Block &block, Warp &warp);
};

struct WarpSlots {
  MmaTiles mma;
  ByteMmaTiles byte_mma;
  const void *ldmatrix_row[kWarpSize];
  uint16_t ldmatrix_calls[kWarpSize];  // that led to it: Block::calls_to_here
  uint32_t ldmatrix_result[kWarpSize][4];
  uint32_t shuffle_value[kWarpSize];
  int shuffle_source[kWarpSize];
  uint32_t shuffle_result[kWarpSize];
  uint32_t vote;  // one bit per lane
  bool vote_result;
  int elected;  // lane
};

struct Warp {
  // One bit per lane.
  uint32_t live;     // has not exited
  uint32_t ready;    // can run
  uint32_t arrived;  // waits in `collective` for the rest of the live lanes

  const Collective *collective;
  int barrier;          // of the collective, when that is a barrier
  int barrier_threads;  // likewise; 0: all threads of the block
  int waits_at;         // the barrier that the whole warp waits at, or -1
  WarpSlots slots;
};

}  // namespace sdpa::simt
