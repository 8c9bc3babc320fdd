// Results that blocks hand to each other: each missing barrier or fence is found in every schedule, and nothing else is.
#include "harness.hpp"

using namespace sdpa::simt;
using namespace simt_test;

namespace {

constexpr int kThreads = 64;
constexpr int kBlocks = 3;

struct Room {
  int results[kBlocks][kThreads] = {};
  uint32_t arrivals = 0;
  int sum[kThreads] = {};
};

// Each thread leaves a result; the last block adds up all of them. What is in `steps` is done.
struct Steps {
  bool barrier = true;          // behind the stores
  bool fence = true;            // of the thread that arrives, before it does
  bool fence_of_each = false;   // of every thread, behind its stores
  bool fence_behind = true;     // the arrival, by the thread that arrived
  bool fence_by_other = false;  // behind the arrival or before it, by a thread that did not arrive
  bool barrier_behind = true;   // the arrival
};

sdpa::Status run(const Steps &steps, Room &room) {
  return run_kernel(kBlocks, kThreads, 16, [&] {
    const int tid = thread_idx();
    store_device(&room.results[block_idx()][tid], 1 + block_idx());
    if (steps.fence_of_each) fence_device();
    if (steps.barrier) syncthreads();
    bool last = false;
    if (tid == 0) {
      if (steps.fence) fence_device();
      last = increment(&room.arrivals) == kBlocks - 1;
      if (steps.fence_behind) fence_device();
    }
    if (steps.fence_by_other && tid == 40) fence_device();
    if (steps.barrier_behind) {
      last = syncthreads_or(last);
    } else if (tid != 0) {
      last = room.arrivals == kBlocks;
    }
    if (last) {
      for (const auto &results : room.results) room.sum[tid] += load_device(&results[tid]);
    }
  });
}

void check_sums(const Steps &steps) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    for (int num_threads : {1, 3}) {
      const Configured configured(seed, num_threads);
      Room room;
      CHECK_OK(run(steps, room));
      for (const int sum : room.sum) CHECK(sum == 6);
    }
  }
}

void check_broken(const Steps &steps, const char *text) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    Room room;
    CHECK_BROKEN_RULE(run(steps, room), text);
  }
}

}  // namespace

SIMT_CASE(arrivals_behind_a_barrier_and_a_fence) {
  check_sums({});
  Steps steps;
  steps.fence = false;
  steps.fence_of_each = true;
  check_sums(steps);
}

SIMT_CASE(arrival_without_a_barrier) {
  Steps steps;
  steps.barrier = false;
  check_broken(steps, "no barrier lies in between");
  steps.fence_of_each = true;
  check_broken(steps, "no barrier lies in between");
}

SIMT_CASE(arrival_without_a_fence) {
  Steps steps;
  steps.fence = false;
  check_broken(steps, "no fence lies in between");
}

SIMT_CASE(loads_without_a_fence_behind_the_arrival) {
  Steps steps;
  steps.fence_behind = false;
  check_broken(steps, "load_device: reads what other blocks leave");
  steps.fence_by_other = true;
  check_broken(steps, "load_device: reads what other blocks leave");
}

SIMT_CASE(loads_without_a_barrier_behind_the_arrival) {
  Steps steps;
  steps.barrier_behind = false;
  check_broken(steps, "load_device: reads what other blocks leave");
}

// A barrier of some warps orders nothing for the others; a fence before a store does not cover it.
SIMT_CASE(arrival_behind_too_little) {
  static uint32_t arrivals;
  static int results[kThreads];
  const Configured configured(0);
  CHECK_BROKEN_RULE(run_kernel(1, kThreads, 16,
                               [] {
                                 store_device(&results[thread_idx()], 1);
                                 fence_device();
                                 syncwarp();
                                 if (thread_idx() == 63) increment(&arrivals);
                               }),
                    "of thread 0 behind the kernel's start: no barrier lies in between");
  CHECK_BROKEN_RULE(run_kernel(1, kThreads, 16,
                               [] {
                                 fence_device();
                                 if (thread_idx() == 40) store_device(&results[thread_idx()], 1);
                                 syncthreads();
                                 if (thread_idx() == 0) increment(&arrivals);
                               }),
                    "of thread 40 behind the kernel's start: no fence lies in between");
}

namespace {

// Each block adds to what the one with the ticket before left, twice: a barrier that is missing is found in every order.
struct Turns {
  uint32_t tickets = 0;
  uint32_t turns[2] = {};
  int sums[2][kThreads] = {};
};

struct TurnSteps {
  bool first_await = true;
  bool second_await = true;
  bool barrier = true;  // behind the second store
};

sdpa::Status take_turns(const TurnSteps &steps, Turns &room) {
  return run_kernel(kBlocks, kThreads, 16, [&] {
    const int tid = thread_idx();
    int *const shared = reinterpret_cast<int *>(dynamic_smem());
    if (tid == 0) *shared = int(increment(&room.tickets));
    syncthreads();
    const uint32_t ticket = uint32_t(*shared);
    for (int i = 0; i < 2; ++i) {
      if (tid == 40 && (i == 0 ? steps.first_await : steps.second_await)) await(&room.turns[i], ticket);
      syncthreads();
      store_device(&room.sums[i][tid], load_device(&room.sums[i][tid]) + 1);
      if (i == 0 || steps.barrier) syncthreads();
      if (tid == 0) announce(&room.turns[i], ticket + 1);
    }
  });
}

}  // namespace

SIMT_CASE(turns_are_taken_in_the_order_of_tickets) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    for (int num_threads : {1, 3}) {
      const Configured configured(seed, num_threads);
      Turns room;
      CHECK_OK(take_turns({}, room));
      for (const auto &sums : room.sums)
        for (const int sum : sums) CHECK(sum == kBlocks);
    }
  }
}

SIMT_CASE(what_nobody_awaited_is_not_read) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    TurnSteps steps;
    steps.first_await = false;
    Turns room;
    CHECK_BROKEN_RULE(take_turns(steps, room), "load_device: reads what other blocks leave");
    steps = {};
    steps.second_await = false;  // the first one's was announced: what it covered has been read
    Turns other;
    CHECK_BROKEN_RULE(take_turns(steps, other), "load_device: reads what other blocks leave");
  }
}

SIMT_CASE(announcement_without_a_barrier) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    TurnSteps steps;
    steps.barrier = false;
    Turns room;
    CHECK_BROKEN_RULE(take_turns(steps, room), "no barrier lies in between");
  }
}
