// Two floats, rounded to nearest even, side by side in one 32-bit register: `lo` in the lower half.
#pragma once

#include <cstdint>
#include <cstring>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target.hpp"

namespace sdpa::arch {

template <class Element>
SDPA_DEVICE uint32_t pack(float lo, float hi) {
  static_assert(sizeof(Element) == 2);
  uint32_t packed;
#if defined(SDPA_TARGET_HOST)
  const Element pair[2] = {Element(lo), Element(hi)};
  std::memcpy(&packed, pair, sizeof(packed));
#else
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
#endif
  return packed;
}

}  // namespace sdpa::arch
