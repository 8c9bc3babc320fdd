// A fiber: one CUDA thread's stack and the place where it stopped, on the CPU.
//
//   Fiber main;                        // stands for the OS thread's own stack
//   Fiber fiber(Fiber::kStackBytes);   // owns a stack with a guard page below it
//   fiber.prepare(entry);              // the next switch to it calls entry(), which never returns
//   switch_fiber(main, fiber);         // leaves main, runs the fiber, returns when something switches back to main
//
// x86-64 switches with fifteen instructions; other processors, and builds with SDPA_SIMT_UCONTEXT, use ucontext,
// which costs a system call per switch. AddressSanitizer is told about every switch. A fiber stays on one OS thread
// for the length of a run. Which fiber runs next is not decided here: see block.hpp.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <new>

#if !defined(__x86_64__) && !defined(SDPA_SIMT_UCONTEXT)
#define SDPA_SIMT_UCONTEXT 1
#endif

#if defined(SDPA_SIMT_UCONTEXT)
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SDPA_SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SDPA_SIMT_ASAN 1
#endif
#endif

#if defined(SDPA_SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace sdpa::simt {

#if !defined(SDPA_SIMT_UCONTEXT)
#if defined(__clang__)
#define SDPA_SIMT_OPAQUE __attribute__((naked, noinline))
#else
// noipa: the compiler must not conclude from the body that any caller-saved register survives the call.
#define SDPA_SIMT_OPAQUE __attribute__((naked, noinline, noipa))
#endif

// Pushes what the System V ABI lets a function keep in registers, stores the stack pointer in *save, continues on
// the stack `load`. Both arguments are read in the assembly, from rdi and rsi.
SDPA_SIMT_OPAQUE inline void switch_stack(void ** /*save*/, void * /*load*/) {
  asm volatile(
      "pushq %rbp\n\t"
      "pushq %rbx\n\t"
      "pushq %r12\n\t"
      "pushq %r13\n\t"
      "pushq %r14\n\t"
      "pushq %r15\n\t"
      "movq %rsp, (%rdi)\n\t"
      "movq %rsi, %rsp\n\t"
      "popq %r15\n\t"
      "popq %r14\n\t"
      "popq %r13\n\t"
      "popq %r12\n\t"
      "popq %rbx\n\t"
      "popq %rbp\n\t"
      "ret");
}
#undef SDPA_SIMT_OPAQUE
#endif

class Fiber {
 public:
#if defined(SDPA_SIMT_ASAN)
  static constexpr size_t kStackBytes = size_t(1) << 20;  // redzones make frames several times larger
#else
  static constexpr size_t kStackBytes = size_t(1) << 18;
#endif

  // The running OS thread's own stack; its place is stored when something is switched to.
  Fiber() = default;

  // Pages are committed by the system when they are touched. Throws std::bad_alloc.
  explicit Fiber(size_t stack_bytes) : stack_bytes_(stack_bytes), guard_bytes_(size_t(sysconf(_SC_PAGESIZE))) {
    void *const pages = mmap(nullptr, guard_bytes_ + stack_bytes_, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    stack_ = static_cast<char *>(pages) + guard_bytes_;
    if (mprotect(pages, guard_bytes_, PROT_NONE) != 0) {
      release();
      throw std::bad_alloc();
    }
  }

  Fiber(Fiber &&other) noexcept { *this = static_cast<Fiber &&>(other); }
  Fiber &operator=(Fiber &&other) noexcept {
    if (this == &other) return *this;
    release();
    stack_ = other.stack_;
    stack_bytes_ = other.stack_bytes_;
    guard_bytes_ = other.guard_bytes_;
    other.guard_bytes_ = 0;
    return *this;
  }
  ~Fiber() { release(); }

  // Makes the next switch to this fiber call entry() on an empty stack, whatever it was doing before. `colour` moves
  // the top of the stack by some cache lines, so that the fibers of a warp do not compete for the same cache sets.
  void prepare(void (*entry)(), int colour) {
    char *const top = stack_ + stack_bytes_ - size_t(colour % 32) * 192;
#if defined(SDPA_SIMT_UCONTEXT)
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = size_t(top - stack_);
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#else
    void **slot = reinterpret_cast<void **>(top);
    *--slot = nullptr;  // entry's return address: it has none
    *--slot = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; ++i) *--slot = nullptr;
    stack_pointer_ = slot;
#endif
  }

  // Forgets a fiber that stopped half-way and will never be resumed. Destructors of its frames do not run.
  // `main` is the running fiber.
  void abandon(Fiber &main);

  // The first thing that entry() does. `main` is the fiber that started this one if that was the OS thread's own
  // stack, whose bounds only become known here; null otherwise.
  static void entered(Fiber *main) {
#if defined(SDPA_SIMT_ASAN)
    const void *bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
    if (main != nullptr) {
      main->stack_ = const_cast<char *>(static_cast<const char *>(bottom));
      main->stack_bytes_ = bytes;
    }
#else
    (void)main;
#endif
  }

  // Its lowest usable byte, and how many there are; null for an OS thread's own.
  const char *stack() const { return stack_; }
  size_t stack_bytes() const { return stack_bytes_; }

  friend void switch_fiber(Fiber &from, Fiber &to, bool from_is_done);

 private:
  void release() {
    if (guard_bytes_ != 0) munmap(stack_ - guard_bytes_, guard_bytes_ + stack_bytes_);
    guard_bytes_ = 0;
  }

  char *stack_ = nullptr;  // lowest usable byte
  size_t stack_bytes_ = 0;
  size_t guard_bytes_ = 0;  // 0: the stack is not ours
#if defined(SDPA_SIMT_UCONTEXT)
  ucontext_t context_;
#else
  void *stack_pointer_ = nullptr;
#endif
#if defined(SDPA_SIMT_ASAN)
  void *fake_stack_ = nullptr;
#endif
};

// Returns when something switches to `from`; never, when `from_is_done`.
inline void switch_fiber(Fiber &from, Fiber &to, bool from_is_done = false) {
#if defined(SDPA_SIMT_ASAN)
  __sanitizer_start_switch_fiber(from_is_done ? nullptr : &from.fake_stack_, to.stack_, to.stack_bytes_);
#else
  (void)from_is_done;
#endif
#if defined(SDPA_SIMT_UCONTEXT)
  swapcontext(&from.context_, &to.context_);
#else
  switch_stack(&from.stack_pointer_, to.stack_pointer_);
#endif
#if defined(SDPA_SIMT_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack_, nullptr, nullptr);
  from.fake_stack_ = nullptr;
#endif
}

#if defined(SDPA_SIMT_ASAN)
// Pretends to enter the fiber and to leave it for good, which frees its fake stack, and clears its stack's redzones.
__attribute__((no_sanitize_address)) inline void Fiber::abandon(Fiber &main) {
  if (fake_stack_ != nullptr) {
    __sanitizer_start_switch_fiber(&main.fake_stack_, stack_, stack_bytes_);
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
    __sanitizer_start_switch_fiber(nullptr, main.stack_, main.stack_bytes_);
    __sanitizer_finish_switch_fiber(main.fake_stack_, nullptr, nullptr);
    fake_stack_ = nullptr;
  }
  ASAN_UNPOISON_MEMORY_REGION(stack_, stack_bytes_);
}
#else
inline void Fiber::abandon(Fiber &) {}
#endif

}  // namespace sdpa::simt
