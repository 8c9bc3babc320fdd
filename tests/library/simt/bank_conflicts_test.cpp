// Bank conflicts of ldmatrix, cp.async and, in observed builds, plain accesses, counted against what can be counted by hand.
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <unistd.h>

#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

struct alignas(16) Vector {
  unsigned char bytes[16];
};

const Vector kZeros = {};

// One block of 32 threads that run `body` with zeroed shared memory, wide enough for every case.
template <class Body>
BankCounts counts_of(const Body &body) {
  Block block;
  static const Body *the_body;
  the_body = &body;
  KernelCall call = {};
  call.name = "test_kernel";
  call.threads = 32;
  call.smem_bytes = 1 << 15;
  call.run = [](const void *) { (*the_body)(dynamic_smem(), thread_idx()); };
  CHECK(block.run(call, 0));
  return block.bank_conflicts().counts();
}

// Each thread copies and reads 16 bytes at its `place`.
template <class Place>
BankCounts counts(const Place &place) {
  return counts_of([&](char *smem, int lane) {
    void *const row = smem + place(lane);
    cp_async(row, &kZeros, true);
    cp_async_fence();
    cp_async_wait(0);
    syncwarp();
    uint32_t d[4];
    ldmatrix<false>(d, row);
  });
}

void check(const BankCounts &counts, int conflicts) {
  CHECK(counts.ldmatrix == 4 && counts.cp_async == 4);
  CHECK(counts.ldmatrix_conflicts == conflicts && counts.cp_async_conflicts == conflicts);
}

}  // namespace

SIMT_CASE(banks_of_neighbouring_rows_do_not_conflict) {
  check(counts([](int lane) { return 16 * lane; }), 0);
}

SIMT_CASE(banks_of_rows_128_bytes_apart_conflict) {
  check(counts([](int lane) { return 128 * lane; }), 4 * 7);
  check(counts([](int lane) { return 32 * lane; }), 4 * 1);
  check(counts([](int lane) { return 64 * lane; }), 4 * 3);
}

SIMT_CASE(banks_of_padded_and_swizzled_rows_do_not_conflict) {
  check(counts([](int lane) { return (128 + 16) * lane; }), 0);
  check(counts([](int lane) { return 128 * lane + 16 * (lane % 8); }), 0);
}

SIMT_CASE(banks_of_half_a_swizzle_conflict) {
  check(counts([](int lane) { return 128 * lane + 16 * (lane % 4); }), 4 * 1);
}

// The fullest banks of one matrix decide: here rows 0, 1 and 2 of the first.
SIMT_CASE(banks_of_one_matrix_count_once) {
  check(counts([](int lane) { return lane < 3 ? 4096 + 128 * lane : 16 * lane; }), 2);
}

SIMT_CASE(bank_statistics_are_appended_to_a_file) {
  const std::string path = "/tmp/sdpa-simt-statistics-" + std::to_string(::getpid());
  std::remove(path.c_str());
  ::setenv("SDPA_CUTLASS_HOST_STATISTICS", path.c_str(), 1);
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(run_kernel(3, 32, 1 << 13, [] {
      void *const row = dynamic_smem() + 128 * thread_idx();
      cp_async(row, &kZeros, true);
      cp_async_fence();
      cp_async_wait(0);
      syncwarp();
      uint32_t d[4];
      ldmatrix<true>(d, row);
    }));
  }
  ::unsetenv("SDPA_CUTLASS_HOST_STATISTICS");
  CHECK_OK(run_kernel(1, 1, 0, [] {}));
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::remove(path.c_str());
  const std::string line =
      "{\"kernel\": \"test_kernel\", \"blocks\": 3, \"ldmatrix\": 12, \"ldmatrix_conflicts\": 84, \"cp_async\": 12, "
      "\"cp_async_conflicts\": 84, \"plain\": 0, \"plain_conflicts\": 0}\n";
  CHECK(text == line + line);
}

// ---- plain loads and stores: observed builds only ----
#if defined(__SANITIZE_THREAD__)

namespace {

template <class T>
void store(char *smem, int offset, const T &value) {
  *reinterpret_cast<T *>(smem + offset) = value;
}

void check_plain(const BankCounts &counts, int passes, int conflicts) {
  CHECK(counts.plain == passes);
  CHECK(counts.plain_conflicts == conflicts);
}

}  // namespace

SIMT_CASE(observed_banks_of_words) {
  const auto stored = [](int stride) {
    return counts_of([=](char *smem, int lane) { store(smem, stride * lane, 1.f); });
  };
  check_plain(stored(4), 1, 0);
  check_plain(stored(8), 1, 1);
  check_plain(stored(12), 1, 0);  // an odd number of words
  check_plain(stored(128), 1, 31);
  check_plain(stored(132), 1, 0);
}

SIMT_CASE(observed_banks_of_one_word_are_read_at_once) {
  const BankCounts counts = counts_of([](char *smem, int lane) {
    store(smem, 4 * lane, lane);
    syncwarp();
    volatile int *const values = reinterpret_cast<int *>(smem);
    CHECK(values[3] == 3);
    CHECK(values[lane / 2] == lane / 2);
  });
  check_plain(counts, 3, 0);
}

SIMT_CASE(observed_banks_of_vectors) {
  struct alignas(8) Pair {
    float x, y;
  };
  const auto vectors = [](int stride) {
    return counts_of([=](char *smem, int lane) { store(smem, stride * lane, kZeros); });
  };
  check_plain(vectors(16), 4, 0);
  check_plain(vectors(32), 4, 4);
  check_plain(vectors(64), 4, 4 * 3);
  check_plain(vectors(128 + 16), 4, 0);
  const auto pairs = [](int stride) {
    return counts_of([=](char *smem, int lane) { store(smem, stride * lane, Pair{1.f, 2.f}); });
  };
  check_plain(pairs(8), 2, 0);
  check_plain(pairs(16), 2, 2);
}

// The n-th access of each lane; some lanes leave a loop before others, and a place is met again behind a barrier.
SIMT_CASE(observed_banks_of_a_loop) {
  const BankCounts counts = counts_of([](char *smem, int lane) {
    for (int step = 0; step < 2; ++step) {
      for (int i = 0; i < 1 + lane / 16; ++i) store(smem, 4096 * i + (i == 0 ? 4 : 128) * lane, 1.f);
      syncwarp();
    }
  });
  check_plain(counts, 2 * 2, 2 * 15);
}

// Two places at once are two instructions, whatever their addresses.
SIMT_CASE(observed_banks_of_two_instructions) {
  const BankCounts counts = counts_of([](char *smem, int lane) {
    store(smem, 4 * lane, 1.f);
    store(smem, 1024 + 4 * lane, 2.f);
  });
  check_plain(counts, 2, 0);
}

#endif
