// What a Block says when a rule is broken: the part of block.hpp that puts messages together.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "sdpa/arch/simt/block.hpp"

namespace sdpa::simt {

inline void Block::fail(const char *format, ...) {
  const int length = std::snprintf(error_, sizeof(error_), "kernel %s, block %lld, warp %d, thread %d: ", call_->name,
                                   static_cast<long long>(index_), current_ / kWarpSize, current_);
  if (length > 0 && size_t(length) < sizeof(error_)) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(error_ + length, sizeof(error_) - size_t(length), format, arguments);
    va_end(arguments);
  }
  failed_ = true;
  switch_fiber(current_block->threads_[size_t(current_block->current_)].fiber, leader_->main_, /*from_is_done=*/true);
  __builtin_unreachable();
}

inline void Block::fail_divergence(const Collective &collective, int barrier, int barrier_threads) {
  const auto describe = [](char (&text)[48], const Collective &what, int id, int threads) {
    if (&what != &kBarrier && &what != &kArrival) {
      std::snprintf(text, sizeof(text), "%s", what.name);
    } else if (id == 0) {
      std::snprintf(text, sizeof(text), "syncthreads");
    } else {
      std::snprintf(text, sizeof(text), "sync_group(%d, %d)", id, threads);
    }
  };
  const Warp &warp = this->warp();
  char here[48], there[48];
  describe(here, collective, barrier, barrier_threads);
  describe(there, *warp.collective, warp.barrier, warp.barrier_threads);
  fail("the warp diverged: this lane reached %s while lanes 0x%08x wait in %s", here, warp.arrived, there);
}

inline void Block::fail_race(const Shadow::Race &race, AccessKind kind, int thread, Place place) {
  char here[100], there[100], behind[80], behind_there[80];
  call_chains_.describe(place.chain, here);
  sites_.describe(place.site, behind);
  if (race.is_unwritten) {
    fail("data race at byte %zu of shared memory: %s%s, in thread %d behind %s, what nobody wrote", race.offset,
         verb(kind), here, thread, behind);
  }
  call_chains_.describe(race.earlier.chain, there);
  sites_.describe(race.earlier.site, behind_there);
  fail("data race at byte %zu of shared memory: %s%s, in thread %d behind %s; %s there%s, in thread %d behind %s, %s",
       race.offset, verb(kind), here, thread, behind, verb(race.earlier.kind), there, race.earlier.thread, behind_there,
       race.earlier.is_pending ? "and no wait has covered it" : "and no barrier orders the two");
}

inline void Block::fail_arrival(int thread) {
  const Arrivals::Store &store = arrivals_.store_of(thread);
  char chain[100], behind[80];
  call_chains_.describe(store.place.chain, chain);
  sites_.describe(store.place.site, behind);
  const bool is_ordered = shadow_.is_before(thread, store.epoch, current_);
  fail("arrives, and other blocks may not see the store%s of thread %d behind %s: no %s lies in between", chain, thread,
       behind, is_ordered ? "fence" : "barrier");
}

// Returns how much was written.
inline size_t Block::describe_waits(char *text, size_t size) const {
  size_t length = 0;
  const auto add = [&](int warps, int needed, const char *where, int id) {
    if (warps == 0 || length >= size) return;
    const int written = std::snprintf(text + length, size - length, "%s%d of %d warps wait at %s %d",
                                      length == 0 ? "" : ", ", warps, needed, where, id);
    length += size_t(std::max(written, 0));
  };
  for (int id = 0; id < kNumBarriers; ++id) {
    const Barrier &barrier = barriers_[size_t(id)];
    const int needed = id == 0 ? num_live_warps_ : barrier.num_threads / kWarpSize;
    add(barrier.num_warps, needed, id == 0 ? "syncthreads, barrier" : "barrier", id);
  }
  add(num_at_cluster_, num_live_warps_, "the cluster's barrier in block", int(index_));
  if (length < size) async_.describe_waits(text + length, size - length, length == 0 ? "" : ", ");
  return std::strlen(text);
}

inline void Block::fail_deadlock() {
  char waits[400] = {};
  size_t length = describe_waits(waits, sizeof(waits));
  if (peer_ != nullptr && length < sizeof(waits)) {
    length += size_t(std::snprintf(waits + length, sizeof(waits) - length,
                                   "; in block %lld: ", static_cast<long long>(peer_->index_)));
    if (length < sizeof(waits)) peer_->describe_waits(waits + length, sizeof(waits) - length);
  }
  fail("deadlock: no thread can go on: %s", waits);
}

}  // namespace sdpa::simt
