// Places in a kernel's source, for messages: the calls into the machine that a thread makes, in every build (Sites),
// and the calls that led to an access of shared memory (CallChains), where build_kind.hpp says so.
//
// A call chain is what the frame pointers of the running fiber lead to. Messages show it as offsets into the library,
// innermost first: @1a2b3c<4d5e6f. tests/source_lines.py turns these into file:line when there is debug information.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "sdpa/arch/simt/build_kind.hpp"

// The start of the program or library that this is linked into: the linker defines it.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));

namespace sdpa::simt {

// Where an access was made.
struct Place {
  uint8_t site = 0;    // see Sites
  uint16_t chain = 0;  // see CallChains
};

// Calls into the machine, numbered as they are met; 0 is the kernel's start.
class Sites {
 public:
  void clear() { count_ = 1; }

  uint8_t number_of(const char *file, int line) {
    for (size_t i = 1; i < count_; ++i) {
      if (sites_[i].line == line && sites_[i].file == file) return uint8_t(i);
    }
    if (count_ == sites_.size()) return 0;
    sites_[count_] = {file, line};
    return uint8_t(count_++);
  }

  // file:line
  template <size_t kSize>
  void describe(uint8_t number, char (&text)[kSize]) const {
    const Site &site = sites_[number];
    const char *const slash = std::strrchr(site.file, '/');
    std::snprintf(text, kSize, number == 0 ? "%s" : "%s:%d", slash ? slash + 1 : site.file, site.line);
  }

 private:
  struct Site {
    const char *file;
    int line;
  };

  std::array<Site, 256> sites_ = {{{"the kernel's start", 0}}};
  size_t count_ = 1;
};

// Call chains, numbered as they are met; 0 is one that is not known. They stay valid from launch to launch.
class CallChains {
 public:
  // `frame`: a frame's saved pointer to its caller's frame, with the return address above it; [stack, stack + bytes):
  // where frames may lie.
  SDPA_SIMT_UNOBSERVED __attribute__((noinline, no_sanitize_address)) uint16_t number_of(const void *frame,
                                                                                         const char *stack,
                                                                                         size_t bytes) {
    Chain chain;
    uint32_t hash = 0;
    while (chain.size < kDepth) {
      const uintptr_t offset = reinterpret_cast<uintptr_t>(frame) - reinterpret_cast<uintptr_t>(stack);
      if (offset % sizeof(void *) != 0 || offset >= bytes || bytes - offset < 2 * sizeof(void *)) break;
      const void *const *const words = static_cast<const void *const *>(frame);
      if (words[1] == nullptr) break;
      const uint32_t address =
          uint32_t(reinterpret_cast<uintptr_t>(words[1]) - reinterpret_cast<uintptr_t>(&__ehdr_start));
      chain.returns_to[chain.size++] = address;
      hash = (hash ^ address) * 0x9e3779b1u;
      if (words[0] <= frame) break;
      frame = words[0];
    }
    return chain.size == 0 ? 0 : find(chain, hash);
  }

  // " at @offset<offset": where each call returns to. Empty for a chain that is not known.
  template <size_t kSize>
  void describe(uint16_t number, char (&text)[kSize]) const {
    text[0] = '\0';
    if (number == 0) return;
    const Chain &chain = chains_[number - 1u];
    int length = 0;
    for (uint32_t i = 0; i < chain.size && length < int(kSize); ++i) {
      length += std::snprintf(text + length, kSize - size_t(length), i == 0 ? " at @%x" : "<%x", chain.returns_to[i]);
    }
  }

 private:
  static constexpr uint32_t kDepth = 10;
  static constexpr size_t kSlots = 1 << 12;

  struct Chain {
    uint32_t size = 0;
    uint32_t returns_to[kDepth];

    SDPA_SIMT_UNOBSERVED bool operator==(const Chain &other) const {
      return size == other.size && std::memcmp(returns_to, other.returns_to, size * sizeof(returns_to[0])) == 0;
    }
  };

  // By open addressing; a quarter of the slots stays free.
  SDPA_SIMT_UNOBSERVED uint16_t find(const Chain &chain, uint32_t hash) {
    slots_.resize(kSlots);
    for (size_t slot = hash >> 20;; slot = (slot + 1) % kSlots) {
      if (slots_[slot] == 0) {
        if (chains_.size() == kSlots * 3 / 4) return 0;
        chains_.push_back(chain);
        return slots_[slot] = uint16_t(chains_.size());
      }
      if (chains_[slots_[slot] - 1u] == chain) return slots_[slot];
    }
  }

  std::vector<Chain> chains_;
  std::vector<uint16_t> slots_;  // numbers, or 0
};

}  // namespace sdpa::simt
