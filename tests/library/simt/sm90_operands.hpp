// What the tests of sm_90's instructions share: short names for the engine's mbarriers and TMA, a matrix to bring into
// shared memory, and two operands of wgmma there.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "harness.hpp"
#include "sdpa/arch/simt/collectives_sm90.hpp"

namespace simt_test::sm90 {

using namespace sdpa::simt;

constexpr int kThreads = 128;
constexpr int kRows = 64;
constexpr int kN = 32;
constexpr int kSmemBytes = 24 << 10;
constexpr int kOffsetB = 8 << 10;
constexpr int kOffsetBarrier = 20 << 10;

inline uint64_t *barrier(int index = 0) {
  return reinterpret_cast<uint64_t *>(dynamic_smem() + kOffsetBarrier) + index;
}
inline Async &async() { return current_block->async(); }
inline void init(uint64_t *at, int arrivals) { async().init(*current_block, at, arrivals); }
inline void expect(uint64_t *at, int bytes) { async().arrive(*current_block, at, bytes); }
inline void wait(uint64_t *at, int parity) { async().wait(*current_block, at, parity); }
inline void load(const TensorMap &map, void *smem, int column = 0, int row = 0, uint64_t *at = nullptr) {
  async().load(*current_block, map, at == nullptr ? barrier() : at, smem, {column, row, 0, 0, 0});
}

inline uint64_t descriptor(int offset, int leading, int stride, int width) {
  const uint64_t type = width == 128 ? 1 : width == 64 ? 2 : 3;
  const auto field = [](int bytes) { return uint64_t(bytes) >> 4 & 0x3fff; };
  return field(offset + int(kSharedBase)) | field(leading) << 16 | field(stride) << 32 | type << 62;
}

// [rows][columns] of small integers, which products keep exactly.
struct Matrix {
  int rows, columns;
  std::vector<uint16_t> bits;

  Matrix(int num_rows, int num_columns, int seed)
      : rows(num_rows), columns(num_columns), bits(size_t(num_rows * num_columns)) {
    std::mt19937 random{uint32_t(seed)};
    static constexpr uint16_t kValues[] = {0xc000, 0xbc00, 0x0000, 0x3c00, 0x4000, 0x4200};  // -2 -1 0 1 2 3
    for (uint16_t &element : bits) element = kValues[random() % 6];
  }
  float at(int row, int column) const { return Half::decode(bits[size_t(row * columns + column)]); }
  TensorMap map(int box_columns, int box_rows) const {
    const uint64_t extent[2] = {uint64_t(columns), uint64_t(rows)}, stride[1] = {uint64_t(columns) * 2};
    const uint32_t box[2] = {uint32_t(box_columns), uint32_t(box_rows)};
    TensorMap made;
    CHECK_OK(make_tensor_map(made, "matrix", 2, bits.data(), 2, extent, stride, box, 2 * box_columns));
    return made;
  }
};

// What every rule's test starts from: A and B of 16 columns in shared memory, and one multiplication that is in flight.
inline const Matrix kA(kRows, 16, 3), kB(kN, 16, 4);

inline void bring_operands() {
  static const TensorMap map_a = kA.map(16, kRows), map_b = kB.map(16, kN);
  if (thread_idx() == 0) {
    init(barrier(), 1);
    init(barrier(1), 1);
  }
  syncthreads();
  if (thread_idx() == 0) {
    expect(barrier(), (kRows + kN) * 32);
    load(map_a, dynamic_smem());
    load(map_b, dynamic_smem() + kOffsetB);
  }
  wait(barrier(), 0);
}

inline void multiply_operands(float (&d)[kN / 2], int offset_b = kOffsetB, bool is_zeroed = true) {
  wgmma<Half, false, kN>(d, descriptor(0, 0, 256, 32), descriptor(offset_b, 0, 256, 32), is_zeroed);
}

}  // namespace simt_test::sm90
