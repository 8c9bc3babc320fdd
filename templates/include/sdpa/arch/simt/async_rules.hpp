// How the engine runs what async.hpp holds, and which rules it checks: the part that needs a whole Block.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "sdpa/arch/simt/block.hpp"

namespace sdpa::simt {

inline void Async::reset(int threads) {
  barriers_.clear();
  waiters_.clear();
  loads_.clear();
  stores_.clear();
  written_.clear();
  groups_.assign(static_cast<size_t>(threads), 0);
  fences_.assign(static_cast<size_t>(threads), 0);
  registers_.fill(0);
  for (WgmmaQueue &queue : queues_) {
    queue.is_fenced = false;
    queue.ops.clear();
    queue.groups.clear();
    queue.num_uncommitted = 0;
    queue.accumulators.clear();
    queue.issued.clear();
  }
}

// ---- mbarriers ----

inline const char *whose(const Block &block, const Block &there) {
  return &block == &there ? "" : " of the cluster's other CTA";
}

inline Mbarrier &Async::known(Block &block, Block &there, const void *barrier, const char *what) {
  if (!block.shared_memory().contains(barrier, sizeof(uint64_t)))
    block.fail("%s: mbarrier %p is not in shared memory", what, barrier);
  const size_t offset = block.shared_memory().offset(barrier);
  if (there.has_exited())
    block.fail("%s: the mbarrier at byte %zu of shared memory%s is gone, because that CTA has exited", what, offset,
               whose(block, there));
  Mbarrier *const found = barriers_.find(offset);
  if (found == nullptr)
    block.fail("%s: the mbarrier at byte %zu of shared memory%s was not initialised", what, offset,
               whose(block, there));
  if (&block != &there && !found->is_shared)
    block.fail("%s: the mbarrier at byte %zu of shared memory%s was initialised, and no %s lies in between", what,
               offset, whose(block, there), found->is_fenced ? "barrier of the cluster" : "fence_mbarrier_init");
  return *found;
}

inline void Async::init(Block &block, const void *barrier, int arrivals) {
  if (!block.shared_memory().contains(barrier, sizeof(uint64_t)))
    block.fail("mbarrier_init: %p is not in shared memory", barrier);
  barriers_.init(block.shared_memory().offset(barrier), arrivals, block.thread_idx());
}

inline void Async::fence_inits(int thread) {
  for (Mbarrier &barrier : barriers_) barrier.is_fenced |= barrier.thread == thread;
}

inline void Async::share_inits() {
  for (Mbarrier &barrier : barriers_) {
    barrier.is_shared = barrier.is_fenced;
    barrier.is_touched = barrier.was_touched = false;
  }
}

inline void Async::arrive(Block &block, Block &there, const void *barrier, int bytes) {
  Mbarrier &state = known(block, there, barrier, "mbarrier_arrive");
  if (state.missing_arrivals == 0)
    block.fail("mbarrier_arrive: the mbarrier at byte %zu of shared memory%s has had all %d arrivals of its phase",
               state.offset, whose(block, there), state.count);
  state.is_touched |= &block != &there;
  state.missing_bytes += bytes;
  --state.missing_arrivals;
  if (state.missing_arrivals == 0) check_bytes(block, state);
  complete(there, state);
}

// No arrival is left that could expect more.
inline void Async::check_bytes(Block &block, const Mbarrier &barrier) {
  if (barrier.missing_bytes < 0)
    block.fail("tma_load: the mbarrier at byte %zu of shared memory gets %lld bytes more than it expects",
               barrier.offset, static_cast<long long>(-barrier.missing_bytes));
}

inline void Async::complete(Block &block, Mbarrier &barrier) {
  if (!barrier.is_complete()) return;
  barrier.start_next_phase();
  const auto is_over = [&](const Waiter &waiter) {
    if (waiter.barrier != barrier.offset || waiter.parity == barrier.phase) return false;
    block.wake(waiter.thread);
    return true;
  };
  waiters_.erase(std::remove_if(waiters_.begin(), waiters_.end(), is_over), waiters_.end());
}

inline void Async::wait(Block &block, const void *barrier, int parity) {
  const size_t offset = known(block, block, barrier, "mbarrier_wait").offset;
  while (barriers_.find(offset)->phase == parity) {
    waiters_.push_back({block.thread_idx(), offset, parity});
    block.park();
  }
  barriers_.find(offset)->observe();
}

inline void Async::describe_waits(char *text, size_t size, const char *lead) const {
  size_t length = 0;
  for (const Waiter &waiter : waiters_) {
    if (length >= size) return;
    const bool is_repeated = std::any_of(waiters_.data(), &waiter, [&](const Waiter &other) {
      return other.barrier == waiter.barrier && other.parity == waiter.parity;
    });
    if (is_repeated) continue;
    const Mbarrier &barrier = *const_cast<Mbarriers &>(barriers_).find(waiter.barrier);
    const int written = std::snprintf(text + length, size - length,
                                      "%sthread %d waits for parity %d of the mbarrier at byte %zu of shared memory, "
                                      "which misses %d arrivals and %lld "
                                      "bytes",
                                      lead, waiter.thread, waiter.parity, waiter.barrier, barrier.missing_arrivals,
                                      static_cast<long long>(barrier.missing_bytes));
    length += size_t(std::max(written, 0));
    lead = ", ";
  }
}

// ---- TMA ----

inline void Async::load(Block &block, Block &there, const TensorMap &map, const void *barrier, void *smem,
                        const int (&coordinates)[kMaxRank]) {
  SharedMemory &memory = block.shared_memory();
  const size_t bytes = box_bytes(map);
  if (!memory.contains(smem, bytes))
    block.fail("tma_load: %zu bytes at %p are not in the block's %d bytes of shared memory", bytes, smem,
               block.smem_bytes());
  const size_t offset = memory.offset(smem);
  if (offset % 128 != 0) block.fail("tma_load: byte %zu of shared memory is not a multiple of 128", offset);
  Mbarrier &full = known(block, there, barrier, "tma_load");
  if (&block != &there && !full.is_observed)
    block.fail("tma_load: writes byte %zu of shared memory%s, where nobody has waited for what was loaded before",
               offset, whose(block, there));
  const auto overlaps = [&](size_t begin, size_t end) { return begin < offset + bytes && offset < end; };
  for (const Store &store : stores_) {
    if (overlaps(store.source, store.source + box_bytes(store.map)))
      block.fail("tma_load: writes byte %zu of shared memory%s, which a store of thread %d has not read yet", offset,
                 whose(block, there), store.thread);
  }
  for (int warp = 0; warp < block.num_threads() / kWarpSize; ++warp) {
    for (const Wgmma &op : queue(warp).ops) {
      const auto touches = [&](uint64_t descriptor) {
        const size_t start = MatrixDescriptor::of(descriptor).start - kSharedBase;
        return start >= offset && start < offset + bytes;
      };
      if (touches(op.b) || (!op.has_a_in_registers && touches(op.a)))
        block.fail("tma_load: writes byte %zu of shared memory%s, which a wgmma of warp %d in flight reads", offset,
                   whose(block, there), warp);
    }
  }
  for (const Load &other : loads_) {
    if (overlaps(other.destination, other.destination + box_bytes(other.map)))
      block.fail("tma_load: writes byte %zu of shared memory%s, to which another load is on its way", offset,
                 whose(block, there));
  }
  std::memset(there.shared_memory().data() + offset, SharedMemory::kPoison, bytes);
  for (size_t grain = offset / kGrainBytes; grain * kGrainBytes < offset + bytes && grain < written_.size(); ++grain)
    written_[grain] = {};
  Load load = {map, {}, full.offset, offset, &block != &there};
  std::copy(coordinates, coordinates + kMaxRank, load.coordinates);
  loads_.push_back(load);
  full.is_touched |= load.is_from_other;
}

inline void Async::land_one(Block &block) {
  const size_t index = size_t(block.draw(int(loads_.size())));
  const Load load = loads_[index];
  loads_.erase(loads_.begin() + std::ptrdiff_t(index));
  copy_box<true>(load.map, load.coordinates, block.shared_memory().data() + load.destination,
                 uint32_t(load.destination) + kSharedBase);
  Mbarrier &barrier = *barriers_.find(load.barrier);
  barrier.missing_bytes -= int64_t(box_bytes(load.map));
  if (barrier.missing_arrivals == 0 || !load.is_from_other) check_bytes(block, barrier);
  complete(block, barrier);
}

inline void Async::store(Block &block, const TensorMap &map, const void *smem, const int (&coordinates)[kMaxRank]) {
  const size_t bytes = box_bytes(map);
  if (!block.shared_memory().contains(smem, bytes))
    block.fail("tma_store: %zu bytes at %p are not in the block's %d bytes of shared memory", bytes, smem,
               block.smem_bytes());
  const size_t offset = block.shared_memory().offset(smem);
  if (offset % 128 != 0) block.fail("tma_store: byte %zu of shared memory is not a multiple of 128", offset);
  check_seen(block, offset, bytes, "tma_store");
  const int thread = block.thread_idx();
  Store store = {map, {}, offset, thread, groups_[size_t(thread)]};
  std::copy(coordinates, coordinates + kMaxRank, store.coordinates);
  stores_.push_back(store);
}

inline void Async::commit_stores(Block &block) { ++groups_[size_t(block.thread_idx())]; }

inline void Async::wait_stores(Block &block, size_t num_pending) {
  const int thread = block.thread_idx();
  const size_t committed = groups_[size_t(thread)];
  const auto is_read = [&](const Store &store) {
    if (store.thread != thread || store.group + num_pending >= committed) return false;
    copy_box<false>(store.map, store.coordinates, block.shared_memory().data() + store.source,
                    uint32_t(store.source) + kSharedBase);
    return true;
  };
  stores_.erase(std::remove_if(stores_.begin(), stores_.end(), is_read), stores_.end());
}

inline void Async::generic_write(Block &block, const void *address, size_t bytes, int thread) {
  const size_t offset = block.shared_memory().offset(address);
  for (const Store &store : stores_) {
    if (offset < store.source + box_bytes(store.map) && store.source < offset + bytes)
      block.fail("writes byte %zu of shared memory, which a TMA store of thread %d has not read yet", offset,
                 store.thread);
  }
  if (written_.empty()) written_.resize((size_t(block.smem_bytes()) + kGrainBytes - 1) / kGrainBytes);
  for (size_t grain = offset / kGrainBytes; grain * kGrainBytes < offset + bytes; ++grain)
    written_[grain] = {thread, fences_[size_t(thread)]};
}

inline void Async::check_seen(Block &block, size_t offset, size_t bytes, const char *what) {
  for (size_t grain = offset / kGrainBytes; grain * kGrainBytes < offset + bytes && grain < written_.size(); ++grain) {
    const GenericWrite &write = written_[grain];
    if (write.thread >= 0 && fences_[size_t(write.thread)] == write.fences)
      block.fail("%s: reads byte %zu of shared memory, and thread %d has had no fence_async_proxy since it wrote there",
                 what, grain * kGrainBytes, write.thread);
  }
}

// ---- wgmma ----

// The 8 elements at a shared address.
inline const uint16_t *Async::operand(Block &block, uint32_t shared, const char *what) {
  const size_t offset = size_t(shared) - kSharedBase;
  if (offset > size_t(block.smem_bytes()) || size_t(block.smem_bytes()) - offset < 16)
    block.fail("wgmma: %s leads to byte %zu of %d bytes of shared memory", what, offset, block.smem_bytes());
  for (const Load &load : loads_) {
    if (offset >= load.destination && offset < load.destination + box_bytes(load.map))
      block.fail("wgmma: %s leads to byte %zu of shared memory, where a tma_load has not landed", what, offset);
  }
  check_seen(block, offset, 16, "wgmma");
  return reinterpret_cast<const uint16_t *>(block.shared_memory().data() + offset);
}

inline void Async::issue(Block &block, int warp, const Wgmma &given) {
  WgmmaQueue &queue = this->queue(warp);
  if (!queue.is_fenced) block.fail("wgmma: the warp has had no wgmma_fence since its last group");
  Wgmma op = given;
  op.a = queue.lanes[0].a;
  op.b = queue.lanes[0].b;
  op.is_zeroed = queue.lanes[0].is_zeroed;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const WgmmaQueue::Operands &operands = queue.lanes[size_t(lane)];
    if (operands.b != op.b || operands.is_zeroed != op.is_zeroed || (!op.has_a_in_registers && operands.a != op.a))
      block.fail("wgmma: lanes 0 and %d of a warp have different descriptors", lane);
    op.lane_a_address[lane] = operands.a_registers;
    if (op.has_a_in_registers) std::memcpy(op.lane_a[lane], operands.a_registers, sizeof(op.lane_a[lane]));
  }
  if (!MatrixDescriptor::of(op.b).is_aligned() || (!op.has_a_in_registers && !MatrixDescriptor::of(op.a).is_aligned()))
    block.fail("wgmma: an operand does not start at a multiple of 8 swizzled rows");

  // The four warps of a warpgroup issue the same.
  queue.issued.push_back(op.b * 0x9e3779b97f4a7c15u ^ (op.has_a_in_registers ? 0 : op.a) ^ uint64_t(op.n) ^
                         uint64_t(op.is_zeroed) << 40);
  const int first_warp = warp / 4 * 4;
  for (int other = first_warp; other < first_warp + 4; ++other) {
    const std::vector<uint64_t> &theirs = this->queue(other).issued;
    if (theirs.size() >= queue.issued.size() && theirs[queue.issued.size() - 1] != queue.issued.back())
      block.fail("wgmma: warps %d and %d of a warpgroup issue different instructions", other, warp);
  }

  size_t index = 0;
  while (index < queue.accumulators.size() && queue.accumulators[index].lanes[0] != queue.lanes[0].accumulator) ++index;
  if (index == queue.accumulators.size()) {
    WgmmaAccumulator &added = queue.accumulators.emplace_back();
    added.n = op.n;
    added.num_pending = 0;
    for (int lane = 0; lane < kWarpSize; ++lane)
      added.lanes[lane] = static_cast<char *>(queue.lanes[size_t(lane)].accumulator);
  }
  WgmmaAccumulator &acc = queue.accumulators[index];
  if (acc.num_pending++ == 0) {
    acc.tile.resize(size_t(16 * op.n));
    for (int lane = 0; lane < kWarpSize; ++lane) {
      char *const registers = acc.lanes[lane];
      for (int i = 0; i < op.n / 2; ++i) {
        const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        std::memcpy(&acc.tile[size_t(row * op.n + column)], registers + 4 * i, 4);
      }
      std::memset(registers, SharedMemory::kPoison, size_t(op.n / 2) * sizeof(float));
    }
  }
  op.accumulator = int(index);
  queue.ops.push_back(op);
  ++queue.num_uncommitted;
}

inline void Async::commit(Block &, int warp) {
  WgmmaQueue &queue = this->queue(warp);
  queue.groups.push_back(queue.num_uncommitted);
  queue.num_uncommitted = 0;
  queue.is_fenced = false;
}

inline void Async::execute(Block &block, WgmmaQueue &queue, int warp, const Wgmma &op) {
  WgmmaAccumulator &acc = queue.accumulators[size_t(op.accumulator)];
  for (int lane = 0; lane < kWarpSize && op.has_a_in_registers; ++lane) {
    if (std::memcmp(op.lane_a[lane], op.lane_a_address[lane], sizeof(op.lane_a[lane])) != 0)
      block.fail("wgmma: A was written in registers of lane %d while it was in flight", lane);
  }
  op.decode(block, op, warp % 4 * 16, operands_);
  if (op.is_zeroed) std::fill(acc.tile.begin(), acc.tile.end(), 0.f);
  op.multiply(operands_, acc.tile.data(), op.n);
  if (--acc.num_pending > 0) return;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    char *const registers = acc.lanes[lane];
    for (int i = 0; i < op.n / 2; ++i) {
      uint32_t bits;
      std::memcpy(&bits, registers + 4 * i, sizeof(bits));
      if (bits != 0xffffffffu) block.fail("wgmma: an accumulator of lane %d was written while it was in flight", lane);
      const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      std::memcpy(registers + 4 * i, &acc.tile[size_t(row * op.n + column)], 4);
    }
  }
}

inline void Async::wait(Block &block, int warp, size_t num_pending) {
  WgmmaQueue &queue = this->queue(warp);
  size_t done = 0;
  while (queue.groups.size() > num_pending) {
    for (size_t i = 0; i < queue.groups.front(); ++i) execute(block, queue, warp, queue.ops[done++]);
    queue.groups.erase(queue.groups.begin());
  }
  queue.ops.erase(queue.ops.begin(), queue.ops.begin() + std::ptrdiff_t(done));
  if (!queue.ops.empty()) return;
  queue.accumulators.clear();
  const int first_warp = warp / 4 * 4;
  const size_t issued = queue.issued.size();
  for (int other = first_warp; other < first_warp + 4; ++other) {
    if (this->queue(other).issued.size() != issued || !this->queue(other).ops.empty()) return;
  }
  for (int other = first_warp; other < first_warp + 4; ++other) this->queue(other).issued.clear();
}

// ---- registers ----

inline void Async::set_registers(Block &block, int warp, int count) {
  if (count % 8 != 0 || count < 24 || count > 256)
    block.fail("setmaxnreg: %d registers; a count is a multiple of 8 from 24 to 256", count);
  registers_[size_t(warp)] = count;
}

// ---- ends ----

inline void Async::check_exit(Block &block, int thread) {
  for (const Store &store : stores_) {
    if (store.thread == thread)
      block.fail("exits before its TMA store has read byte %zu of shared memory", store.source);
  }
  const WgmmaQueue &queue = this->queue(thread / kWarpSize);
  if (!queue.ops.empty()) block.fail("exits with %zu wgmma in flight", queue.ops.size());
}

inline void Async::check_end(Block &block) {
  if (!loads_.empty()) block.fail("the block ends with %zu TMA loads in flight", loads_.size());
  for (const Mbarrier &barrier : barriers_) {
    check_bytes(block, barrier);
    if (barrier.is_touched || barrier.was_touched)
      block.fail(
          "the block exits, and nobody has waited for what its cluster's other CTA did at the mbarrier at byte %zu of "
          "shared memory",
          barrier.offset);
  }
  constexpr int kRegisters = 65536;
  const int warps = (block.num_threads() + kWarpSize - 1) / kWarpSize;
  const int launched = std::min(255, kRegisters / (warps * kWarpSize) / 8 * 8);
  int used = 0;
  for (int warp = 0; warp < warps; ++warp) {
    used += registers_[size_t(warp)] == 0 ? launched : registers_[size_t(warp)];
    if (registers_[size_t(warp)] != registers_[size_t(warp / 4 * 4)])
      block.fail("setmaxnreg: warps %d and %d of a warpgroup ask for different numbers", warp / 4 * 4, warp);
  }
  if (used > launched * warps)
    block.fail(
        "setmaxnreg: the warps ask for %d registers a lane together; the launch gave them %d, so one would wait "
        "for ever",
        used, launched * warps);
}

}  // namespace sdpa::simt
