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
  int phase;                 // parity of the phase that is not complete yet
  int thread = 0;            // that initialised it
  bool is_fenced = false;    // by that thread's fence_mbarrier_init
  bool is_shared = false;    // and behind a barrier of the cluster: the other CTA may use it
  bool is_observed = true;   // somebody has waited for the last complete phase
  bool is_touched = false;   // by the other CTA, in this phase
  bool was_touched = false;  // or in one before that nobody has waited for

  bool is_complete() const { return missing_arrivals == 0 && missing_bytes == 0; }
  void observe() {
    is_observed = true;
    was_touched = false;
  }
  void start_next_phase() {
    missing_arrivals = count;
    phase ^= 1;
    is_observed = false;
    was_touched |= is_touched;
    is_touched = false;
  }
};

class Mbarriers {
 public:
  void clear() { barriers_.clear(); }

  void init(size_t offset, int count, int thread) {
    Mbarrier *known = find(offset);
    if (known == nullptr) known = &barriers_.emplace_back();
    *known = {offset, count, count, 0, 0, thread};
  }

  // Null for one that was never initialised.
  Mbarrier *find(size_t offset) {
    for (Mbarrier &barrier : barriers_) {
      if (barrier.offset == offset) return &barrier;
    }
    return nullptr;
  }

  std::vector<Mbarrier>::iterator begin() { return barriers_.begin(); }
  std::vector<Mbarrier>::iterator end() { return barriers_.end(); }

 private:
  std::vector<Mbarrier> barriers_;
};

}  // namespace sdpa::simt
