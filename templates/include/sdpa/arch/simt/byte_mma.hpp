// mma.sync.m16n8k32 row.col of bytes with int32 sums, for one warp: D[16, 8] = A[16, 32] B[32, 8] + C[16, 8].
//
// As mma.hpp: lanes write their registers to their places, the last to arrive multiplies, every lane reads its sums.
// Lane l = 4 g + t owns (PTX ISA, "Matrix Fragments for mma.m16n8k32"):
//   A  a0 [g, 4t..]  a1 [g + 8, 4t..]  a2 [g, 4t + 16..]  a3 [g + 8, 4t + 16..]     four bytes each, row major
//   B  b0 [4t.., g]  b1 [4t + 16.., g]                                              four bytes each, along k
//   C  c0 c1 [g, 2t..]  c2 c3 [g + 8, 2t..]
// Sums are exact and wrap as int32 does. This file is arithmetic only.
#pragma once

#include <cstdint>
#include <cstring>

namespace sdpa::simt {

class ByteMmaTiles {
 public:
  void deposit(int lane, const uint32_t (&a)[4], const uint32_t (&b)[2], const uint32_t (&c)[4]) {
    const int g = lane / 4;
    const int t = lane % 4;
    for (int half = 0; half < 2; ++half) {
      std::memcpy(&a_[g][4 * t + 16 * half], &a[2 * half], 4);
      std::memcpy(&a_[g + 8][4 * t + 16 * half], &a[2 * half + 1], 4);
      std::memcpy(&b_[g][4 * t + 16 * half], &b[half], 4);
    }
    std::memcpy(&c_[g][2 * t], &c[0], 8);
    std::memcpy(&c_[g + 8][2 * t], &c[2], 8);
  }

  void collect(int lane, uint32_t (&d)[4]) const {
    const int g = lane / 4;
    const int t = lane % 4;
    std::memcpy(&d[0], &c_[g][2 * t], 8);
    std::memcpy(&d[2], &c_[g + 8][2 * t], 8);
  }

  // ByteA: int8_t or uint8_t; the bytes of B are signed.
  template <class ByteA>
  void multiply() {
    int16_t a[16][32];
    int16_t b[8][32];
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 32; ++k) a[m][k] = static_cast<ByteA>(a_[m][k]);
    for (int n = 0; n < 8; ++n)
      for (int k = 0; k < 32; ++k) b[n][k] = static_cast<int8_t>(b_[n][k]);
    for (int m = 0; m < 16; ++m) {
      for (int n = 0; n < 8; ++n) {
        int32_t sum = 0;  // of at most 32 · 255 · 128
        for (int k = 0; k < 32; ++k) sum += int32_t{a[m][k]} * b[n][k];
        c_[m][n] += static_cast<uint32_t>(sum);
      }
    }
  }

 private:
  alignas(32) uint8_t a_[16][32];  // (m, k)
  alignas(32) uint8_t b_[8][32];   // (n, k)
  alignas(32) uint32_t c_[16][8];  // (m, n)
};

}  // namespace sdpa::simt
