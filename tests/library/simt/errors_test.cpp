// Every rule that a kernel can break ends its launch with the right message, and leaves the engine fit for more.
#include <atomic>
#include <chrono>
#include <fstream>
#include <thread>

#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

struct alignas(16) Vector {
  unsigned char bytes[16];
};

const Vector kZeros[2] = {};

// A launch of the same shape that uses warps, barriers and copies, and must succeed.
void check_engine_works(int threads, int smem_bytes) {
  std::atomic<int> num_done{0};  // blocks run on several OS threads
  CHECK_OK(run_kernel(2, threads, smem_bytes, [&] {
    if (smem_bytes >= 16 && thread_idx() == 0) {
      cp_async(dynamic_smem(), &kZeros[0], true);
      cp_async_fence();
      cp_async_wait(0);
    }
    CHECK(shfl_xor(thread_idx(), 0) == thread_idx());
    syncthreads();
    if (smem_bytes >= 16) CHECK(dynamic_smem()[15] == 0);
    ++num_done;
  }));
  CHECK(num_done == 2 * threads);
}

// `text` must be in the message in program order and under other schedules.
template <class Body>
void check_broken_rule(int threads, int smem_bytes, const char *text, const Body &body) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Configured configured(seed);
    CHECK_BROKEN_RULE(run_kernel(1, threads, smem_bytes, body), text);
    check_engine_works(threads, smem_bytes);
  }
}

int num_memory_mappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

void mma_of_zeros() {
  float d[4];
  mma<Half>(d, {0, 0, 0, 0}, {0, 0}, {0, 0, 0, 0});
}

}  // namespace

SIMT_CASE(message_names_kernel_block_warp_and_thread) {
  const auto kernel = [] {
    if (block_idx() == 2 && thread_idx() == 71) cp_async(dynamic_smem() + 4, &kZeros[0], true);
  };
  CHECK_BROKEN_RULE(run_kernel(4, 96, 64, kernel),
                    "kernel test_kernel, block 2, warp 2, thread 71: cp.async: address ");
}

SIMT_CASE(different_collectives_in_one_warp) {
  check_broken_rule(64, 0, "the warp diverged: this lane reached ", [] {
    if (thread_idx() < 32 || thread_idx() % 2 == 0) {
      syncwarp();
    } else {
      any(false);
    }
  });
  CHECK_BROKEN_RULE(run_kernel(1, 32, 0, [] { thread_idx() == 31 ? syncthreads() : mma_of_zeros(); }),
                    "warp 0, thread 31: the warp diverged: this lane reached syncthreads while lanes 0x7fffffff wait "
                    "in mma");
}

SIMT_CASE(different_barriers_in_one_warp) {
  const auto kernel = [] { sync_group(thread_idx() == 31 ? 2 : 1, 32); };
  CHECK_BROKEN_RULE(run_kernel(1, 32, 0, kernel),
                    "reached sync_group(2, 32) while lanes 0x7fffffff wait in sync_group(1, 32)");
  check_engine_works(32, 0);
}

SIMT_CASE(inactive_lanes_in_mma) {
  check_broken_rule(64, 0, "mma with inactive lanes: only lanes 0xfffffff7 of the warp take part", [] {
    if (thread_idx() != 35) mma_of_zeros();
  });
  check_broken_rule(48, 0, "mma with inactive lanes: only lanes 0x0000ffff", mma_of_zeros);
}

SIMT_CASE(inactive_lanes_in_ldmatrix) {
  check_broken_rule(32, 512, "ldmatrix with inactive lanes: only lanes 0x7fffffff", [] {
    uint32_t d[4];
    if (thread_idx() != 31) ldmatrix<false>(d, dynamic_smem());
  });
  check_broken_rule(32, 512, "ldmatrix.trans with inactive lanes: only lanes 0xfffffffe", [] {
    uint32_t d[4];
    if (thread_idx() != 0) ldmatrix<true>(d, dynamic_smem());
  });
}

SIMT_CASE(shuffle_from_an_inactive_lane) {
  check_broken_rule(32, 0, "shfl_xor: lane 4 reads from lane 5, which is inactive", [] {
    if (thread_idx() != 5) shfl_xor(1, 1);
  });
  check_broken_rule(32, 0, "shfl_xor: lane mask 32 is not in 0..31", [] { shfl_xor(1, 32); });
}

SIMT_CASE(barrier_that_never_completes) {
  check_broken_rule(128, 0, "deadlock: no thread can go on: 2 of 3 warps wait at barrier 1", [] {
    if (thread_idx() < 64) sync_group(1, 96);
  });
  check_broken_rule(128, 0,
                    "deadlock: no thread can go on: 3 of 4 warps wait at syncthreads, barrier 0, "
                    "1 of 2 warps wait at barrier 5",
                    [] { thread_idx() < 32 ? sync_group(5, 64) : syncthreads(); });
}

// Two warps exchange values while two others pass barrier 1, at which other warps of the launch before got stuck.
SIMT_CASE(barriers_start_anew_after_a_deadlock) {
  for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    const Configured configured(seed, 1);
    CHECK_BROKEN_RULE(run_kernel(1, 128, 0, [] { sync_group(thread_idx() < 64 ? 1 : 2, 96); }), "deadlock");
    CHECK_OK(run_kernel(1, 128, 0, [] {
      for (int i = 0; i < 8; ++i) {
        if (thread_idx() >= 64) {
          sync_group(1, 64);
        } else {
          CHECK(shfl_xor(thread_idx() + 1000 * i, 1) == (thread_idx() ^ 1) + 1000 * i);
        }
      }
    }));
  }
}

SIMT_CASE(different_counts_at_one_barrier) {
  check_broken_rule(128, 0, "the warps that already wait there expect ",
                    [] { sync_group(1, thread_idx() < 32 ? 64 : 128); });
}

SIMT_CASE(impossible_barriers) {
  check_broken_rule(64, 0, "sync_group(1, 33): the number of threads is not a positive multiple of 32",
                    [] { sync_group(1, 33); });
  check_broken_rule(64, 0, "sync_group(1, 0): the number of threads", [] { sync_group(1, 0); });
  check_broken_rule(64, 0, "barrier 16 does not exist", [] { sync_group(16, 64); });
  check_broken_rule(64, 0, "barrier -1 does not exist", [] { sync_group(-1, 64); });
  check_broken_rule(64, 0, "barrier 0 is syncthreads'", [] { sync_group(0, 64); });
}

SIMT_CASE(misaligned_cp_async) {
  check_broken_rule(1, 64, "is not 16-byte aligned", [] { cp_async(dynamic_smem() + 8, &kZeros[0], true); });
  check_broken_rule(1, 64, "cp.async: source", [] { cp_async(dynamic_smem(), kZeros[0].bytes + 8, true); });
}

SIMT_CASE(misaligned_ldmatrix) {
  check_broken_rule(32, 1024, "is not 16-byte aligned", [] {
    uint32_t d[4];
    ldmatrix<false>(d, dynamic_smem() + 16 * thread_idx() + (thread_idx() == 9 ? 2 : 0));
  });
}

SIMT_CASE(accesses_outside_shared_memory) {
  check_broken_rule(1, 64, "is outside the block's 64 bytes of shared memory",
                    [] { cp_async(dynamic_smem() + 64, &kZeros[0], true); });
  check_broken_rule(1, 64, "is outside the block's 64 bytes of shared memory",
                    [] { cp_async(dynamic_smem() - 16, &kZeros[0], true); });
  check_broken_rule(32, 511, "ldmatrix: address ", [] {
    uint32_t d[4];
    ldmatrix<false>(d, dynamic_smem() + 16 * thread_idx());
  });
}

SIMT_CASE(cp_async_left_behind) {
  check_broken_rule(32, 64, "warp 0, thread 3: exits with 2 cp.async copies that were never committed", [] {
    if (thread_idx() != 3) return;
    cp_async(dynamic_smem(), &kZeros[0], true);
    cp_async(dynamic_smem() + 16, &kZeros[1], false);
    cp_async_wait(0);
  });
  check_broken_rule(32, 64, "warp 0, thread 3: exits with 1 cp.async copies that were never waited for", [] {
    if (thread_idx() != 3) return;
    cp_async(dynamic_smem(), &kZeros[0], true);
    cp_async_fence();
    cp_async_fence();
    cp_async_wait(2);
  });
}

SIMT_CASE(exception_from_a_kernel) {
  check_broken_rule(64, 0, "thread 40: uncaught exception: out of cheese", [] {
    if (thread_idx() == 40) throw std::runtime_error("out of cheese");
    syncthreads();
  });
}

SIMT_CASE(impossible_launches) {
  const auto nothing = [] {};
  for (const int64_t blocks : {int64_t(0), int64_t(-1), int64_t(1) << 31}) {
    CHECK(run_kernel(blocks, 32, 0, nothing).code == SDPA_INVALID_ARGUMENT);
  }
  CHECK(run_kernel(1, 0, 0, nothing).code == SDPA_INVALID_ARGUMENT);
  CHECK(run_kernel(1, 1025, 0, nothing).code == SDPA_INVALID_ARGUMENT);
  CHECK(run_kernel(1, 32, -1, nothing).code == SDPA_INVALID_ARGUMENT);
  CHECK_OK(run_kernel(1, 1024, 0, nothing));
}

// Blocks 7 and 10 fail, in either order; both have started before one does.
SIMT_CASE(lowest_failed_block_is_reported) {
  for (const int first : {7, 10}) {
    const Configured configured(0, 2);
    std::atomic<int> num_started{0};
    std::atomic<bool> first_fails{false};
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    const auto wait_for = [&](const auto &condition) {
      while (!condition()) {
        CHECK(std::chrono::steady_clock::now() < give_up);
        std::this_thread::yield();
      }
    };
    const auto kernel = [&] {
      if (block_idx() != 7 && block_idx() != 10) return;
      ++num_started;
      wait_for([&] { return num_started.load() == 2; });
      if (block_idx() == first) {
        first_fails = true;
      } else {
        wait_for([&] { return first_fails.load(); });
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      }
      sync_group(0, 0);
    };
    CHECK_BROKEN_RULE(run_kernel(20, 1, 0, kernel), "kernel test_kernel, block 7, ");
  }
}

SIMT_CASE(no_block_starts_after_a_failure) {
  const Configured configured(0, 1);
  int num_started = 0;
  CHECK_BROKEN_RULE(run_kernel(100, 1, 0,
                               [&] {
                                 if (++num_started == 3) sync_group(0, 0);
                               }),
                    "block 2, ");
  CHECK(num_started == 3);
}

// Each failed launch drops 127 suspended fibers; their stacks must be used again.
SIMT_CASE(failures_do_not_accumulate) {
  const auto fail = [] {
    volatile char frame[2000];
    frame[0] = 0;
    syncwarp();
    if (thread_idx() == 127) any(frame[0] != 0);
    syncthreads();
  };
  const Configured configured(0, 2);
  const int before = num_memory_mappings();
  for (int i = 0; i < 300; ++i) CHECK(run_kernel(2, 128, 1024, fail).code == SDPA_HOST_CHECK);
  // At most two blocks are ever in use, each with 128 stacks and their guard pages.
  CHECK(num_memory_mappings() < before + 2 * 128 * 2 + 100);
  check_engine_works(128, 1024);
}
