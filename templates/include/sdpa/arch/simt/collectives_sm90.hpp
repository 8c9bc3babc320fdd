// What a thread of a kernel can do on the host target beyond collectives.hpp: the instructions of sm_90.
#pragma once

#include <cstdint>
#include <cstring>

#include "sdpa/arch/simt/collectives.hpp"

namespace sdpa::simt {

__attribute__((weak)) size_t shared_address(const void *pointer) {
  return current_block->shared_memory().offset(pointer) + kSharedBase;
}

namespace detail {

inline int warp_of(Block &block, Warp &warp) { return block.first_thread(warp) / kWarpSize; }

inline void execute_elect(Block &block, Warp &warp) {
  int chosen = block.draw(kWarpSize);
  while ((warp.live >> chosen & 1) == 0) chosen = (chosen + 1) % kWarpSize;
  warp.slots.elected = chosen;
}

inline void execute_wgmma_fence(Block &block, Warp &warp) {
  block.async().queue(warp_of(block, warp)).is_fenced = true;
}
inline void execute_wgmma_commit(Block &block, Warp &warp) { block.async().commit(block, warp_of(block, warp)); }
template <int N>
inline void execute_wgmma_wait(Block &block, Warp &warp) {
  block.async().wait(block, warp_of(block, warp), N);
}
template <int N>
inline void execute_set_registers(Block &block, Warp &warp) {
  block.async().set_registers(block, warp_of(block, warp), N);
}

template <class Format, bool kAInRegisters, bool kIsMnMajor, int N>
SDPA_SIMT_UNOBSERVED inline void decode(Block &block, const Wgmma &op, int first_row, WgmmaOperands &operands) {
  const auto a_at = [&](uint32_t shared) { return block.async().operand(block, shared, "A"); };
  const auto b_at = [&](uint32_t shared) { return block.async().operand(block, shared, "B"); };
  if constexpr (kAInRegisters) {
    for (int lane = 0; lane < kWarpSize; ++lane) decode_a<Format>(operands, lane, op.lane_a[lane]);
  } else {
    decode_a<Format>(operands, MatrixDescriptor::of(op.a), first_row, a_at);
  }
  decode_b<Format>(operands, MatrixDescriptor::of(op.b), kIsMnMajor, N, b_at);
}

template <int N>
SDPA_SIMT_UNOBSERVED inline void decode_bytes(Block &block, const Wgmma &op, int, WgmmaOperands &operands) {
  for (int lane = 0; lane < kWarpSize; ++lane) decode_a_bytes(operands, lane, op.lane_a[lane]);
  decode_b_bytes(operands, MatrixDescriptor::of(op.b), N,
                 [&](uint32_t shared) { return block.async().operand(block, shared, "B"); });
}

// ByteA: int8_t or uint8_t; the bytes of B are signed.
template <class ByteA, int N>
inline void execute_byte_wgmma(Block &block, Warp &warp) {
  Wgmma op = {};
  op.decode = &decode_bytes<N>;
  op.multiply = &multiply_bytes<ByteA>;
  op.n = N;
  op.has_a_in_registers = true;
  block.async().issue(block, warp_of(block, warp), op);
}

template <class Format, bool kAInRegisters, bool kIsMnMajor, int N>
inline void execute_wgmma(Block &block, Warp &warp) {
  Wgmma op = {};
  op.decode = &decode<Format, kAInRegisters, kIsMnMajor, N>;
  op.multiply = &multiply;
  op.n = N;
  op.is_b_mn_major = kIsMnMajor;
  op.has_a_in_registers = kAInRegisters;
  block.async().issue(block, warp_of(block, warp), op);
}

// Lane l holds the address of row l % 8 of matrix l / 8, and two elements of row l / 4 of every matrix.
SDPA_SIMT_UNOBSERVED inline void execute_stmatrix(Block &block, Warp &warp) {
  block.bank_conflicts().add_ldmatrix(warp.slots.ldmatrix_row);  // the same passes
  for (int lane = 0; lane < kWarpSize; ++lane) {
    char *const row = static_cast<char *>(const_cast<void *>(warp.slots.ldmatrix_row[lane]));
    const int thread = block.first_thread(warp) + lane;
    block.observe_write(row, 16, AccessKind::kStore, thread, warp.slots.ldmatrix_calls[lane]);
    // The rows of a matrix are the work of all lanes, and each fences its own.
    block.async().generic_write(block, row, 16, thread);
    for (int quad = 0; quad < 4; ++quad)
      std::memcpy(row + 4 * quad, &warp.slots.ldmatrix_result[lane % 8 * 4 + quad][lane / 8], 4);
  }
}

inline constexpr Collective kElect{"elect", false, &execute_elect};
inline constexpr Collective kWgmmaFence{"wgmma_fence", true, &execute_wgmma_fence};
inline constexpr Collective kWgmmaCommit{"wgmma_commit", true, &execute_wgmma_commit};
template <int N>
inline constexpr Collective kWgmmaWait{"wgmma_wait", true, &execute_wgmma_wait<N>};
template <int N>
inline constexpr Collective kSetRegisters{"setmaxnreg", true, &execute_set_registers<N>};
template <class Format, bool kAInRegisters, bool kIsMnMajor, int N>
inline constexpr Collective kWgmma{"wgmma", true, &execute_wgmma<Format, kAInRegisters, kIsMnMajor, N>};
template <class ByteA, int N>
inline constexpr Collective kByteWgmma{"wgmma of bytes", true, &execute_byte_wgmma<ByteA, N>};
inline constexpr Collective kStmatrix{"stmatrix", true, &execute_stmatrix};

}  // namespace detail

// True for one lane of the warp.
inline bool elect() {
  Block &block = *current_block;
  block.meet(detail::kElect);
  return block.warp().slots.elected == block.lane();
}

// bar.arrive: barrier in 1..15.
inline void arrive_group(int barrier, int num_threads) { current_block->arrive(barrier, num_threads); }

inline void wgmma_fence() { current_block->meet(detail::kWgmmaFence); }
inline void wgmma_commit() { current_block->meet(detail::kWgmmaCommit); }
template <int N>
inline void wgmma_wait() {
  current_block->meet(detail::kWgmmaWait<N>);
}
template <int N>
inline void set_registers() {
  current_block->meet(detail::kSetRegisters<N>);
}

// accumulator: N / 2 floats. A is four registers or, without them, a descriptor.
template <class Format, bool kIsMnMajor, int N>
inline void wgmma(float *accumulator, const uint32_t *a_registers, uint64_t b, bool is_zeroed) {
  Block &block = *current_block;
  block.async().queue(block.thread_idx() / kWarpSize).lanes[size_t(block.lane())] = {accumulator, a_registers, 0, b,
                                                                                     is_zeroed};
  block.meet(detail::kWgmma<Format, true, kIsMnMajor, N>);
}
template <class Format, bool kIsMnMajor, int N>
inline void wgmma(float *accumulator, uint64_t a, uint64_t b, bool is_zeroed) {
  Block &block = *current_block;
  block.async().queue(block.thread_idx() / kWarpSize).lanes[size_t(block.lane())] = {accumulator, nullptr, a, b,
                                                                                     is_zeroed};
  block.meet(detail::kWgmma<Format, false, kIsMnMajor, N>);
}

// The same of bytes, K-major: A is four registers.
template <class ByteA, int N>
inline void wgmma_bytes(void *accumulator, const uint32_t *a_registers, uint64_t b, bool is_zeroed) {
  Block &block = *current_block;
  block.async().queue(block.thread_idx() / kWarpSize).lanes[size_t(block.lane())] = {accumulator, a_registers, 0, b,
                                                                                     is_zeroed};
  block.meet(detail::kByteWgmma<ByteA, N>);
}

// stmatrix.x4; `row` is in shared memory.
inline void stmatrix(const uint32_t (&source)[4], void *row) {
  Block &block = *current_block;
  detail::check_shared_row(block, "stmatrix", row);
  const int lane = block.lane();
  WarpSlots &slots = block.warp().slots;
  slots.ldmatrix_row[lane] = row;
  slots.ldmatrix_calls[lane] = block.calls_to_here();
  std::memcpy(slots.ldmatrix_result[lane], source, sizeof(source));
  block.meet(detail::kStmatrix);
}

}  // namespace sdpa::simt
