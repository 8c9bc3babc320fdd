// movmatrix.trans on the host target: a collective like those of collectives.hpp, which wants all 32 lanes.
#pragma once

#include <cstdint>
#include <cstring>

#include "sdpa/arch/simt/collectives.hpp"

namespace sdpa::simt {

namespace detail {

// Lane l has the elements [l / 4, 2 (l % 4)..] of an 8x8 matrix, two of them, and receives those of the transposed one.
inline void execute_movmatrix(Block &, Warp &warp) {
  WarpSlots &slots = warp.slots;
  uint16_t elements[8][8];
  for (int lane = 0; lane < kWarpSize; ++lane)
    std::memcpy(&elements[lane / 4][2 * (lane % 4)], &slots.shuffle_value[lane], 4);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int i = lane / 4, j = 2 * (lane % 4);
    slots.shuffle_result[lane] = elements[j][i] | uint32_t{elements[j + 1][i]} << 16;
  }
}

inline constexpr Collective kMovmatrix{"movmatrix", true, &execute_movmatrix};

}  // namespace detail

// Two elements of 16 bits of a matrix that the warp has, for two of the transposed one.
inline uint32_t movmatrix(uint32_t pair) {
  Block &block = *current_block;
  WarpSlots &slots = block.warp().slots;
  const int lane = block.lane();
  slots.shuffle_value[lane] = pair;
  block.meet(detail::kMovmatrix);
  return slots.shuffle_result[lane];
}

}  // namespace sdpa::simt
