// Transposes a matrix of 8 x 8 elements of 16 bits that a warp holds: lane l has those of row l / 4 and of the columns
// 2 (l % 4) + {0, 1}, and gets those of the transposed one. A matrix of 32 bits is two: of the lower halves, and of the
// upper ones.
#pragma once

#include <cstdint>
#include <cstring>

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

SDPA_DEVICE float2 transpose(float2 pair) {
  uint32_t bits[2];
  memcpy(bits, &pair, sizeof(bits));
  const uint32_t lower = transpose((bits[0] & 0xffffu) | bits[1] << 16);
  const uint32_t upper = transpose(bits[0] >> 16 | (bits[1] & 0xffff0000u));
  bits[0] = (lower & 0xffffu) | upper << 16;
  bits[1] = lower >> 16 | (upper & 0xffff0000u);
  memcpy(&pair, bits, sizeof(bits));
  return pair;
}

}  // namespace sdpa::arch
