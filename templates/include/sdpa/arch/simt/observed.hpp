// Observed builds: the shadow also sees the plain loads and stores of a kernel.
//
// GCC calls a function of ThreadSanitizer's at every access to memory when -fsanitize=thread is given while compiling.
// Without it while linking, these functions are ours: accesses that hit the running block's shared memory go to its
// shadow, all others are left alone. Every unit of a library has to be compiled alike. Nothing of ThreadSanitizer itself
// takes part. -fno-tree-sra keeps accesses to vectors whole. Slow: for tests only.
#pragma once

#if defined(__SANITIZE_THREAD__)

#include <cstddef>
#include <cstdint>

#include "sdpa/arch/simt/block.hpp"

namespace sdpa::simt {

SDPA_SIMT_UNOBSERVED __attribute__((noinline)) inline void observe(const void *address, size_t bytes, bool is_write,
                                                                   const void *frame) {
  if (is_observing || current_block == nullptr) return;
  is_observing = true;
  Block &block = *current_block;
  if (block.shared_memory().contains(address, bytes)) {
    const uint16_t chain = kHasCallChains ? block.calls_to(frame) : 0;
    if (bytes <= 16) {
      const void *const place = static_cast<const void *const *>(frame)[1];  // where the hook returns to
      block.bank_conflicts().add_plain(block.thread_idx(), place, address, bytes);
    }
    if (is_write) {
      block.observe_write(address, bytes, AccessKind::kStore, block.thread_idx(), chain);
    } else {
      block.observe_read(address, bytes, AccessKind::kLoad, block.thread_idx(), chain);
    }
  }
  is_observing = false;
}

}  // namespace sdpa::simt

#define SDPA_SIMT_HOOK extern "C" __attribute__((weak, visibility("hidden"), no_sanitize_thread))
// The frame of the hook itself: its caller makes the access.
#define SDPA_SIMT_OBSERVE(bytes, is_write) sdpa::simt::observe(address, bytes, is_write, __builtin_frame_address(0))
#define SDPA_SIMT_HOOKS(bytes)                                                                         \
  SDPA_SIMT_HOOK void __tsan_read##bytes(void *address) { SDPA_SIMT_OBSERVE(bytes, false); }           \
  SDPA_SIMT_HOOK void __tsan_write##bytes(void *address) { SDPA_SIMT_OBSERVE(bytes, true); }           \
  SDPA_SIMT_HOOK void __tsan_unaligned_read##bytes(void *address) { SDPA_SIMT_OBSERVE(bytes, false); } \
  SDPA_SIMT_HOOK void __tsan_unaligned_write##bytes(void *address) { SDPA_SIMT_OBSERVE(bytes, true); }

SDPA_SIMT_HOOKS(1)
SDPA_SIMT_HOOKS(2)
SDPA_SIMT_HOOKS(4)
SDPA_SIMT_HOOKS(8)
SDPA_SIMT_HOOKS(16)
SDPA_SIMT_HOOK void __tsan_init() {}
SDPA_SIMT_HOOK void __tsan_func_entry(void *) {}
SDPA_SIMT_HOOK void __tsan_func_exit() {}
SDPA_SIMT_HOOK void __tsan_vptr_update(void **, void *) {}
SDPA_SIMT_HOOK void __tsan_vptr_read(void **) {}
SDPA_SIMT_HOOK void __tsan_read_range(void *address, size_t bytes) { SDPA_SIMT_OBSERVE(bytes, false); }
SDPA_SIMT_HOOK void __tsan_write_range(void *address, size_t bytes) { SDPA_SIMT_OBSERVE(bytes, true); }

// Atomic operations are themselves; the engine and kernels use them on global memory only.
#define SDPA_SIMT_ATOMICS(bits, type)                                                                                  \
  SDPA_SIMT_HOOK type __tsan_atomic##bits##_load(const volatile type *from, int) {                                     \
    return __atomic_load_n(from, __ATOMIC_SEQ_CST);                                                                    \
  }                                                                                                                    \
  SDPA_SIMT_HOOK void __tsan_atomic##bits##_store(volatile type *to, type value, int) {                                \
    __atomic_store_n(to, value, __ATOMIC_SEQ_CST);                                                                     \
  }                                                                                                                    \
  SDPA_SIMT_HOOK type __tsan_atomic##bits##_fetch_add(volatile type *to, type value, int) {                            \
    return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);                                                            \
  }                                                                                                                    \
  SDPA_SIMT_HOOK int __tsan_atomic##bits##_compare_exchange_strong(volatile type *to, type *expected, type value, int, \
                                                                   int) {                                              \
    return __atomic_compare_exchange_n(to, expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                \
  }

SDPA_SIMT_ATOMICS(8, int8_t)
SDPA_SIMT_ATOMICS(32, int32_t)
SDPA_SIMT_ATOMICS(64, int64_t)
SDPA_SIMT_HOOK void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
SDPA_SIMT_HOOK void __tsan_atomic_signal_fence(int) {}

#endif
