// cp.async of one thread, as asynchronous as PTX allows it to be.
//
// A copy poisons its destination when it is issued and moves its bytes only when a wait covers its group: reading too
// early gives NaNs, and writing over data that another warp still reads spoils it. Groups follow PTX: commit closes
// the group of all copies issued since the last commit, even an empty one; wait(n) returns when at most the n
// youngest groups are pending. Copies that are not committed are not covered by any wait, wait(0) included.
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

#include "sdpa/arch/simt/shadow.hpp"
#include "sdpa/arch/simt/shared_memory.hpp"

namespace sdpa::simt {

class CpAsyncQueue {
 public:
  static constexpr size_t kBytes = 16;

  void clear() {
    copies_.clear();
    groups_.clear();
    num_uncommitted_ = 0;
  }

  // Without `load` the destination becomes zero and the source is never read.
  SDPA_SIMT_UNOBSERVED void issue(void *destination, const void *source, bool load) {
    std::memset(destination, SharedMemory::kPoison, kBytes);
    copies_.push_back({destination, load ? source : nullptr});
    ++num_uncommitted_;
  }

  void commit() {
    groups_.push_back(num_uncommitted_);
    num_uncommitted_ = 0;
  }

  // completed(destination) is called for every copy that landed.
  template <class Completed>
  void wait(size_t num_pending, const Completed &completed) {
    if (groups_.size() <= num_pending) return;
    const size_t num_groups = groups_.size() - num_pending;
    size_t num_copies = 0;
    for (size_t i = 0; i < num_groups; ++i) num_copies += groups_[i];
    for (size_t i = 0; i < num_copies; ++i) {
      complete(copies_[i]);
      completed(copies_[i].destination);
    }
    copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(num_copies));
    groups_.erase(groups_.begin(), groups_.begin() + static_cast<std::ptrdiff_t>(num_groups));
  }

  size_t num_uncommitted() const { return num_uncommitted_; }
  size_t num_unwaited() const { return copies_.size() - num_uncommitted_; }

 private:
  struct Copy {
    void *destination;
    const void *source;  // null: zero fill
  };

  SDPA_SIMT_UNOBSERVED static void complete(const Copy &copy) {
    if (copy.source != nullptr) {
      std::memcpy(copy.destination, copy.source, kBytes);
    } else {
      std::memset(copy.destination, 0, kBytes);
    }
  }

  std::vector<Copy> copies_;    // pending, oldest first; the last num_uncommitted_ belong to no group yet
  std::vector<size_t> groups_;  // copies in each pending group, oldest first
  size_t num_uncommitted_ = 0;
};

}  // namespace sdpa::simt
