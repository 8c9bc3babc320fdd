// The dynamic shared memory of one block: poisoned before the block starts, guarded at both ends.
//
// Every byte starts as 0xFF, a NaN in fp16, bf16 and fp32, so what a kernel reads before it was written shows in the
// result. The first byte lies on a multiple of the alignment, 128 unless a kernel asks for more, and of nothing else. A zone on either side holds the same bytes: a
// read beyond the end gives NaNs, a write is found when the block is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sdpa::simt {

class SharedMemory {
 public:
  static constexpr int kPoison = 0xFF;

  static constexpr size_t kAlignment = 128;

  // `alignment` is a power of two, at least kAlignment. Throws std::bad_alloc.
  void reset(int bytes, size_t alignment = kAlignment) {
    bytes_ = size_t(bytes);
    storage_.assign(3 * alignment + bytes_ + kGuardBytes, static_cast<unsigned char>(kPoison));
    const uintptr_t storage = reinterpret_cast<uintptr_t>(storage_.data());
    const uintptr_t even = (storage + 2 * alignment - 1) / (2 * alignment) * (2 * alignment);
    begin_ = storage_.data() + (even + alignment - storage);
  }

  char *data() const { return reinterpret_cast<char *>(begin_); }

  bool contains(const void *address, size_t bytes) const {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(begin_);
    return offset <= bytes_ && bytes <= bytes_ - offset;
  }

  // Of an address inside.
  size_t offset(const void *address) const { return size_t(static_cast<const unsigned char *>(address) - begin_); }

  bool guards_intact() const {
    for (size_t i = 0; i < kGuardBytes; ++i) {
      if (begin_[bytes_ + i] != kPoison || *(begin_ - 1 - i) != kPoison) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuardBytes = 128;
  static_assert(kGuardBytes <= kAlignment, "the guard in front lies in the alignment's gap");

  std::vector<unsigned char> storage_;
  unsigned char *begin_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace sdpa::simt
