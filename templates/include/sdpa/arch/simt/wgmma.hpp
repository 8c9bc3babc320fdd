// wgmma of one warp: its 16 rows of D[64, N] = A[64, K] B[K, N] + C, from the descriptors that a GPU gets. K is 16 for
// elements of 16 bits and float32 sums, 32 for bytes and int32 sums.
//
// A descriptor names a matrix in shared memory by its first byte, two strides and a swizzle (PTX ISA, "Asynchronous
// warpgroup level matrix shared memory layout"). K-major: 8 rows of `width` bytes lie one after the other, the next 8
// rows `stride` bytes on; bytes lie like that. MN-major: 8 values of k, each with width / 2 elements along N, the next 8 `stride` bytes on,
// the next width / 2 elements `leading` bytes on. Accumulators and an A in registers lie as those of mma.hpp do, one
// 16 x 8 tile after another, and those of bytes as in byte_mma.hpp. Arithmetic only; who waits for what is block.hpp's business.
#pragma once

#include <cstdint>
#include <cstring>

#include "sdpa/arch/simt/build_kind.hpp"
#include "sdpa/arch/simt/mma.hpp"
#include "sdpa/arch/simt/shared_address.hpp"
#include "sdpa/arch/simt/tensor_map.hpp"

namespace sdpa::simt {

inline constexpr int kMaxWgmmaN = 256;

struct MatrixDescriptor {
  uint32_t start;    // shared address
  uint32_t leading;  // bytes
  uint32_t stride;   // bytes
  uint32_t width;    // bytes of a swizzled row; 0: not swizzled, which no kernel here uses

  static MatrixDescriptor of(uint64_t bits) {
    static constexpr uint32_t kWidths[4] = {0, 128, 64, 32};
    const auto field = [bits](int shift) { return static_cast<uint32_t>(bits >> shift & 0x3fff) << 4; };
    return {field(0), field(16), field(32), kWidths[bits >> 62]};
  }

  // Of the swizzle: a matrix starts in the first of 8 rows.
  bool is_aligned() const { return width != 0 && start % (8 * width) < width; }

  // Shared address of 8 elements along K of row `row`, K-major.
  uint32_t along_k(uint32_t row, uint32_t k) const {
    return swizzled(start + row % 8 * width + row / 8 * stride + 2 * k, width);
  }
  // Shared address of 8 elements along N, MN-major.
  uint32_t along_n(uint32_t n, uint32_t k) const {
    const uint32_t elements = width / 2;
    return swizzled(start + n % elements * 2 + n / elements * leading + k % 8 * width + k / 8 * stride, width);
  }
};

// Operands as floats, or bytes as they come.
struct WgmmaOperands {
  alignas(32) float a[16][16];
  alignas(32) float b[16][kMaxWgmmaN];
  uint8_t a_bytes[16][32];
  int8_t b_bytes[kMaxWgmmaN][32];
};

// chunk(address): the 16 bytes at a shared address.
template <class Format, class Chunk>
SDPA_SIMT_UNOBSERVED inline void decode_a(WgmmaOperands &to, const MatrixDescriptor &a, int first_row,
                                          const Chunk &chunk) {
  for (uint32_t row = 0; row < 16; ++row) {
    for (uint32_t k = 0; k < 16; k += 8)
      Format::decode8(chunk(a.along_k(static_cast<uint32_t>(first_row) + row, k)), &to.a[row][k]);
  }
}

template <class Format, class Chunk>
SDPA_SIMT_UNOBSERVED inline void decode_b(WgmmaOperands &to, const MatrixDescriptor &b, bool is_mn_major, int n,
                                          const Chunk &chunk) {
  if (is_mn_major) {
    for (uint32_t k = 0; k < 16; ++k) {
      for (uint32_t column = 0; column < static_cast<uint32_t>(n); column += 8)
        Format::decode8(chunk(b.along_n(column, k)), &to.b[k][column]);
    }
    return;
  }
  for (uint32_t column = 0; column < static_cast<uint32_t>(n); ++column) {
    float row[16];
    Format::decode8(chunk(b.along_k(column, 0)), row);
    Format::decode8(chunk(b.along_k(column, 8)), row + 8);
    for (int k = 0; k < 16; ++k) to.b[k][column] = row[k];
  }
}

// Lane `lane`'s four registers of A.
template <class Format>
inline void decode_a(WgmmaOperands &to, int lane, const uint32_t (&registers)[4]) {
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const uint16_t pair[8] = {static_cast<uint16_t>(registers[i]), static_cast<uint16_t>(registers[i] >> 16)};
    float values[8];
    Format::decode8(pair, values);
    to.a[g + i % 2 * 8][2 * t + i / 2 * 8] = values[0];
    to.a[g + i % 2 * 8][2 * t + i / 2 * 8 + 1] = values[1];
  }
}

// acc[16][n] += A B, sums over k in ascending order.
inline void multiply(const WgmmaOperands &from, float *acc, int n) {
  typedef float Row __attribute__((vector_size(32)));
  constexpr int kRows = 8;  // independent sums, to hide the latency of a multiply-add
  for (int m = 0; m < 16; m += kRows) {
    for (int column = 0; column < n; column += 8) {
      Row sum[kRows];
      for (int i = 0; i < kRows; ++i) std::memcpy(&sum[i], acc + (m + i) * n + column, sizeof(Row));
      for (int k = 0; k < 16; ++k) {
        Row row;
        std::memcpy(&row, &from.b[k][column], sizeof(row));
        for (int i = 0; i < kRows; ++i) sum[i] += from.a[m + i][k] * row;
      }
      for (int i = 0; i < kRows; ++i) std::memcpy(acc + (m + i) * n + column, &sum[i], sizeof(Row));
    }
  }
}

// ---- bytes, K-major ----

// chunk(address): the 16 bytes at a shared address.
template <class Chunk>
SDPA_SIMT_UNOBSERVED inline void decode_b_bytes(WgmmaOperands &to, const MatrixDescriptor &b, int n,
                                                const Chunk &chunk) {
  for (uint32_t column = 0; column < static_cast<uint32_t>(n); ++column) {
    std::memcpy(&to.b_bytes[column][0], chunk(b.along_k(column, 0)), 16);
    std::memcpy(&to.b_bytes[column][16], chunk(b.along_k(column, 8)), 16);
  }
}

// Lane `lane`'s four registers of A.
inline void decode_a_bytes(WgmmaOperands &to, int lane, const uint32_t (&registers)[4]) {
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) std::memcpy(&to.a_bytes[g + i % 2 * 8][4 * t + i / 2 * 16], &registers[i], 4);
}

// acc[16][n] += A B, int32 in the bits of a float. ByteA: int8_t or uint8_t.
template <class ByteA>
inline void multiply_bytes(const WgmmaOperands &from, float *acc, int n) {
  for (int m = 0; m < 16; ++m) {
    for (int column = 0; column < n; ++column) {
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k)
        sum += static_cast<int32_t>(static_cast<ByteA>(from.a_bytes[m][k])) * from.b_bytes[column][k];
      uint32_t word;
      std::memcpy(&word, acc + m * n + column, sizeof(word));
      word += static_cast<uint32_t>(sum);
      std::memcpy(acc + m * n + column, &word, sizeof(word));
    }
  }
}

}  // namespace sdpa::simt
