// Where the threads of a Block meet: collectives of a warp's lanes, and barriers of warps.
//
// The lanes of a warp meet in collectives (collectives.hpp): each lane leaves its operands in the warp's slots and
// stops; the last to arrive executes for all. A barrier is a collective too: the warp's lanes meet, then the warp as a
// whole arrives at the barrier, which wakes all when enough have come. Included by block.hpp, at its end.
#pragma once

#include "sdpa/arch/simt/block.hpp"

namespace sdpa::simt {

inline void Block::meet(const Collective &collective, int barrier, int barrier_threads) {
  Warp &warp = this->warp();
  const uint32_t lane_bit = bit(current_);
  if (warp.arrived == 0) {
    warp.collective = &collective;
    warp.barrier = barrier;
    warp.barrier_threads = barrier_threads;
  } else if (warp.collective != &collective || warp.barrier != barrier || warp.barrier_threads != barrier_threads) {
    fail_divergence(collective, barrier, barrier_threads);
  }
  warp.arrived |= lane_bit;
  if (warp.arrived != warp.live) {
    warp.ready &= ~lane_bit;
    run_other_thread();
    return;
  }
  execute(warp);
  if ((warp.ready & lane_bit) == 0) {
    run_other_thread();
  } else if (!schedule_.in_order()) {
    run_other_thread();
  }
}

inline void Block::execute(Warp &warp) {
  if (warp.collective->needs_full_warp && warp.live != kFullWarp) {
    fail("%s with inactive lanes: only lanes 0x%08x of the warp take part", warp.collective->name, warp.live);
  }
  warp.arrived = 0;
  warp.ready = warp.live;
  bank_conflicts_.count(int(&warp - warps_.data()));
  warp.collective->execute(*this, warp);
}

inline void Block::sync(int barrier, int num_threads) {
  if (barrier < 0 || barrier >= kNumBarriers) fail("barrier %d does not exist: there are %d", barrier, kNumBarriers);
  if (barrier != 0 && (num_threads <= 0 || num_threads % kWarpSize != 0)) {
    fail("sync_group(%d, %d): the number of threads is not a positive multiple of %d", barrier, num_threads, kWarpSize);
  }
  meet(kBarrier, barrier, num_threads);
}

inline bool Block::sync_or(bool predicate) {
  barriers_[0].vote |= predicate;
  sync(0, 0);
  return barriers_[0].result;
}

inline void Block::count_at_barrier(Warp &warp, bool waits) {
  Barrier &barrier = barriers_[size_t(warp.barrier)];
  if (barrier.num_warps == 0) {
    barrier.num_threads = warp.barrier_threads;
  } else if (barrier.num_threads != warp.barrier_threads) {
    fail("sync_group(%d, %d): the warps that already wait there expect %d threads", warp.barrier, warp.barrier_threads,
         barrier.num_threads);
  }
  ++barrier.num_warps;
  if (waits) {
    warp.waits_at = warp.barrier;
    warp.ready = 0;
  } else {
    barrier.arrived |= 1u << (&warp - warps_.data());
  }
  release_if_complete(warp.barrier);
}

inline void Block::release_if_complete(int barrier) {
  Barrier &state = barriers_[size_t(barrier)];
  const int needed = barrier == 0 ? num_live_warps_ : state.num_threads / kWarpSize;
  if (state.num_warps == 0 || state.num_warps != needed) return;
  state.num_warps = 0;
  state.result = state.vote;
  state.vote = false;
  const uint32_t arrived = state.arrived;
  state.arrived = 0;
  shadow_.sync_warps(arrived | release_waiting(barrier));
}

inline uint32_t Block::release_waiting(int barrier) {
  uint32_t released = 0;
  for (int w = 0; w < num_warps_; ++w) {
    Warp &warp = warps_[size_t(w)];
    if (warp.waits_at != barrier) continue;
    warp.waits_at = -1;
    warp.ready = warp.live;
    released |= 1u << w;
  }
  return released;
}

inline void Block::arrive_at_cluster(Block &block, Warp &warp) {
  warp.waits_at = kAtCluster;
  warp.ready = 0;
  ++block.num_at_cluster_;
  block.release_cluster_if_complete();
}

inline void Block::release_cluster_if_complete() {
  const int waiting = num_at_cluster_ + (peer_ == nullptr ? 0 : peer_->num_at_cluster_);
  const int needed = num_live_warps_ + (peer_ == nullptr ? 0 : peer_->num_live_warps_);
  if (waiting == 0 || waiting != needed) return;
  release_from_cluster();
  if (peer_ != nullptr) peer_->release_from_cluster();
}

inline void Block::release_from_cluster() {
  num_at_cluster_ = 0;
  shadow_.sync_warps(release_waiting(kAtCluster));
  async_.share_inits();
}

}  // namespace sdpa::simt
