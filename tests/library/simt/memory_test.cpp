// Shared memory and cp.async: poison, alignment, and when copied bytes become visible.
#include <cstring>

#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

struct alignas(16) Vector {
  unsigned char bytes[16];
};

bool holds(const void *address, unsigned char byte) {
  Vector expected;
  std::memset(&expected, byte, sizeof(expected));
  return std::memcmp(address, &expected, sizeof(expected)) == 0;
}

Vector filled(unsigned char byte) {
  Vector vector;
  std::memset(&vector, byte, sizeof(vector));
  return vector;
}

}  // namespace

SIMT_CASE(shared_memory_starts_poisoned_in_every_block) {
  const Configured configured(0, 1);
  for (const int smem_bytes : {0, 1, 100, 4096, 101376}) {
    CHECK_OK(run_kernel(3, 1, smem_bytes, [&] {
      for (int i = 0; i < smem_bytes; ++i) CHECK(static_cast<unsigned char>(dynamic_smem()[i]) == 0xff);
      std::memset(dynamic_smem(), 1, size_t(smem_bytes));
    }));
  }
}

SIMT_CASE(shared_memory_is_aligned_to_128_bytes_and_no_more) {
  for (int smem_bytes = 0; smem_bytes < 3000; smem_bytes += 77) {
    CHECK_OK(run_kernel(1, 1, smem_bytes, [] { CHECK(reinterpret_cast<uintptr_t>(dynamic_smem()) % 256 == 128); }));
  }
}

SIMT_CASE(write_outside_shared_memory_is_found) {
  for (const int offset : {256, 383, -1, -128}) {
    const auto kernel = [&] {
      char *const volatile smem = dynamic_smem();
      if (block_idx() == 1) smem[offset] = 0;
    };
    CHECK_BROKEN_RULE(run_kernel(2, 1, 256, kernel),
                      "kernel test_kernel, block 1: wrote outside its 256 bytes of dynamic shared memory");
  }
}

SIMT_CASE(cp_async_bytes_land_at_the_wait) {
  Vector source = filled(0x11);
  CHECK_OK(run_kernel(1, 1, 16, [&] {
    char *const smem = dynamic_smem();
    std::memset(smem, 0x22, 16);
    cp_async(smem, &source, true);
    CHECK(holds(smem, 0xff));
    cp_async_fence();
    CHECK(holds(smem, 0xff));
    source = filled(0x33);  // the copy may read its source as late as this
    cp_async_wait(1);
    CHECK(holds(smem, 0xff));
    cp_async_wait(0);
    CHECK(holds(smem, 0x33));
  }));
}

SIMT_CASE(cp_async_without_load_writes_zeros_and_reads_nothing) {
  const Vector source = filled(0x44);
  CHECK_OK(run_kernel(1, 1, 32, [&] {
    cp_async(dynamic_smem(), &source, false);
    cp_async(dynamic_smem() + 16, reinterpret_cast<const void *>(uintptr_t(8)), false);
    CHECK(holds(dynamic_smem(), 0xff) && holds(dynamic_smem() + 16, 0xff));
    cp_async_fence();
    cp_async_wait(0);
    CHECK(holds(dynamic_smem(), 0) && holds(dynamic_smem() + 16, 0));
  }));
}

SIMT_CASE(cp_async_wait_leaves_the_youngest_groups_pending) {
  const Vector sources[4] = {filled(1), filled(2), filled(3), filled(4)};
  CHECK_OK(run_kernel(1, 1, 5 * 16, [&] {
    char *const smem = dynamic_smem();
    cp_async(smem, &sources[0], true);
    cp_async(smem + 16, &sources[1], true);
    cp_async_fence();
    cp_async(smem + 32, &sources[2], true);
    cp_async_fence();
    cp_async_fence();  // an empty group is a group
    cp_async_wait(3);
    CHECK(holds(smem, 0xff));
    cp_async_wait(2);
    CHECK(holds(smem, 1) && holds(smem + 16, 2) && holds(smem + 32, 0xff));
    cp_async(smem + 48, &sources[3], true);
    cp_async_wait(1);
    CHECK(holds(smem + 32, 3) && holds(smem + 48, 0xff));
    cp_async_wait(0);  // covers no copy that is not committed
    CHECK(holds(smem + 48, 0xff));
    cp_async_fence();
    cp_async_wait(0);
    CHECK(holds(smem + 48, 4));
  }));
}

SIMT_CASE(cp_async_groups_belong_to_their_thread) {
  const Vector source = filled(7);
  CHECK_OK(run_kernel(1, 64, 64 * 16, [&] {
    const int thread = thread_idx();
    char *const smem = dynamic_smem();
    cp_async(smem + 16 * thread, &source, true);
    cp_async_fence();
    syncthreads();
    if (thread < 32) cp_async_wait(0);
    syncthreads();
    for (int i = 0; i < 64; ++i) CHECK(holds(smem + 16 * i, i < 32 ? 7 : 0xff));
    syncthreads();
    cp_async_wait(0);
    syncthreads();
    for (int i = 0; i < 64; ++i) CHECK(holds(smem + 16 * i, 7));
  }));
}

SIMT_CASE(cp_async_pipeline_keeps_its_order) {
  std::vector<Vector> source;
  for (int i = 0; i < 100; ++i) source.push_back(filled(static_cast<unsigned char>(i)));
  CHECK_OK(run_kernel(1, 32, 32 * 3 * 16, [&] {
    char *const stages = dynamic_smem() + thread_idx() * 3 * 16;
    for (int i = 0; i < 102; ++i) {
      if (i >= 2) {
        cp_async_wait(1);
        CHECK(holds(stages + (i - 2) % 3 * 16, static_cast<unsigned char>(i - 2)));
        if (i <= 100) CHECK(holds(stages + (i - 1) % 3 * 16, 0xff));
      }
      if (i < 100) cp_async(stages + i % 3 * 16, &source[size_t(i)], true);
      cp_async_fence();
    }
  }));
}
