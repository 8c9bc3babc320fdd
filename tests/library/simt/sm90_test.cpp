// The instructions of sm_90: wgmma multiplies what TMA has brought, for every swizzle and both ways to lie in memory;
// tensor maps, rings of mbarriers and barriers that some warps only arrive at.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "sm90_operands.hpp"

using namespace sdpa::simt;
using namespace simt_test;
using namespace simt_test::sm90;

namespace {

// D[64, kN] = A[64, 16] B, A and B from shared memory; B is [kN, 16] (K-major) or [16, kN] (MN-major), in rows of
// `width` bytes. The columns of A and of a K-major B that are multiplied start at 16 · step.
void check_product(int width, bool is_mn_major, int step) {
  const int columns = width / 2;
  const Matrix a(kRows, columns, 1), b(is_mn_major ? 16 : kN, is_mn_major ? kN : columns, 2);
  const TensorMap map_a = a.map(columns, kRows), map_b = b.map(columns, is_mn_major ? 16 : kN);
  std::vector<float> result(kRows * kN);
  CHECK_OK(run_kernel(1, kThreads, kSmemBytes, [&] {
    if (thread_idx() == 0) init(barrier(), 1);
    syncthreads();
    const int chunks = is_mn_major ? (kN + columns - 1) / columns : 1;
    if (thread_idx() == 0) {
      expect(barrier(), kRows * width + int(b.map(columns, is_mn_major ? 16 : kN).box[1]) * width * chunks);
      load(map_a, dynamic_smem());
      for (int c = 0; c < chunks; ++c) load(map_b, dynamic_smem() + kOffsetB + c * 16 * width, c * columns);
    }
    wait(barrier(), 0);
    float d[kN / 2];
    const uint64_t desc_a = descriptor(32 * step, 0, 8 * width, width);
    wgmma_fence();
    if (is_mn_major) {
      wgmma<Half, true, kN>(d, desc_a, descriptor(kOffsetB, 16 * width, 8 * width, width), true);
    } else {
      wgmma<Half, false, kN>(d, desc_a, descriptor(kOffsetB + 32 * step, 0, 8 * width, width), true);
    }
    wgmma_commit();
    for (const float value : d) CHECK(std::isnan(value));  // not before the wait
    wgmma_wait<0>();
    const int lane = thread_idx() % 32;
    for (int i = 0; i < kN / 2; ++i) {
      const int row = thread_idx() / 32 * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      result[size_t(row * kN + column)] = d[i];
    }
  }));
  for (int row = 0; row < kRows; ++row) {
    for (int n = 0; n < kN; ++n) {
      float sum = 0.f;
      for (int k = 0; k < 16; ++k)
        sum += a.at(row, 16 * step + k) * (is_mn_major ? b.at(k, n) : b.at(n, 16 * step + k));
      CHECK(result[size_t(row * kN + n)] == sum);
    }
  }
}

}  // namespace

SIMT_CASE(wgmma_multiplies_what_tma_brought_in_every_swizzle) {
  for (const int width : {32, 64, 128}) {
    for (int step = 0; step < width / 32; ++step) check_product(width, false, step);
    check_product(width, true, 0);
  }
}

SIMT_CASE(wgmma_adds_to_what_was_there_and_takes_a_from_registers) {
  CHECK_OK(run_kernel(1, kThreads, kSmemBytes, [] {
    bring_operands();
    const int lane = thread_idx() % 32, first = thread_idx() / 32 * 16 + lane / 4, k = lane % 4 * 2;
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&a[i], &kA.bits[size_t((first + i % 2 * 8) * 16 + k + i / 2 * 8)], 4);
    float from_registers[kN / 2], twice[kN / 2];
    wgmma_fence();
    wgmma<Half, false, kN>(from_registers, a, descriptor(kOffsetB, 0, 256, 32), true);
    multiply_operands(twice);
    multiply_operands(twice, kOffsetB, false);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < kN / 2; ++i) CHECK(twice[i] == 2 * from_registers[i]);
  }));
}

// A of bytes from registers, B [kN, columns] from shared memory: every swizzle, signed and not, onto integers that no
// float holds next to the sums.
template <class ByteA>
static void check_product_of_bytes(int width, int step) {
  constexpr uint32_t kBefore = 0x40000001;
  std::mt19937 random{uint32_t(width + step)};
  std::vector<uint8_t> a(kRows * 32);
  std::vector<int8_t> b(size_t(kN * width));
  for (auto &byte : a) byte = uint8_t(random());
  for (auto &byte : b) byte = int8_t(random());
  const uint64_t extent[2] = {uint64_t(width), kN}, stride[1] = {uint64_t(width)};
  const uint32_t box[2] = {uint32_t(width), kN};
  TensorMap map;
  CHECK_OK(make_tensor_map(map, "b", 1, b.data(), 2, extent, stride, box, width));
  CHECK_OK(run_kernel(1, kThreads, kSmemBytes, [&] {
    if (thread_idx() == 0) init(barrier(), 1);
    syncthreads();
    if (thread_idx() == 0) {
      expect(barrier(), kN * width);
      load(map, dynamic_smem());
    }
    wait(barrier(), 0);
    const int lane = thread_idx() % 32, first = thread_idx() / 32 * 16 + lane / 4, k = lane % 4 * 4;
    uint32_t registers[4];
    for (int i = 0; i < 4; ++i) std::memcpy(&registers[i], &a[size_t((first + i % 2 * 8) * 32 + k + i / 2 * 16)], 4);
    uint32_t once[kN / 2], added[kN / 2];
    for (uint32_t &sum : added) sum = kBefore;
    wgmma_fence();
    wgmma_bytes<ByteA, kN>(once, registers, descriptor(32 * step, 0, 8 * width, width), true);
    wgmma_bytes<ByteA, kN>(added, registers, descriptor(32 * step, 0, 8 * width, width), false);
    wgmma_commit();
    wgmma_wait<0>();
    for (int i = 0; i < kN / 2; ++i) {
      const int row = first + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      int sum = 0;
      for (int at = 0; at < 32; ++at)
        sum += int(ByteA(a[size_t(row * 32 + at)])) * b[size_t(column * width + 32 * step + at)];
      CHECK(int32_t(once[i]) == sum);
      CHECK(added[i] == kBefore + uint32_t(sum));
    }
  }));
}

SIMT_CASE(wgmma_of_bytes_makes_integers) {
  for (const int width : {32, 64, 128}) {
    for (int step = 0; step < width / 32; ++step) {
      check_product_of_bytes<int8_t>(width, step);
      check_product_of_bytes<uint8_t>(width, step);
    }
  }
}

SIMT_CASE(a_bulk_copy_moves_bytes_as_they_lie) {
  alignas(16) static uint8_t from[528];
  for (size_t i = 0; i < sizeof(from); ++i) from[i] = uint8_t(7 * i);
  CHECK_OK(run_kernel(1, 32, kSmemBytes, [] {
    if (thread_idx() == 0) {
      init(barrier(), 1);
      expect(barrier(), sizeof(from));
      async().load(*current_block, bytes_as_they_lie(from, 512), barrier(), dynamic_smem() + 128, {0, 0, 0, 0, 0});
      async().load(*current_block, bytes_as_they_lie(from + 512, 16), barrier(), dynamic_smem(), {0, 0, 0, 0, 0});
      wait(barrier(), 0);
      CHECK(std::memcmp(dynamic_smem() + 128, from, 512) == 0);
      CHECK(std::memcmp(dynamic_smem(), from + 512, 16) == 0);
    }
  }));
}

SIMT_CASE(tma_reads_zeros_and_writes_nothing_outside_of_the_tensor) {
  std::vector<uint16_t> out(10 * 24, 7);
  const uint64_t extent[2] = {24, 10}, stride[1] = {48};
  const uint32_t box[2] = {16, 16};
  TensorMap map;
  CHECK_OK(make_tensor_map(map, "out", 2, out.data(), 2, extent, stride, box, 32));
  const Matrix from(10, 24, 5);
  const TensorMap map_from = from.map(16, 16);
  CHECK_OK(run_kernel(1, 32, kSmemBytes, [&] {
    if (thread_idx() != 0) return;
    init(barrier(), 1);
    expect(barrier(), 2 * 16 * 32);
    load(map_from, dynamic_smem(), 16, 4);
    load(map_from, dynamic_smem() + 512, -8, -4);
    wait(barrier(), 0);
    async().store(*current_block, map, dynamic_smem(), {16, 4, 0, 0, 0});
    async().store(*current_block, map, dynamic_smem() + 512, {-8, -4, 0, 0, 0});
    async().commit_stores(*current_block);
    async().wait_stores(*current_block, 0);
  }));
  for (int row = 0; row < 10; ++row) {
    for (int column = 0; column < 24; ++column) {
      const bool is_first = column >= 16 && row >= 4, is_second = column < 8 && row < 12;
      const size_t at = size_t(row * 24 + column);
      CHECK(out[at] == (is_first || is_second ? from.bits[at] : 7));
    }
  }
}

SIMT_CASE(a_tensor_map_is_refused_as_the_driver_refuses_it) {
  alignas(16) static uint16_t data[1024];
  const auto made = [](const void *address, uint64_t columns, uint64_t stride, uint32_t box_columns, uint32_t box_rows,
                       int swizzle) {
    const uint64_t extent[2] = {columns, 8}, strides[1] = {stride};
    const uint32_t box[2] = {box_columns, box_rows};
    TensorMap map;
    return make_tensor_map(map, "q", 2, address, 2, extent, strides, box, swizzle);
  };
  CHECK_OK(made(data, 64, 128, 64, 8, 128));
  const auto refuses = [&](const sdpa::Status &status, const char *text) {
    CHECK(status.code == SDPA_INVALID_ARGUMENT);
    CHECK(std::strstr(status.message, text) != nullptr);
  };
  refuses(made(data + 1, 64, 128, 64, 8, 128), "q: address");
  refuses(made(data, 0, 128, 64, 8, 128), "q: extent 0 of the tensor map is 0");
  refuses(made(data, 64, 120, 64, 8, 128), "q: stride 1 of the tensor map is 120");
  refuses(made(data, 64, uint64_t{1} << 40, 64, 8, 128), "below 2^40");
  refuses(made(data, 64, 128, 64, 8, 64), "q: box extent 0");
  refuses(made(data, 64, 128, 64, 257, 128), "q: box extent 1 of the tensor map is 257");
  refuses(made(data, 64, 128, 64, 8, 48), "a swizzle of 48 bytes");
}

SIMT_CASE(a_ring_of_mbarriers_passes_every_schedule) {
  constexpr int kBlocks = 40, kStages = 3;
  const Matrix source(kBlocks * 8, 16, 6);
  const TensorMap map = source.map(16, 8);
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(1, 96, kSmemBytes, [&] {
      uint64_t *const full = barrier(), *const empty = barrier(kStages);
      if (thread_idx() == 0) {
        for (int i = 0; i < kStages; ++i) {
          init(full + i, 1);
          init(empty + i, 2);
        }
      }
      syncthreads();
      if (thread_idx() < 32) {
        if (!elect()) return;
        for (int n = 0; n < kBlocks; ++n) {
          wait(empty + n % kStages, n / kStages % 2 ^ 1);
          expect(full + n % kStages, 256);
          load(map, dynamic_smem() + n % kStages * 256, 0, n * 8, full + n % kStages);
        }
        return;
      }
      for (int n = 0; n < kBlocks; ++n) {
        wait(full + n % kStages, n / kStages % 2);
        const uint32_t place = swizzled(kSharedBase + uint32_t(n % kStages * 256 + 32 * (n % 8)), 32) - kSharedBase;
        uint16_t first;
        std::memcpy(&first, dynamic_smem() + place, 2);
        CHECK(first == source.bits[size_t((n * 8 + n % 8) * 16)]);
        syncwarp();
        if (thread_idx() % 32 == 0) expect(empty + n % kStages, 0);
      }
    }));
  }
}

SIMT_CASE(who_only_arrives_at_a_barrier_does_not_wait) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    int turns = 0;
    CHECK_OK(run_kernel(1, 64, 0, [&] {
      const bool is_first = thread_idx() < 32;
      if (is_first) arrive_group(1, 64);
      for (int turn = 0; turn < 6; ++turn) {
        sync_group(is_first ? 1 : 2, 64);
        if (thread_idx() % 32 == 0) CHECK(turns++ % 2 == (is_first ? 0 : 1));
        arrive_group(is_first ? 2 : 1, 64);
      }
      if (is_first) sync_group(1, 64);
    }));
    CHECK(turns == 12);
  }
}
