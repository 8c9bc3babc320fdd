// Races on shared memory: each kind is found, in program order and under other schedules, and nothing else is.
#include <cstring>

#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

struct alignas(16) Vector {
  unsigned char bytes[16];
};

const Vector kZeros = {};

// Sets shared memory to zero through copies of `threads` threads, 16 bytes each; no barrier.
void copy_row(int row) {
  cp_async(dynamic_smem() + 16 * row, &kZeros, true);
  cp_async_fence();
}

void read_matrices(int first_row) {
  uint32_t d[4];
  ldmatrix<false>(d, dynamic_smem() + 16 * (first_row + thread_idx() % 32));
}

// The message must hold `text` in every schedule.
template <class Body>
void check_race(int threads, const char *text, const Body &body) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    const sdpa::Status status = run_kernel(1, threads, 16 * threads, body);
    CHECK_BROKEN_RULE(status, "data race at byte ");
    CHECK_BROKEN_RULE(status, text);
  }
}

template <class Body>
void check_no_race(int threads, const Body &body) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_kernel(2, threads, 16 * threads, body));
  }
}

// Some builds add them to a message: see places_test.cpp.
std::string without_chains(std::string message) {
  for (size_t chain; (chain = message.find(" at @")) != std::string::npos;) {
    message.erase(chain, message.find(',', chain) - chain);
  }
  return message;
}

}  // namespace

SIMT_CASE(race_message_names_both_accesses) {
  const int line = __LINE__;
  const auto kernel = [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    syncwarp();  // line + 4
    if (thread_idx() == 31) copy_row(5);
    cp_async_wait(0);  // line + 6
    read_matrices(0);
  };
  const auto at = [&](int offset) { return " behind races_test.cpp:" + std::to_string(line + offset); };
  const std::string message = run_kernel(1, 32, 512, kernel).message;
  CHECK(without_chains(message) ==
        "kernel test_kernel, block 0, warp 0, thread 30: data race at byte 80 of shared memory: ldmatrix reads for its "
        "warp, in thread 5" +
            at(6) + "; cp.async writes there, in thread 31" + at(4) + ", and no barrier orders the two");
}

SIMT_CASE(race_read_after_write_without_barrier) {
  check_race(64, "ldmatrix reads", [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    read_matrices(32 - thread_idx() / 32 * 32);  // the other warp's
  });
}

SIMT_CASE(race_read_after_write_within_a_warp) {
  check_race(32, "ldmatrix reads", [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    read_matrices(0);
  });
}

// A shuffle and a vote bring lanes together and order no memory.
SIMT_CASE(race_collectives_are_no_barriers) {
  check_race(32, "ldmatrix reads", [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    any(false);
    shfl_xor(0, 1);
    read_matrices(0);
  });
}

// In program order the second warp, last to arrive at the barrier, is the first to go on: its copies have landed.
SIMT_CASE(race_barrier_before_the_wait) {
  const auto kernel = [] {
    if (thread_idx() >= 32) copy_row(thread_idx());
    syncthreads();
    cp_async_wait(0);
    if (thread_idx() < 32) read_matrices(32);
  };
  CHECK_BROKEN_RULE(run_kernel(1, 64, 1024, kernel), "and no barrier orders the two");
  check_race(64, "cp.async writes there", kernel);
}

SIMT_CASE(race_read_of_a_copy_in_flight) {
  check_race(32, "and no wait has covered it", [] {
    copy_row(thread_idx());
    copy_row(thread_idx());  // over its own copy
    cp_async_wait(0);
  });
  check_race(32, "and no wait has covered it", [] {
    copy_row(thread_idx());
    cp_async_wait(1);
    syncthreads();
    read_matrices(0);
    cp_async_wait(0);
  });
}

// In program order the second warp reads first.
SIMT_CASE(race_write_after_read_without_barrier) {
  const auto kernel = [] {
    if (thread_idx() < 32) copy_row(thread_idx());
    cp_async_wait(0);
    syncthreads();
    if (thread_idx() < 32) {
      copy_row(thread_idx());  // the other warp may still read it
    } else {
      read_matrices(0);
    }
    cp_async_wait(0);
  };
  CHECK_BROKEN_RULE(run_kernel(1, 64, 1024, kernel), "shared memory: cp.async writes");
  check_race(64, "cp.async writes", kernel);
}

SIMT_CASE(race_write_after_write_without_barrier) {
  check_race(64, "cp.async writes", [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    copy_row(63 - thread_idx());
    cp_async_wait(0);
  });
}

SIMT_CASE(race_barrier_of_some_warps_only) {
  check_race(128, "ldmatrix reads", [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    sync_group(1 + thread_idx() / 64, 64);
    read_matrices(96 - thread_idx() / 32 * 32);  // of a warp in the other group
  });
}

SIMT_CASE(race_syncwarp_orders_one_warp_only) {
  check_race(64, "ldmatrix reads", [] {
    copy_row(thread_idx());
    cp_async_wait(0);
    syncwarp();
    read_matrices(32 - thread_idx() / 32 * 32);
  });
}

SIMT_CASE(no_race_with_barriers) {
  check_no_race(64, [] {
    for (int step = 0; step < 3; ++step) {
      copy_row(thread_idx());
      cp_async_wait(0);
      syncthreads();
      read_matrices(32 - thread_idx() / 32 * 32);
      syncthreads();
    }
  });
  check_no_race(128, [] {
    for (int step = 0; step < 3; ++step) {
      copy_row(thread_idx());
      cp_async_wait(0);
      sync_group(1 + thread_idx() / 64, 64);
      read_matrices(thread_idx() / 64 * 64 + 32 - thread_idx() / 32 % 2 * 32);
      sync_group(1 + thread_idx() / 64, 64);
    }
    syncthreads();
    read_matrices(96 - thread_idx() / 32 * 32);
  });
}

// What a warp has learnt at one barrier it passes on at the next.
SIMT_CASE(no_race_when_order_is_transitive) {
  check_no_race(96, [] {
    const int warp = thread_idx() / 32;
    if (warp == 0) copy_row(thread_idx());
    cp_async_wait(0);
    if (warp <= 1) sync_group(1, 64);
    if (warp >= 1) sync_group(2, 64);
    if (warp == 2) read_matrices(0);
  });
}

SIMT_CASE(no_race_between_a_thread_and_itself) {
  check_no_race(32, [] {
    for (int step = 0; step < 2; ++step) {
      copy_row(thread_idx());
      cp_async_wait(0);
    }
  });
}

// ---- plain loads and stores: observed builds only ----
#if defined(__SANITIZE_THREAD__)

SIMT_CASE(observed_race_between_stores_and_loads) {
  check_race(64, "a load reads", [] {
    volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
    values[thread_idx()] = 1;
    syncwarp();
    CHECK(values[63 - thread_idx()] != 7);
  });
}

SIMT_CASE(observed_race_between_loads_and_stores) {
  check_race(64, "a store writes", [] {
    volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
    values[thread_idx()] = 1;
    syncthreads();
    CHECK(values[63 - thread_idx()] != 7);
    values[thread_idx()] = 2;
  });
}

SIMT_CASE(observed_race_of_lanes_and_ldmatrix) {
  check_race(32, "ldmatrix reads", [] {
    std::memcpy(dynamic_smem() + 16 * thread_idx(), &kZeros, 16);
    read_matrices(0);
  });
}

SIMT_CASE(observed_race_of_neighbouring_words_is_none) {
  check_no_race(64, [] {
    volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
    for (int step = 0; step < 3; ++step) values[thread_idx()] = step;
    syncthreads();
    CHECK(values[63 - thread_idx()] == 2);
  });
}

SIMT_CASE(observed_read_of_what_nobody_wrote) {
  check_race(32, "what nobody wrote", [] {
    volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
    if (thread_idx() < 31) values[thread_idx()] = 1;
    syncwarp();
    CHECK(values[31 - thread_idx()] != 7);
  });
}

#endif
