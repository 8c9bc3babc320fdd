// mma.sync.m16n8k16 row.col with fp32 accumulation, for one warp: D[16, 8] = A[16, 16] B[16, 8] + C[16, 8].
//
// A lane writes its registers to their places in the warp's tiles, the last lane to arrive multiplies, and every lane
// reads its accumulators back. Lane l = 4 g + t owns (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   A  a0 [g, 2t..]  a1 [g + 8, 2t..]  a2 [g, 2t + 8..]  a3 [g + 8, 2t + 8..]     two elements each, row major
//   B  b0 [2t.., g]  b1 [2t + 8.., g]                                             two elements each, along k
//   C  c0 c1 [g, 2t..]  c2 c3 [g + 8, 2t..]
// C and D share a tile: a lane only touches its own places, so a fast lane may come back with its next operands
// before a slow one has read its results. This file is arithmetic only; who meets when is block.hpp's business.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace sdpa::simt {

// Bit patterns to float, eight at a time.
struct Half {
  static void decode8(const uint16_t *bits, float *values) {
#if defined(__F16C__)
    _mm256_storeu_ps(values, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(bits))));
#else
    for (int i = 0; i < 8; ++i) values[i] = decode(bits[i]);
#endif
  }

  // The exponent and mantissa move to float's places, which leaves an exponent that is 112 too small; a
  // multiplication repairs it and normalises subnormals. Infinities and NaNs then get float's largest exponent.
  static float decode(uint16_t bits) {
    uint32_t word = uint32_t(bits & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &word, 4);
    value *= 0x1p112f;
    std::memcpy(&word, &value, 4);
    if (value >= 65536.0f) word |= 0x7f800000u;
    word |= uint32_t(bits & 0x8000) << 16;
    std::memcpy(&value, &word, 4);
    return value;
  }
};

struct Bfloat16 {
  static void decode8(const uint16_t *bits, float *values) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t word = uint32_t(bits[i]) << 16;
      std::memcpy(&values[i], &word, 4);
    }
  }
};

class MmaTiles {
 public:
  void deposit(int lane, const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
    const int g = lane / 4;
    const int t = lane % 4;
    std::memcpy(&a_[g][2 * t], &a[0], 4);
    std::memcpy(&a_[g + 8][2 * t], &a[1], 4);
    std::memcpy(&a_[g][2 * t + 8], &a[2], 4);
    std::memcpy(&a_[g + 8][2 * t + 8], &a[3], 4);
    for (int i = 0; i < 2; ++i) {
      b_[2 * t + 8 * i][g] = static_cast<uint16_t>(b[i]);
      b_[2 * t + 8 * i + 1][g] = static_cast<uint16_t>(b[i] >> 16);
    }
    std::memcpy(&c_[g][2 * t], &c[0], 8);
    std::memcpy(&c_[g + 8][2 * t], &c[2], 8);
  }

  void collect(int lane, float (&d)[4]) const {
    const int g = lane / 4;
    const int t = lane % 4;
    std::memcpy(&d[0], &c_[g][2 * t], 8);
    std::memcpy(&d[2], &c_[g + 8][2 * t], 8);
  }

  // Element is Half or Bfloat16. Sums over k in ascending order.
  template <class Element>
  void multiply() {
    typedef float Row __attribute__((vector_size(32)));
    alignas(32) float a[16][16];
    alignas(32) float b[16][8];
    for (int k = 0; k < 16; ++k) {
      Element::decode8(&a_[k][0], &a[k][0]);
      Element::decode8(&a_[k][8], &a[k][8]);
      Element::decode8(&b_[k][0], &b[k][0]);
    }
    constexpr int kRows = 8;  // independent sums, to hide the latency of a multiply-add
    for (int m = 0; m < 16; m += kRows) {
      Row sum[kRows];
      std::memcpy(&sum, &c_[m][0], sizeof(sum));
      for (int k = 0; k < 16; ++k) {
        Row row;
        std::memcpy(&row, &b[k][0], sizeof(row));
        for (int i = 0; i < kRows; ++i) sum[i] += a[m + i][k] * row;
      }
      std::memcpy(&c_[m][0], &sum, sizeof(sum));
    }
  }

 private:
  alignas(32) uint16_t a_[16][16];  // (m, k)
  alignas(32) uint16_t b_[16][8];   // (k, n)
  alignas(32) float c_[16][8];      // (m, n)
};

}  // namespace sdpa::simt
