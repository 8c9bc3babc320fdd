// How CTAs hand results to each other through global memory, checked one block at a time: what the order of CTAs at
// hand would hide breaks a rule in every order.
//
//   store_device   a result that another CTA will read, by any thread
//   increment      tells the others that it is there: a barrier must lie between it and each store (unless it is the
//                  same thread's), and a fence of either thread
//   load_device    reads what others left: behind the arrival, a fence of the thread that arrived, and a barrier (unless
//                  it is the same thread's)
//   announce       a fence and an arrival; what was awaited before may no longer be read
//   await          the fence behind another block's announcement: its loads follow, as those behind an arrival
//
// What lies before what is the Shadow's to say. Plain stores and loads of global memory are not seen.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "sdpa/arch/simt/places.hpp"
#include "sdpa/arch/simt/shadow.hpp"

namespace sdpa::simt {

class Arrivals {
 public:
  static constexpr int kMaxThreads = 32 * Shadow::kMaxWarps;

  struct Store {
    uint32_t epoch = 0;  // of its warp; 0: none since the last arrival
    bool is_fenced = false;
    Place place;
  };

  void start(int num_threads) {
    num_threads_ = num_threads;
    is_used_ = false;
    acquired_ = arrived_ = -1;
  }

  // False when the block may have arrived already.
  bool store(int thread, Place place, const Shadow &shadow) {
    if (arrived_ >= 0 && !shadow.is_before(arrived_, arrived_epoch_, thread)) return false;
    if (!is_used_) stores_.fill({});
    is_used_ = true;
    stores_[size_t(thread)] = {shadow.epoch(thread), false, place};
    return true;
  }

  void fence(int thread, const Shadow &shadow) {
    if (arrived_ == thread) {
      acquired_ = thread;
      acquired_epoch_ = shadow.epoch(thread);
    }
    cover_stores(thread, shadow);
  }

  void await(int thread, const Shadow &shadow) {
    acquired_ = thread;
    acquired_epoch_ = shadow.epoch(thread);
  }

  // A thread whose store it does not cover, or -1. What was awaited before the last barrier has been read.
  int announce(int thread, const Shadow &shadow) {
    if (may_load(thread, shadow)) acquired_ = -1;
    cover_stores(thread, shadow);
    return arrive(thread, shadow);
  }

  // A thread whose store an arrival of `thread` does not cover, or -1.
  int arrive(int thread, const Shadow &shadow) {
    arrived_ = thread;
    arrived_epoch_ = shadow.epoch(thread);
    for (int t = 0; is_used_ && t < num_threads_; ++t) {
      const Store &store = stores_[size_t(t)];
      if (store.epoch != 0 && !(store.is_fenced && shadow.is_before(t, store.epoch, thread))) return t;
    }
    is_used_ = false;
    return -1;
  }

  const Store &store_of(int thread) const { return stores_[size_t(thread)]; }

  // Whether `thread` may read what other CTAs left.
  bool may_load(int thread, const Shadow &shadow) const {
    return acquired_ >= 0 && shadow.is_before(acquired_, acquired_epoch_, thread);
  }

 private:
  // Marks the stores that lie before a fence of `thread`.
  void cover_stores(int thread, const Shadow &shadow) {
    for (int t = 0; is_used_ && t < num_threads_; ++t) {
      Store &store = stores_[size_t(t)];
      if (shadow.is_before(t, store.epoch, thread)) store.is_fenced = true;
    }
  }

  int num_threads_ = 0;
  bool is_used_ = false;  // there are stores
  int arrived_ = -1;      // the thread that has arrived, or -1
  int acquired_ = -1;     // the same once it has called a fence
  uint32_t arrived_epoch_ = 0;
  uint32_t acquired_epoch_ = 0;
  std::array<Store, kMaxThreads> stores_ = {};
};

}  // namespace sdpa::simt
