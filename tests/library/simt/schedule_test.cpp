// Order of execution: a function of seed and block only; and the spreading of blocks over OS threads.
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

using Trace = std::vector<int>;

// The order in which the threads of each block pass the points of a small kernel.
std::vector<Trace> traces(int64_t blocks, int threads, uint64_t seed, int num_threads) {
  std::vector<Trace> result(size_t(blocks), Trace{});
  const Configured configured(seed, num_threads);
  CHECK_OK(run_kernel(blocks, threads, 0, [&] {
    Trace &trace = result[size_t(block_idx())];
    for (int i = 0; i < 8; ++i) {
      trace.push_back(thread_idx());
      syncwarp();
    }
    syncthreads();
    trace.push_back(thread_idx());
  }));
  return result;
}

// How many values a warp reads that another warp was to write first; a barrier is missing.
int count_stale_reads(uint64_t seed, bool with_barrier) {
  int num_stale = 0;
  const Configured configured(seed);
  CHECK_OK(run_kernel(1, 128, 128 * 4, [&] {
    volatile int *const values = reinterpret_cast<int *>(dynamic_smem());
    values[thread_idx()] = 1;
    syncthreads();
    if (thread_idx() >= 96) values[thread_idx()] = 2;  // the last warp, which program order runs last
    if (with_barrier) syncthreads();
    if (values[96 + thread_idx() % 32] != 2) ++num_stale;
  }));
  return num_stale;
}

}  // namespace

SIMT_CASE(seed_zero_is_program_order) {
  const Trace trace = traces(1, 64, 0, 1)[0];
  for (int i = 0; i < 32; ++i) CHECK(trace[size_t(i)] == i);
  for (size_t i = 0; i < 8 * 32; ++i) CHECK(trace[i] < 32);  // the first warp gets as far as it can
  for (size_t i = 8 * 32; i < 8 * 64; ++i) CHECK(trace[i] >= 32);
}

SIMT_CASE(same_seed_gives_the_same_order) {
  for (uint64_t seed = 0; seed < 8; ++seed) CHECK(traces(3, 96, seed, 1) == traces(3, 96, seed, 1));
}

SIMT_CASE(seeds_and_blocks_give_different_orders) {
  std::set<Trace> orders;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    for (const Trace &trace : traces(5, 96, seed, 1)) orders.insert(trace);
  }
  CHECK(orders.size() == 50);
}

SIMT_CASE(order_does_not_depend_on_os_threads) {
  for (uint64_t seed = 0; seed < 4; ++seed) {
    const std::vector<Trace> expected = traces(40, 96, seed, 1);
    for (const int num_threads : {2, 3, 7, 0}) CHECK(traces(40, 96, seed, num_threads) == expected);
  }
}

// Some seeds let a warp finish a phase before another starts it, others interleave the warps closely.
SIMT_CASE(seeds_cover_coarse_and_fine_interleaving) {
  size_t fewest = 1000;
  size_t most = 0;
  for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    const Trace trace = traces(1, 64, seed, 1)[0];
    size_t num_changes = 0;
    for (size_t i = 1; i < 8 * 64; ++i) num_changes += trace[i] / 32 != trace[i - 1] / 32;
    fewest = std::min(fewest, num_changes);
    most = std::max(most, num_changes);
  }
  CHECK(fewest == 1);
  CHECK(most > 100);
}

SIMT_CASE(seeds_expose_a_missing_barrier) {
  int num_exposed = 0;
  for (uint64_t seed = 1; seed <= kNumSeeds; ++seed) {
    CHECK(count_stale_reads(seed, true) == 0);
    if (count_stale_reads(seed, false) != 0) ++num_exposed;
  }
  CHECK(num_exposed > int(kNumSeeds) / 2);
}

SIMT_CASE(every_block_runs_once) {
  for (const int num_threads : {1, 2, 5, 0}) {
    const Configured configured(3, num_threads);
    std::vector<int> runs(1000);
    CHECK_OK(run_kernel(1000, 33, 0, [&] { ++runs[size_t(block_idx())]; }));
    for (const int count : runs) CHECK(count == 33);
  }
}

// Each of two blocks waits for the other to have started: only two OS threads can finish them.
SIMT_CASE(blocks_run_on_several_os_threads) {
  const Configured configured(0, 2);
  std::atomic<int> num_started{0};
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  CHECK_OK(run_kernel(2, 1, 0, [&] {
    ++num_started;
    while (num_started.load() < 2) {
      CHECK(std::chrono::steady_clock::now() < give_up);
      std::this_thread::yield();
    }
  }));
}

SIMT_CASE(one_block_or_one_thread_runs_on_the_caller) {
  const auto check_caller = [](int64_t blocks, int num_threads) {
    const Configured configured(0, num_threads);
    const std::thread::id caller = std::this_thread::get_id();
    CHECK_OK(run_kernel(blocks, 32, 0, [&] { CHECK(std::this_thread::get_id() == caller); }));
  };
  check_caller(1, 8);
  check_caller(50, 1);
}

SIMT_CASE(launches_from_several_os_threads) {
  const Configured configured(5, 2);
  std::atomic<int> num_wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&num_wrong, caller] {
      for (int i = 0; i < 10; ++i) {
        std::atomic<int> sum{0};
        const bool ok = run_kernel(6, 64, 0, [&] {
                          const int mine = shfl_xor(caller, 1);
                          syncthreads();
                          sum += mine;
                        }).ok();
        if (!ok || sum.load() != caller * 6 * 64) ++num_wrong;
      }
    });
  }
  for (std::thread &caller : callers) caller.join();
  CHECK(num_wrong.load() == 0);
}
