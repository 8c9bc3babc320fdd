// Transposes a matrix of 8 x 8 elements of 16 bits that a warp holds: lane l has those of row l / 4 and of the columns
// 2 (l % 4) + {0, 1}, and gets those of the transposed one.
#pragma once

#include <cstdint>

#include "sdpa/arch/target.hpp"
#if defined(SDPA_TARGET_HOST)
#include "sdpa/arch/simt/movmatrix.hpp"
#endif

namespace sdpa::arch {

SDPA_DEVICE uint32_t transpose(uint32_t pair) {
#if defined(SDPA_TARGET_HOST)
  return simt::movmatrix(pair);
#else
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
#endif
}

}  // namespace sdpa::arch
