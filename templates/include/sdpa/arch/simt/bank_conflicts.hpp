// Bank conflicts, counted exactly: how many extra passes the banks need. Those of ldmatrix and cp.async in every build,
// those of plain loads and stores in observed ones (observed.hpp).
//
// Shared memory has 32 banks of 4 bytes, so one pass moves 128 bytes: the eight 16-byte rows of one matrix of an
// ldmatrix, or the 16-byte copies of eight neighbouring lanes. Rows whose addresses agree in bits 4 to 6 and are not
// the same address share banks, and each of them beyond the first costs one more pass.
// A plain access of 16 bytes a lane takes a pass for each 8 neighbouring lanes, of 8 bytes for 16, of less for 32; lanes
// that want different words of one bank cost more passes, lanes that want the same word none. One instruction are the
// n-th accesses of a warp's lanes at one place in the code since the warp last met: that presumes that lanes which skip
// an access in a loop skip it from then on, as a bound does.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "sdpa/arch/simt/build_kind.hpp"

namespace sdpa::simt {

struct BankCounts {
  int64_t ldmatrix = 0;  // passes without conflicts: four an instruction
  int64_t ldmatrix_conflicts = 0;
  int64_t cp_async = 0;  // passes without conflicts: four a warp
  int64_t cp_async_conflicts = 0;
  int64_t plain = 0;  // passes without conflicts: one, two or four an instruction
  int64_t plain_conflicts = 0;

  BankCounts &operator+=(const BankCounts &other) {
    ldmatrix += other.ldmatrix;
    ldmatrix_conflicts += other.ldmatrix_conflicts;
    cp_async += other.cp_async;
    cp_async_conflicts += other.cp_async_conflicts;
    plain += other.plain;
    plain_conflicts += other.plain_conflicts;
    return *this;
  }
};

class BankConflicts {
 public:
  static constexpr int kRows = 8;  // of 16 bytes, in one pass

  // Throws std::bad_alloc.
  void start(const char *shared_memory, int num_warps) {
    base_ = shared_memory;
    counts_ = {};
    copies_.resize(size_t(num_warps) * 32);
    for (auto &lane : copies_) lane.clear();
    is_pending_.fill(false);
    plain_.resize(size_t(num_warps));
    for (auto &warp : plain_) warp.clear();
  }

  const BankCounts &counts() const { return counts_; }

  // The 32 rows that the lanes of a warp point to.
  void add_ldmatrix(const void *const (&rows)[32]) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      uint32_t offsets[kRows];
      for (int row = 0; row < kRows; ++row) offsets[row] = offset(rows[kRows * matrix + row]);
      counts_.ldmatrix += 1;
      counts_.ldmatrix_conflicts += extra_passes(offsets, kRows);
    }
  }

  // One lane's copy: the n-th of each lane since the warp last met belong to one instruction.
  void add_cp_async(int thread, const void *destination) {
    copies_[size_t(thread)].push_back(offset(destination));
    is_pending_[size_t(thread) / 32] = true;
  }

  // One lane's load or store of 1 to 16 bytes, at a place in the code.
  void add_plain(int thread, const void *place, const void *address, size_t bytes) {
    plain_[size_t(thread) / 32].push_back({place, offset(address), uint8_t(bytes), uint8_t(thread % 32), 0});
  }

  // The lanes of a warp have met: what each has issued is complete.
  void count(int warp) {
    count_cp_async(warp);
    if (kIsObserved && !plain_[size_t(warp)].empty()) count_plain(plain_[size_t(warp)]);
  }

 private:
  struct Plain {
    const void *place;
    uint32_t offset;
    uint8_t bytes;
    uint8_t lane;
    uint32_t n;  // of this lane at this place
  };

  void count_cp_async(int warp) {
    if (!is_pending_[size_t(warp)]) return;
    is_pending_[size_t(warp)] = false;
    std::vector<uint32_t> *const lanes = &copies_[size_t(warp) * 32];
    for (int first = 0; first < 32; first += kRows) {
      for (size_t n = 0;; ++n) {
        uint32_t offsets[kRows];
        int count = 0;
        for (int lane = first; lane < first + kRows; ++lane) {
          if (n < lanes[lane].size()) offsets[count++] = lanes[lane][n];
        }
        if (count == 0) break;
        counts_.cp_async += 1;
        counts_.cp_async_conflicts += extra_passes(offsets, count);
      }
      for (int lane = first; lane < first + kRows; ++lane) lanes[lane].clear();
    }
  }

  void count_plain(std::vector<Plain> &accesses) {
    const auto key = [](const Plain &a) { return std::make_tuple(a.place, a.lane); };
    std::stable_sort(accesses.begin(), accesses.end(), [&](const Plain &a, const Plain &b) { return key(a) < key(b); });
    for (size_t i = 1; i < accesses.size(); ++i) {
      if (key(accesses[i]) == key(accesses[i - 1])) accesses[i].n = accesses[i - 1].n + 1;
    }
    // Of one pass: the same place, count and neighbouring lanes.
    const auto pass = [](const Plain &a) { return std::make_tuple(a.place, a.n, a.lane * a.bytes / 128); };
    std::stable_sort(accesses.begin(), accesses.end(),
                     [&](const Plain &a, const Plain &b) { return pass(a) < pass(b); });
    for (size_t begin = 0; begin < accesses.size();) {
      size_t end = begin;
      std::array<std::vector<uint32_t>, 32> words_in;  // [bank]
      size_t most = 1;
      for (; end < accesses.size() && pass(accesses[end]) == pass(accesses[begin]); ++end) {
        const Plain &access = accesses[end];
        for (uint32_t word = access.offset / 4; word * 4 < access.offset + access.bytes; ++word) {
          std::vector<uint32_t> &words = words_in[word % 32];
          if (std::find(words.begin(), words.end(), word) == words.end()) words.push_back(word);
          most = std::max(most, words.size());
        }
      }
      counts_.plain += 1;
      counts_.plain_conflicts += int64_t(most) - 1;
      begin = end;
    }
    accesses.clear();
  }

  uint32_t offset(const void *address) const { return uint32_t(static_cast<const char *>(address) - base_); }

  // The fullest group of banks decides.
  static int extra_passes(const uint32_t *offsets, int count) {
    int rows_in[8] = {};
    int most = 1;
    for (int i = 0; i < count; ++i) {
      bool is_new = true;
      for (int j = 0; j < i; ++j) is_new = is_new && offsets[j] != offsets[i];
      if (!is_new) continue;
      const int rows = ++rows_in[offsets[i] / 16 % 8];
      most = most < rows ? rows : most;
    }
    return most - 1;
  }

  const char *base_ = nullptr;
  BankCounts counts_;
  std::vector<std::vector<uint32_t>> copies_;  // [thread]: offsets since its warp last met
  std::array<bool, 32> is_pending_ = {};       // [warp]: whether there are any
  std::vector<std::vector<Plain>> plain_;      // [warp]: since it last met
};

}  // namespace sdpa::simt
