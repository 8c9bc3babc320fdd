// The mbarriers of a block: a phase is complete when all arrivals and all bytes that were announced have come. Data
// only: who waits is block.hpp's business.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace sdpa::simt {

struct Mbarrier {
  size_t offset;         // in shared memory
  int count;             // arrivals of a phase
  int missing_arrivals;  // of this phase
  int64_t missing_bytes;
  int phase;  // parity of the phase that is not complete yet

  bool is_complete() const { return missing_arrivals == 0 && missing_bytes == 0; }
  void start_next_phase() {
    missing_arrivals = count;
    phase ^= 1;
  }
};

class Mbarriers {
 public:
  void clear() { barriers_.clear(); }

  void init(size_t offset, int count) {
    Mbarrier *known = find(offset);
    if (known == nullptr) known = &barriers_.emplace_back();
    *known = {offset, count, count, 0, 0};
  }

  // Null for one that was never initialised.
  Mbarrier *find(size_t offset) {
    for (Mbarrier &barrier : barriers_) {
      if (barrier.offset == offset) return &barrier;
    }
    return nullptr;
  }

 private:
  std::vector<Mbarrier> barriers_;
};

}  // namespace sdpa::simt
