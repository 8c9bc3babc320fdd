// Bank conflicts of ldmatrix and cp.async, counted against what can be counted by hand.
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

// One block of 32 threads that copies and reads rows `stride` bytes apart, with 16-byte pieces permuted by `swizzle`.
template <class Place>
BankCounts counts(const Place &place) {
  Block block;
  static const Place *the_place;
  the_place = &place;
  KernelCall call = {};
  call.name = "test_kernel";
  call.threads = 32;
  call.smem_bytes = 1 << 15;
  call.run = [](const void *) {
    void *const row = dynamic_smem() + (*the_place)(thread_idx());
    cp_async(row, &kZeros, true);
    cp_async_fence();
    cp_async_wait(0);
    syncwarp();
    uint32_t d[4];
    ldmatrix<false>(d, row);
  };
  CHECK(block.run(call, 0));
  return block.bank_conflicts().counts();
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
      "\"cp_async_conflicts\": 84}\n";
  CHECK(text == line + line);
}
