// Messages about races name the lines of both accesses. Each case prints one message; tests/library/test_simt.py turns
// its call chains into lines and compares them with those marked here: "later" and "earlier", and the calls that led
// there, "called".
#include <cstring>

#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

struct alignas(16) Vector {
  unsigned char bytes[16];
};

const Vector kZeros = {};

template <class Body>
void print_race(int threads, const Body &body) {
  const Configured configured(0);
  const sdpa::Status status = run_kernel(1, threads, 16 * threads, body);
  CHECK_BROKEN_RULE(status, "data race at byte ");
  std::printf("%s\n", status.message);
}

// Not inlined, inlined, and inlined into what is not.
__attribute__((noinline)) void copy_row(int row) {
  cp_async(dynamic_smem() + 16 * row, &kZeros, true);  // lines_of_copies: earlier
  cp_async_fence();
  cp_async_wait(0);
}

__attribute__((always_inline)) inline void read_matrices() {
  uint32_t d[4];
  ldmatrix<false>(d, dynamic_smem() + 16 * (thread_idx() % 32));  // lines_of_copies: later
}

__attribute__((noinline)) void read_all() {
  read_matrices();  // lines_of_copies: later, called
  syncwarp();
}

}  // namespace

SIMT_CASE(lines_of_copies) {
  print_race(32, [] {
    copy_row(thread_idx());
    syncwarp();
    read_all();
    if (thread_idx() == 7) copy_row(9);  // lines_of_copies: earlier, called
    cp_async_wait(0);
    read_all();  // lines_of_copies: later, called
    read_all();
  });
}

// ---- plain loads and stores: observed builds only ----
#if defined(__SANITIZE_THREAD__)

namespace {

__attribute__((noinline)) void store(float *to, float value) {
  *to = value;  // lines_of_a_function: earlier, later
}

}  // namespace

SIMT_CASE(lines_of_loads_and_stores) {
  print_race(64, [] {
    float *const values = reinterpret_cast<float *>(dynamic_smem());
    values[thread_idx()] = 1;
    values[64 + thread_idx()] = 2;  // lines_of_loads_and_stores: earlier
    syncwarp();
    if (thread_idx() < 32) return;
    float sum = values[thread_idx()];
    sum += values[96 - thread_idx() + 31];  // lines_of_loads_and_stores: later
    values[thread_idx()] = sum;
  });
}

SIMT_CASE(lines_of_a_function) {
  print_race(64, [] {
    float *const values = reinterpret_cast<float *>(dynamic_smem());
    store(values + thread_idx(), 1);  // lines_of_a_function: earlier, called
    store(values + 64 + thread_idx(), 1);
    syncwarp();
    if (thread_idx() < 32) return;
    store(values + thread_idx(), 2);
    store(values + 63 - thread_idx(), 2);  // lines_of_a_function: later, called
  });
}

SIMT_CASE(lines_of_vectors) {
  print_race(64, [] {
    std::memcpy(dynamic_smem() + 16 * thread_idx(), &kZeros, 16);  // lines_of_vectors: earlier
    syncwarp();
    if (thread_idx() < 32) return;
    Vector vector;
    std::memcpy(&vector, dynamic_smem() + 16 * (63 - thread_idx()), 16);  // lines_of_vectors: later
    CHECK(vector.bytes[3] == 0);
  });
}

SIMT_CASE(lines_of_a_read_of_nothing) {
  print_race(32, [] {
    int *const values = reinterpret_cast<int *>(dynamic_smem());
    if (thread_idx() < 31) values[thread_idx()] = 1;
    syncwarp();
    CHECK(values[31 - thread_idx()] != 7);  // lines_of_a_read_of_nothing: later
  });
}

#endif
