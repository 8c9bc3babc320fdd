// What each collective computes, against plain loops written from the PTX ISA's fragment tables.
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "harness.hpp"
#include "sdpa/arch/simt/movmatrix.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

float bf16_to_float(uint16_t bits) {
  const uint32_t word = uint32_t(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}

float half_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int mantissa = bits & 1023;
  float magnitude = 0;
  if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else {
    magnitude = exponent == 0 ? std::ldexp(float(mantissa), -24) : std::ldexp(float(1024 + mantissa), exponent - 25);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

bool same(float x, float y) { return x == y ? std::signbit(x) == std::signbit(y) : std::isnan(x) && std::isnan(y); }

struct MmaProblem {
  uint16_t a[16][16];  // (m, k)
  uint16_t b[16][8];   // (k, n)
  float c[16][8];      // (m, n)
  float d[16][8] = {};
};

// Element i of the fragment of lane l: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <class Element>
void mma_as_kernel(MmaProblem &problem) {
  const int lane = thread_idx() % 32;
  const int group = lane >> 2;
  const int in_group = lane % 4;
  uint32_t a[4] = {}, b[2] = {};
  float c[4], d[4];
  for (int i = 0; i < 8; ++i) {
    const int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
    const int column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
    a[i / 2] |= uint32_t(problem.a[row][column]) << (16 * (i & 1));
  }
  for (int i = 0; i < 4; ++i) {
    const int row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
    b[i / 2] |= uint32_t(problem.b[row][group]) << (16 * (i & 1));
  }
  for (int i = 0; i < 4; ++i) c[i] = problem.c[i < 2 ? group : group + 8][in_group * 2 + (i & 1)];
  mma<Element>(d, a, b, c);
  for (int i = 0; i < 4; ++i) problem.d[i < 2 ? group : group + 8][in_group * 2 + (i & 1)] = d[i];
}

template <class Element>
void check_mma(float (*to_float)(uint16_t), uint16_t (*draw)(std::mt19937 &)) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    std::vector<MmaProblem> problems(3);  // one for each warp
    for (MmaProblem &problem : problems) {
      for (auto &row : problem.a)
        for (uint16_t &x : row) x = draw(random);
      for (auto &row : problem.b)
        for (uint16_t &x : row) x = draw(random);
      for (auto &row : problem.c)
        for (float &x : row) x = normal(random);
    }
    const Configured configured(seed);
    CHECK_OK(run_kernel(1, 96, 0, [&] { mma_as_kernel<Element>(problems[size_t(thread_idx() / 32)]); }));
    for (const MmaProblem &problem : problems) {
      for (int m = 0; m < 16; ++m) {
        for (int n = 0; n < 8; ++n) {
          double sum = problem.c[m][n];
          for (int k = 0; k < 16; ++k) sum += double(to_float(problem.a[m][k])) * double(to_float(problem.b[k][n]));
          CHECK(std::fabs(sum - double(problem.d[m][n])) < 1e-4);
        }
      }
    }
  }
}

}  // namespace

SIMT_CASE(mma_f16_matches_loops) {
  check_mma<Half>(half_to_float, [](std::mt19937 &random) { return uint16_t((random() & 0x83ff) | 0x3c00); });
}

SIMT_CASE(mma_bf16_matches_loops) {
  check_mma<Bfloat16>(bf16_to_float, [](std::mt19937 &random) { return uint16_t((random() & 0x807f) | 0x3f80); });
}

SIMT_CASE(mma_propagates_nan_of_poisoned_operands) {
  MmaProblem problem = {};
  problem.a[3][5] = 0xffff;
  CHECK_OK(run_kernel(1, 32, 0, [&] { mma_as_kernel<Half>(problem); }));
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) CHECK(std::isnan(problem.d[m][n]) == (m == 3));
  }
}

SIMT_CASE(half_decodes_every_bit_pattern) {
  for (uint32_t first = 0; first < 0x10000; first += 8) {
    uint16_t bits[8];
    float values[8];
    for (uint32_t i = 0; i < 8; ++i) bits[i] = uint16_t(first + i);
    Half::decode8(bits, values);
    for (int i = 0; i < 8; ++i) {
      CHECK(same(values[i], half_to_float(bits[i])));
      CHECK(same(Half::decode(bits[i]), half_to_float(bits[i])));
    }
  }
}

template <bool kTranspose>
static void check_ldmatrix() {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const Configured configured(seed);
    std::vector<uint32_t> got(64 * 4);
    // Matrix x of warp w, element [i, j] holds w << 12 | x << 8 | i << 4 | j; rows lie in a scrambled order.
    const auto place = [](int warp, int row) { return ((warp * 32 + row) * 37 % 64) * 16; };
    CHECK_OK(run_kernel(1, 64, 64 * 16, [&] {
      const int thread = thread_idx();
      const int warp = thread / 32;
      const int lane = thread % 32;
      char *const row = dynamic_smem() + place(warp, lane);
      for (int j = 0; j < 8; ++j) {
        const uint16_t value = uint16_t(warp << 12 | (lane / 8) << 8 | (lane % 8) << 4 | j);
        std::memcpy(row + 2 * j, &value, 2);
      }
      syncthreads();
      uint32_t d[4];
      ldmatrix<kTranspose>(d, row);
      for (int x = 0; x < 4; ++x) got[size_t(thread * 4 + x)] = d[x];
    }));
    for (int thread = 0; thread < 64; ++thread) {
      for (int x = 0; x < 4; ++x) {
        for (int half = 0; half < 2; ++half) {
          const int lane = thread % 32;
          const int i = kTranspose ? 2 * (lane % 4) + half : lane / 4;
          const int j = kTranspose ? lane / 4 : 2 * (lane % 4) + half;
          const uint32_t value = got[size_t(thread * 4 + x)] >> (16 * half) & 0xffff;
          CHECK(value == uint32_t((thread / 32) << 12 | x << 8 | i << 4 | j));
        }
      }
    }
  }
}

SIMT_CASE(ldmatrix_distributes_rows) { check_ldmatrix<false>(); }
SIMT_CASE(ldmatrix_trans_distributes_columns) { check_ldmatrix<true>(); }

// Lanes that run ahead to the next shuffle must not change what slower lanes receive.
SIMT_CASE(shuffle_exchanges_values) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(2, 128, 0, [&] {
      for (int mask = 0; mask < 32; ++mask) {
        const int thread = thread_idx();
        CHECK(shfl_xor(1000 * mask + thread, mask) == 1000 * mask + (thread ^ mask));
        CHECK(shfl_xor(0.5f * float(thread), mask) == 0.5f * float(thread ^ mask));
      }
    }));
  }
}

SIMT_CASE(movmatrix_transposes_what_a_warp_has) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(1, 64, 0, [&] {
      const uint32_t row = thread_idx() % 32 / 4, column = thread_idx() % 4 * 2, first = 100 * (thread_idx() / 32);
      const auto element = [&](uint32_t i, uint32_t j) { return first + 8 * i + j; };
      const uint32_t transposed = movmatrix(element(row, column) | element(row, column + 1) << 16);
      CHECK(transposed == (element(column, row) | element(column + 1, row) << 16));
    }));
  }
}

SIMT_CASE(any_is_true_for_all_lanes_when_it_is_for_one) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(1, 64, 0, [&] {
      const int lane = thread_idx() % 32;
      const int warp = thread_idx() / 32;
      for (int chosen = 0; chosen < 32; ++chosen) {
        CHECK(any(lane == chosen && warp == 0) == (warp == 0));
        CHECK(!any(false));
      }
    }));
  }
}

SIMT_CASE(syncwarp_orders_the_lanes_of_a_warp) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(1, 64, 64 * 4, [&] {
      volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
      const int thread = thread_idx();
      for (int step = 0; step < 10; ++step) {
        values[thread] = 100 * step + thread;
        syncwarp();
        CHECK(values[thread ^ 31] == 100 * step + (thread ^ 31));
        syncwarp();
      }
    }));
  }
}

SIMT_CASE(syncthreads_orders_the_block) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(2, 256, 256 * 4, [&] {
      volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
      const int thread = thread_idx();
      for (int step = 0; step < 10; ++step) {
        values[thread] = 1000 * step + thread;
        syncthreads();
        CHECK(values[255 - thread] == 1000 * step + 255 - thread);
        syncthreads();
      }
    }));
  }
}

// Group g of two warps goes through 3 + 4 g phases of its own, then the block meets.
SIMT_CASE(sync_group_orders_its_threads_only) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(1, 192, 192 * 4, [&] {
      volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
      const int thread = thread_idx();
      const int group = thread / 64;
      const int partner = group * 64 + 63 - thread % 64;
      for (int step = 0; step < 3 + 4 * group; ++step) {
        values[thread] = 1000 * step + thread;
        sync_group(1 + group, 64);
        CHECK(values[partner] == 1000 * step + partner);
        sync_group(1 + group, 64);
      }
      values[thread] = -1 - thread;
      syncthreads();
      CHECK(values[191 - thread] == -1 - (191 - thread));
    }));
  }
}

SIMT_CASE(exited_threads_are_not_waited_for) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    int num_done = 0;
    CHECK_OK(run_kernel(1, 128, 0, [&] {
      const int thread = thread_idx();
      if (thread < 32 || thread % 32 >= 16) return;  // a whole warp, and half of the others
      syncthreads();
      CHECK(shfl_xor(thread, 8) == (thread ^ 8));
      CHECK(any(thread % 32 == 3));
      syncwarp();
      syncthreads();
      ++num_done;
    }));
    CHECK(num_done == 48);
  }
}

SIMT_CASE(block_of_a_part_of_a_warp_runs) {
  CHECK_OK(run_kernel(3, 48, 0, [&] {
    CHECK(shfl_xor(thread_idx(), 1) == (thread_idx() ^ 1));
    syncthreads();
    CHECK(any(thread_idx() % 32 == 15));
  }));
}
