// From floats to signed bytes and their scales, for Q as for K and V.
//
//   scale = amax / 127     byte = rint(x · (127 / amax)), in [-127, 127]
//
// amax is the largest |x| of the numbers that share the scale, compared as bit patterns, so that infinities and NaN win:
// then the scale is NaN and reaches every result that the numbers are part of. Below kSmallest, whose inverse would
// overflow, all of them count as zero: scale and bytes are 0. Products are rounded before anything is added to them, so
// that every compiler and tests/kernels/quantized_model.py get the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target.hpp"
#include "sdpa/fmha_fwd_q8/kernel_traits.cuh"

namespace sdpa::fmha_fwd_q8 {

inline constexpr float kSmallest = 0x1p-100f;
inline constexpr float kScaleOfZeros = 0x1p-64f;  // of a block of V
inline constexpr float kLargestFloat = 3.402823466e38f;

SDPA_DEVICE uint32_t to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}
SDPA_DEVICE float to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

// The bits of |x|: of two, the larger is that of the larger number, and a NaN is larger than all.
SDPA_DEVICE uint32_t magnitude(float x) { return to_bits(x) & 0x7fffffffu; }

SDPA_DEVICE bool is_finite(uint32_t magnitude) { return magnitude < 0x7f800000u; }
SDPA_DEVICE bool is_zero(uint32_t magnitude) { return magnitude < to_bits(kSmallest); }

// 0 for what counts as zero, NaN for what is not finite.
SDPA_DEVICE float scale_of(uint32_t amax) {
  if (!is_finite(amax)) return to_float(0x7fffffffu);
  return is_zero(amax) ? 0.f : to_float(amax) / kLargestInt8;
}
SDPA_DEVICE float inverse_of(uint32_t amax) {
  return is_finite(amax) && !is_zero(amax) ? kLargestInt8 / to_float(amax) : 0.f;
}

// Four numbers as bytes. Of those that share a scale; what is not finite becomes some byte.
template <class Arch>
SDPA_DEVICE uint32_t to_bytes(const float *x, float inverse) {
  constexpr float kRound = kMagic;  // the sum's low byte is the rounded product
  uint32_t word = 0;
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) word |= (to_bits(Arch::multiply(x[i], inverse) + kRound) & 0xffu) << (8 * i);
  return word;
}

// Eight neighbouring elements as floats.
template <class Element>
SDPA_DEVICE void widen(float *x, const uint4 &vector) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
  CUTE_UNROLL
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<Element, cutlass::half_t>) {
      x[2 * i] = static_cast<float>(cutlass::half_t::bitcast(static_cast<uint16_t>(words[i])));
      x[2 * i + 1] = static_cast<float>(cutlass::half_t::bitcast(static_cast<uint16_t>(words[i] >> 16)));
    } else {
      x[2 * i] = to_float(words[i] << 16);
      x[2 * i + 1] = to_float(words[i] & 0xffff0000u);
    }
  }
}

}  // namespace sdpa::fmha_fwd_q8
