// What a thread of a kernel can do on the host target: the instructions of the machine model, one function each.
//
// Every function acts for the calling thread, which must be one that Block::run started. Collectives (mma, ldmatrix,
// shfl_xor, any, syncwarp) return when the whole warp has met in them. mma and ldmatrix want all 32 lanes; the others
// want all lanes that have not exited, and a shuffle must not read from one that has.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "sdpa/arch/simt/block.hpp"

namespace sdpa::simt {

namespace detail {

template <class Element>
inline void execute_mma(Block &, Warp &warp) {
  warp.slots.mma.multiply<Element>();
}

template <class ByteA>
inline void execute_byte_mma(Block &, Warp &warp) {
  warp.slots.byte_mma.multiply<ByteA>();
}

// Lane l holds the address of row l % 8 of matrix l / 8, an 8x8 matrix of 16-bit elements. It receives from every
// matrix the elements [l / 4, 2 (l % 4)..], two of them; of the transposed matrix with kTranspose.
template <bool kTranspose>
SDPA_SIMT_UNOBSERVED inline void execute_ldmatrix(Block &block, Warp &warp) {
  block.bank_conflicts().add_ldmatrix(warp.slots.ldmatrix_row);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    block.observe_read(warp.slots.ldmatrix_row[lane], 16, AccessKind::kLdmatrix, block.first_thread(warp) + lane,
                       warp.slots.ldmatrix_calls[lane]);
  }
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) {
      std::memcpy(elements[row], warp.slots.ldmatrix_row[8 * matrix + row], sizeof(elements[row]));
    }
    for (int lane = 0; lane < kWarpSize; ++lane) {
      const int i = lane / 4;
      const int j = 2 * (lane % 4);
      const uint32_t low = kTranspose ? elements[j][i] : elements[i][j];
      const uint32_t high = kTranspose ? elements[j + 1][i] : elements[i][j + 1];
      warp.slots.ldmatrix_result[lane][matrix] = low | high << 16;
    }
  }
}

inline void execute_shuffle(Block &block, Warp &warp) {
  WarpSlots &slots = warp.slots;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((warp.live >> lane & 1) == 0) continue;
    const int source = slots.shuffle_source[lane];
    if ((warp.live >> source & 1) == 0) {
      block.fail("shfl_xor: lane %d reads from lane %d, which is inactive", lane, source);
    }
    slots.shuffle_result[lane] = slots.shuffle_value[source];
  }
}

inline void execute_any(Block &, Warp &warp) {
  warp.slots.vote_result = warp.slots.vote != 0;
  warp.slots.vote = 0;
}

inline void execute_syncwarp(Block &block, Warp &warp) { block.sync_warp(warp); }

template <class Element>
inline constexpr Collective kMma{"mma", true, &execute_mma<Element>};
template <class ByteA>
inline constexpr Collective kByteMma{"mma of bytes", true, &execute_byte_mma<ByteA>};
template <bool kTranspose>
inline constexpr Collective kLdmatrix{kTranspose ? "ldmatrix.trans" : "ldmatrix", true, &execute_ldmatrix<kTranspose>};
inline constexpr Collective kShuffle{"shfl_xor", false, &execute_shuffle};
inline constexpr Collective kAny{"any", false, &execute_any};
inline constexpr Collective kSyncWarp{"syncwarp", false, &execute_syncwarp};

inline void check_shared_row(Block &block, const char *what, const void *address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    block.fail("%s: address %p is not 16-byte aligned", what, address);
  }
  if (!block.shared_memory().contains(address, 16)) {
    block.fail("%s: address %p is outside the block's %d bytes of shared memory", what, address, block.smem_bytes());
  }
}

}  // namespace detail

inline int thread_idx() { return current_block->thread_idx(); }
inline int block_idx() { return int(current_block->block_idx()); }
inline char *dynamic_smem() { return current_block->shared_memory().data(); }

// Where a kernel calls from: defaults of the functions below. A wrapper called sync_group says nothing of its own.
#define SDPA_SIMT_CALLER \
  const char *file = __builtin_FILE(), int line = __builtin_LINE(), const char *function = __builtin_FUNCTION()

inline void syncthreads(SDPA_SIMT_CALLER) {
  current_block->enter(file, line, function);
  current_block->sync(0, 0);
}

// A barrier of the block that tells every thread whether `predicate` was true of any.
inline bool syncthreads_or(bool predicate, SDPA_SIMT_CALLER) {
  current_block->enter(file, line, function);
  return current_block->sync_or(predicate);
}

// bar.sync barrier, num_threads: barrier in 1..15, num_threads a multiple of the warp size.
inline void sync_group(int barrier, int num_threads, SDPA_SIMT_CALLER) {
  Block &block = *current_block;
  block.enter(file, line, function);
  if (barrier == 0) block.fail("sync_group: barrier 0 is syncthreads'");
  block.sync(barrier, num_threads);
}

inline void syncwarp(SDPA_SIMT_CALLER) {
  current_block->enter(file, line, function);
  current_block->meet(detail::kSyncWarp);
}

// d = a b + c. Element is Half or Bfloat16; registers as in mma.hpp.
template <class Element>
inline void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
  Block &block = *current_block;
  const int lane = block.lane();
  MmaTiles &tiles = block.warp().slots.mma;
  tiles.deposit(lane, a, b, c);
  block.meet(detail::kMma<Element>);
  tiles.collect(lane, d);
}

// The same with bytes, those of A of type ByteA, and sums in int32; registers as in byte_mma.hpp.
template <class ByteA>
inline void byte_mma(uint32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const uint32_t (&c)[4]) {
  Block &block = *current_block;
  const int lane = block.lane();
  ByteMmaTiles &tiles = block.warp().slots.byte_mma;
  tiles.deposit(lane, a, b, c);
  block.meet(detail::kByteMma<ByteA>);
  tiles.collect(lane, d);
}

// ldmatrix.x4, .trans with kTranspose; `row` is in shared memory.
template <bool kTranspose>
inline void ldmatrix(uint32_t (&d)[4], const void *row) {
  Block &block = *current_block;
  detail::check_shared_row(block, "ldmatrix", row);
  const int lane = block.lane();
  WarpSlots &slots = block.warp().slots;
  slots.ldmatrix_row[lane] = row;
  slots.ldmatrix_calls[lane] = block.calls_to_here();
  block.meet(detail::kLdmatrix<kTranspose>);
  std::memcpy(d, slots.ldmatrix_result[lane], sizeof(d));
}

template <class T>
inline T shfl_xor(T value, int lane_mask) {
  static_assert(sizeof(T) == 4, "shuffles move 32-bit registers");
  Block &block = *current_block;
  if (lane_mask < 0 || lane_mask >= kWarpSize) block.fail("shfl_xor: lane mask %d is not in 0..31", lane_mask);
  const int lane = block.lane();
  WarpSlots &slots = block.warp().slots;
  std::memcpy(&slots.shuffle_value[lane], &value, 4);
  slots.shuffle_source[lane] = lane ^ lane_mask;
  block.meet(detail::kShuffle);
  std::memcpy(&value, &slots.shuffle_result[lane], 4);
  return value;
}

// True for all lanes when it is for one.
inline bool any(bool predicate) {
  Block &block = *current_block;
  WarpSlots &slots = block.warp().slots;
  if (predicate) slots.vote |= 1u << block.lane();
  block.meet(detail::kAny);
  return slots.vote_result;
}

// For a load of several elements at once, which a GPU refuses at other addresses and a CPU does not.
inline void check_alignment(const void *address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % size_t(bytes) != 0) {
    current_block->fail("load: address %p is not %d-byte aligned", address, bytes);
  }
}

// What blocks hand to each other, in the order that arrivals.hpp checks. increment gives the value before.
template <class T>
inline void store_device(T *address, const T &value) {
  check_alignment(address, sizeof(T));
  current_block->observe_device_store();
  *address = value;
}

inline void fence_device() {
  current_block->observe_device_fence();
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

inline uint32_t increment(uint32_t *counter) {
  current_block->observe_arrival();
  return __atomic_fetch_add(counter, 1u, __ATOMIC_SEQ_CST);
}

// Other blocks run in other OS threads. Ends the block when the value does not come within kPatience.
inline void await(const uint32_t *turn, uint32_t value) {
  constexpr std::chrono::seconds kPatience{120};
  const auto start = std::chrono::steady_clock::now();
  uint32_t seen;
  while ((seen = __atomic_load_n(turn, __ATOMIC_ACQUIRE)) != value) {
    if (std::chrono::steady_clock::now() - start > kPatience)
      current_block->fail("await: the turn is %u, and nobody made it %u", seen, value);
    std::this_thread::yield();
  }
  current_block->observe_await();
}

// Other blocks may go on when it has this value.
inline void announce(uint32_t *turn, uint32_t value) {
  current_block->observe_announcement();
  __atomic_store_n(turn, value, __ATOMIC_RELEASE);
}

template <class T>
inline T load_device(const T *address) {
  check_alignment(address, sizeof(T));
  current_block->observe_device_load();
  return *address;
}

// 16 bytes from global to shared memory; zeros, and no read, without `load`.
inline void cp_async(void *destination, const void *source, bool load) {
  Block &block = *current_block;
  detail::check_shared_row(block, "cp.async", destination);
  if (load && reinterpret_cast<uintptr_t>(source) % CpAsyncQueue::kBytes != 0) {
    block.fail("cp.async: source %p is not 16-byte aligned", source);
  }
  block.observe_write(destination, CpAsyncQueue::kBytes, AccessKind::kCpAsync, block.thread_idx(),
                      block.calls_to_here());
  block.bank_conflicts().add_cp_async(block.thread_idx(), destination);
  block.copies().issue(destination, source, load);
}

inline void cp_async_fence(SDPA_SIMT_CALLER) {
  current_block->enter(file, line, function);
  current_block->copies().commit();
}

// Waits until at most the `num_pending` youngest groups of this thread are pending.
inline void cp_async_wait(int num_pending, SDPA_SIMT_CALLER) {
  Block &block = *current_block;
  block.enter(file, line, function);
  block.copies().wait(size_t(num_pending), [&](const void *destination) { block.observe_landing(destination); });
}

}  // namespace sdpa::simt
