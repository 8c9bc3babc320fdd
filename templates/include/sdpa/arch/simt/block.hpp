// A block of CUDA threads on one OS thread: every thread is a fiber, and at any time one of them runs. The two blocks of a
// cluster share the OS thread: when none of one's threads can run, or the schedule says so, the other one goes on.
//
// This file starts and ends threads and picks the one that runs next; where they meet is in block_meetings.hpp. Every
// rule that a kernel can break ends the block with a message naming kernel, block, warp and thread (block_errors.hpp);
// its fibers are dropped, and the Block is ready for another run.
// Races on shared memory are such rules, found by shadow.hpp in every schedule. Not found: races on global memory, and
// a thread that spins on memory for ever.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <utility>
#include <vector>

#include "sdpa/arch/simt/arrivals.hpp"
#include "sdpa/arch/simt/async.hpp"
#include "sdpa/arch/simt/bank_conflicts.hpp"
#include "sdpa/arch/simt/cp_async.hpp"
#include "sdpa/arch/simt/fiber.hpp"
#include "sdpa/arch/simt/places.hpp"
#include "sdpa/arch/simt/schedule.hpp"
#include "sdpa/arch/simt/shadow.hpp"
#include "sdpa/arch/simt/shared_memory.hpp"
#include "sdpa/arch/simt/warp.hpp"
#include "sdpa/registry.hpp"

namespace sdpa::simt {

constexpr int kMaxThreads = 1024;
constexpr int kNumBarriers = 16;
constexpr size_t kMessageBytes = sizeof(Status::message);

// A kernel with its arguments, ready to be run by every thread of a block.
struct KernelCall {
  const char *name;
  void (*run)(const void *closure);
  const void *closure;
  int threads;
  int smem_bytes;
  uint64_t seed;
  int smem_alignment = SharedMemory::kAlignment;
  int cluster = 1;  // blocks that run together, 1 or 2
};

class Block {
 public:
  // Runs every thread of block `index` to its end; of a cluster of two, block `index` + 1 in `peer` beside it. False when
  // a rule was broken: error() says which. Throws std::bad_alloc, before any thread has run.
  bool run(const KernelCall &call, int64_t index, Block *peer = nullptr);
  const char *error() const { return error_; }

  // ---- For the running thread.
  int thread_idx() const { return current_; }
  int64_t block_idx() const { return index_; }
  int smem_bytes() const { return call_->smem_bytes; }
  int lane() const { return current_ % kWarpSize; }
  Warp &warp() { return warps_[current_ / kWarpSize]; }
  SharedMemory &shared_memory() { return shared_memory_; }
  CpAsyncQueue &copies() { return threads_[current_].copies; }
  BankConflicts &bank_conflicts() { return bank_conflicts_; }
  int first_thread(const Warp &warp) const { return int(&warp - warps_.data()) * kWarpSize; }

  // The running thread calls the machine from this place; a function of its own called sync_group is no place.
  void enter(const char *file, int line, const char *function) {
    if (std::strcmp(function, "sync_group") != 0) threads_[current_].site = sites_.number_of(file, line);
  }

  // The number of the calls that led to the caller, or to the function whose frame is given; 0 where the build has none.
  uint16_t calls_to_here() {
    if constexpr (kHasCallChains) return calls_to_caller();
    return 0;
  }
  uint16_t calls_to(const void *frame) {
    const Fiber &fiber = threads_[size_t(current_)].fiber;
    return call_chains_.number_of(frame, fiber.stack(), fiber.stack_bytes());
  }

  // Accesses to shared memory, for the shadow: races end the block. `address` is in shared memory, `chain` the calls
  // that led to the access.
  void observe_read(const void *address, size_t bytes, AccessKind kind, int thread, uint16_t chain) {
    const Place place{threads_[size_t(thread)].site, chain};
    const Shadow::Race race = shadow_.read(shared_memory_.offset(address), bytes, kind, thread, place);
    if (race.found) fail_race(race, kind, thread, place);
  }
  void observe_write(const void *address, size_t bytes, AccessKind kind, int thread, uint16_t chain) {
    const Place place{threads_[size_t(thread)].site, chain};
    const Shadow::Race race = shadow_.write(shared_memory_.offset(address), bytes, kind, thread, place);
    if (race.found) fail_race(race, kind, thread, place);
  }
  // A cp.async of the running thread was waited for.
  void observe_landing(const void *destination) {
    shadow_.complete(shared_memory_.offset(destination), CpAsyncQueue::kBytes, current_);
  }
  // The running thread hands something to other CTAs, or takes it: see arrivals.hpp.
  void observe_device_store() {
    const Place place{threads_[size_t(current_)].site, calls_to_here()};
    if (!arrivals_.store(current_, place, shadow_)) {
      fail("store_device: no barrier lies in between this store and the arrival of another thread");
    }
  }
  void observe_device_fence() { arrivals_.fence(current_, shadow_); }
  void observe_arrival() {
    const int thread = arrivals_.arrive(current_, shadow_);
    if (thread >= 0) fail_arrival(thread);
  }
  void observe_await() { arrivals_.await(current_, shadow_); }
  void observe_announcement() {
    const int thread = arrivals_.announce(current_, shadow_);
    if (thread >= 0) fail_arrival(thread);
  }
  void observe_device_load() {
    if (!arrivals_.may_load(current_, shadow_)) {
      fail("load_device: reads what other blocks leave before the fence behind an arrival, and a barrier");
    }
  }
  void sync_warp(const Warp &warp) { shadow_.sync_warp(first_thread(warp) / kWarpSize); }

  // Returns when all live lanes of the warp have met here and the collective was executed.
  void meet(const Collective &collective) { meet(collective, -1, 0); }

  // Barrier 0 is complete when all live warps wait there, any other when `num_threads` threads do.
  void sync(int barrier, int num_threads);

  // Barrier 0; true when `predicate` was true of any thread that met there.
  bool sync_or(bool predicate);

  // Counts as the warp's arrival at the barrier, and does not wait.
  void arrive(int barrier, int num_threads) { meet(kArrival, barrier, num_threads); }

  // What is in flight next to the threads: see async.hpp. The running thread stops until it is woken.
  Async &async() { return async_; }
  int num_threads() const { return call_->threads; }
  void park() {
    warp().ready &= ~bit(current_);
    run_other_thread();
  }
  void wake(int thread) { warps_[size_t(thread / kWarpSize)].ready |= bit(thread); }
  // One of `count`, as the schedule draws it; the first in program order.
  int draw(int count) { return schedule_.first_warp(0, count); }

  // ---- The cluster, which the running thread's block may have for itself.
  // The block of this rank.
  Block &cta(int rank, const char *what) {
    if (rank < 0 || rank >= call_->cluster) fail("%s: a cluster of %d has no CTA %d", what, call_->cluster, rank);
    return rank == index_ % call_->cluster ? *this : *peer_;
  }
  bool has_exited() const { return num_live_warps_ == 0; }
  // A barrier of all threads of all its blocks.
  void sync_cluster() { meet(kClusterBarrier); }

  // Ends the block, and its cluster.
  [[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 2, 3)));

 private:
  struct Thread {
    Fiber fiber{Fiber::kStackBytes};
    CpAsyncQueue copies;
    uint8_t site = 0;  // of its last call, in sites_
  };
  struct Barrier {
    int num_warps = 0;  // that wait there
    int num_threads = 0;
    uint32_t arrived = 0;  // warps that are counted and do not wait
    bool vote = false;     // of those who wait there
    bool result = false;   // of those who met last
  };

  static constexpr uint32_t bit(int thread) { return 1u << (thread % kWarpSize); }

  static void fiber_main();
  static void arrive_at_barrier(Block &block, Warp &warp) { block.count_at_barrier(warp, /*waits=*/true); }
  static void pass_barrier(Block &block, Warp &warp) { block.count_at_barrier(warp, /*waits=*/false); }
  static void arrive_at_cluster(Block &block, Warp &warp);

  void reset(const KernelCall &call, int64_t index, Block *peer);
  bool end(bool is_abandoned);
  void meet(const Collective &collective, int barrier, int barrier_threads);
  void execute(Warp &warp);
  void count_at_barrier(Warp &warp, bool waits);
  void release_if_complete(int barrier);
  void release_cluster_if_complete();
  void release_from_cluster();
  uint32_t release_waiting(int barrier);
  size_t describe_waits(char *text, size_t size) const;
  int pick_thread();
  int next_thread();
  int next_of_cluster(Block *&block);
  void run_other_thread(bool current_is_done = false);
  [[noreturn]] void exit_thread();
  [[noreturn]] void fail_divergence(const Collective &collective, int barrier, int barrier_threads);
  [[noreturn]] void fail_deadlock();
  [[noreturn]] void fail_arrival(int thread);
  [[noreturn]] void fail_race(const Shadow::Race &race, AccessKind kind, int thread, Place place);
  SDPA_SIMT_UNOBSERVED __attribute__((noinline)) uint16_t calls_to_caller() {
    return calls_to(__builtin_frame_address(0));
  }

  static constexpr Collective kBarrier{"a barrier", false, &Block::arrive_at_barrier};
  static constexpr Collective kArrival{"an arrival at a barrier", false, &Block::pass_barrier};
  static constexpr Collective kClusterBarrier{"cluster_sync", false, &Block::arrive_at_cluster};
  static constexpr int kAtCluster = kNumBarriers;  // where a warp waits

  const KernelCall *call_ = nullptr;
  int64_t index_ = 0;
  int current_ = 0;  // the running thread
  int num_warps_ = 0;
  int num_live_warps_ = 0;
  bool started_ = false;  // the first fiber was entered
  bool failed_ = false;
  Block *peer_ = nullptr;   // the other block of the cluster
  Block *leader_ = this;    // the one that was run first, on whose main_ the cluster ends
  int num_at_cluster_ = 0;  // warps that wait at the cluster's barrier
  Fiber main_;
  Schedule schedule_;
  SharedMemory shared_memory_;
  Shadow shadow_;
  Arrivals arrivals_;
  Sites sites_;
  CallChains call_chains_;
  BankConflicts bank_conflicts_;
  Async async_;
  std::vector<Thread> threads_;
  std::array<Barrier, kNumBarriers> barriers_;
  std::array<Warp, kMaxThreads / kWarpSize> warps_;
  char error_[kMessageBytes];
};

// The block that this OS thread runs, for the kernel's side of the engine.
SDPA_SIMT_THREAD_LOCAL Block *current_block = nullptr;

// Whether this OS thread is busy with what an observed access means; see observed.hpp.
SDPA_SIMT_THREAD_LOCAL bool is_observing = false;

inline bool Block::run(const KernelCall &call, int64_t index, Block *peer) {
  reset(call, index, peer);
  leader_ = this;
  if (peer != nullptr) {
    peer->reset(call, index + 1, this);
    peer->leader_ = this;
  }
  is_observing = false;
  current_block = this;
  switch_fiber(main_, threads_[size_t(current_)].fiber);
  current_block = nullptr;
  const bool is_abandoned = failed_ || (peer != nullptr && peer->failed_);
  end(is_abandoned);
  if (peer != nullptr && !peer->end(is_abandoned) && !failed_) {
    std::memcpy(error_, peer->error_, sizeof(error_));
    failed_ = true;
  }
  return !failed_;
}

inline bool Block::end(bool is_abandoned) {
  if (is_abandoned) {
    for (int i = 0; i < call_->threads; ++i) {
      if (warps_[size_t(i / kWarpSize)].live & bit(i)) threads_[size_t(i)].fiber.abandon(leader_->main_);
    }
  } else if (!shared_memory_.guards_intact()) {
    std::snprintf(error_, sizeof(error_), "kernel %s, block %lld: wrote outside its %d bytes of dynamic shared memory",
                  call_->name, static_cast<long long>(index_), call_->smem_bytes);
    failed_ = true;
  }
  return !failed_;
}

inline void Block::reset(const KernelCall &call, int64_t index, Block *peer) {
  call_ = &call;
  index_ = index;
  peer_ = peer;
  num_at_cluster_ = 0;
  num_warps_ = num_live_warps_ = (call.threads + kWarpSize - 1) / kWarpSize;
  started_ = failed_ = false;
  error_[0] = '\0';
  schedule_.start(call.seed, index);
  shared_memory_.reset(call.smem_bytes, size_t(call.smem_alignment));
  async_.reset(call.threads);
  shadow_.reset(call.smem_bytes, num_warps_);
  arrivals_.start(call.threads);
  sites_.clear();
  bank_conflicts_.start(shared_memory_.data(), num_warps_);
  barriers_.fill({});
  while (threads_.size() < size_t(call.threads)) threads_.emplace_back();
  for (int w = 0; w < num_warps_; ++w) {
    Warp &warp = warps_[size_t(w)];
    const int lanes = std::min(kWarpSize, call.threads - w * kWarpSize);
    warp.live = warp.ready = lanes == kWarpSize ? kFullWarp : bit(lanes) - 1;
    warp.arrived = 0;
    warp.waits_at = -1;
    warp.slots.vote = 0;
  }
  for (int i = 0; i < call.threads; ++i) {
    threads_[size_t(i)].fiber.prepare(&Block::fiber_main, i);
    threads_[size_t(i)].copies.clear();
    threads_[size_t(i)].site = 0;
  }
  const int first_warp = schedule_.first_warp(0, num_warps_);
  current_ = first_warp * kWarpSize + schedule_.next_lane(warps_[size_t(first_warp)].ready, kWarpSize - 1);
}

inline void Block::fiber_main() {
  Block &block = *current_block;
  Block &leader = *block.leader_;
  Fiber::entered(leader.started_ ? nullptr : &leader.main_);
  leader.started_ = true;
  char thrown[200] = {};
  try {
    block.call_->run(block.call_->closure);
  } catch (const std::exception &exception) {
    std::snprintf(thrown, sizeof(thrown), "uncaught exception: %s", exception.what());
  }
  if (thrown[0] != '\0') block.fail("%s", thrown);
  block.exit_thread();
}

inline void Block::exit_thread() {
  const CpAsyncQueue &copies = this->copies();
  if (copies.num_uncommitted() != 0) {
    fail("exits with %zu cp.async copies that were never committed", copies.num_uncommitted());
  }
  if (copies.num_unwaited() != 0) {
    fail("exits with %zu cp.async copies that were never waited for", copies.num_unwaited());
  }
  async_.check_exit(*this, current_);
  Warp &warp = this->warp();
  warp.live &= ~bit(current_);
  warp.ready &= ~bit(current_);
  if (warp.live == 0) {
    bank_conflicts_.count(int(&warp - warps_.data()));
    --num_live_warps_;
    release_if_complete(0);
    release_cluster_if_complete();
  } else if (warp.arrived == warp.live) {
    execute(warp);
  }
  if (has_exited()) async_.check_end(*this);
  if (has_exited() && (peer_ == nullptr || peer_->has_exited())) {
    switch_fiber(threads_[size_t(current_)].fiber, leader_->main_, /*from_is_done=*/true);
  } else {
    run_other_thread(/*current_is_done=*/true);
  }
  __builtin_unreachable();
}

// Negative when no thread can run.
inline int Block::pick_thread() {
  const int current_warp = current_ / kWarpSize;
  const uint32_t ready = warps_[size_t(current_warp)].ready;
  if (ready != 0 && !schedule_.leaves_warp()) {
    return current_warp * kWarpSize + schedule_.next_lane(ready, current_ % kWarpSize);
  }
  const int first = schedule_.first_warp(current_warp, num_warps_);
  for (int i = 0; i < num_warps_; ++i) {
    const int w = (first + i) % num_warps_;
    if (warps_[size_t(w)].ready != 0) {
      return w * kWarpSize + schedule_.next_lane(warps_[size_t(w)].ready, kWarpSize - 1);
    }
  }
  return -1;
}

// Copies that are in flight land when nobody can run, and whenever the schedule says so.
inline int Block::next_thread() {
  if (async_.has_loads() && schedule_.leaves_warp()) async_.land_one(*this);
  int next = pick_thread();
  while (next < 0 && async_.has_loads()) {
    async_.land_one(*this);
    next = pick_thread();
  }
  return next;
}

// The same for a cluster: a block goes on as long as it can, unless the schedule draws the other one.
inline int Block::next_of_cluster(Block *&block) {
  if (async_.has_loads() && schedule_.leaves_warp()) async_.land_one(*this);
  Block *both[2] = {this, peer_};
  if (schedule_.leaves_warp()) std::swap(both[0], both[1]);
  for (Block *candidate : both) {
    block = candidate;
    const int next = candidate->pick_thread();
    if (next >= 0) return next;
  }
  for (Block *candidate : both) {
    block = candidate;
    const int next = candidate->next_thread();
    if (next >= 0) return next;
  }
  return -1;
}

inline void Block::run_other_thread(bool current_is_done) {
  Block *block = this;
  const int next = peer_ == nullptr ? next_thread() : next_of_cluster(block);
  if (next < 0) fail_deadlock();
  Fiber &from = threads_[size_t(current_)].fiber;
  if (block == this && next == current_ && !current_is_done) return;  // a copy that landed may have woken this one
  block->current_ = next;
  if (block != this) current_block = block;
  switch_fiber(from, block->threads_[size_t(next)].fiber, current_is_done);
}

}  // namespace sdpa::simt

#include "sdpa/arch/simt/block_meetings.hpp"
#include "sdpa/arch/simt/block_errors.hpp"
#include "sdpa/arch/simt/async_rules.hpp"
