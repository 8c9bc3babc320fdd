// Bank conflicts of ldmatrix and cp.async, counted exactly: how many extra passes the banks need.
//
// Shared memory has 32 banks of 4 bytes, so one pass moves 128 bytes: the eight 16-byte rows of one matrix of an
// ldmatrix, or the 16-byte copies of eight neighbouring lanes. Rows whose addresses agree in bits 4 to 6 and are not
// the same address share banks, and each of them beyond the first costs one more pass.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace sdpa::simt {

struct BankCounts {
  int64_t ldmatrix = 0;  // passes without conflicts: four an instruction
  int64_t ldmatrix_conflicts = 0;
  int64_t cp_async = 0;  // passes without conflicts: four a warp
  int64_t cp_async_conflicts = 0;

  BankCounts &operator+=(const BankCounts &other) {
    ldmatrix += other.ldmatrix;
    ldmatrix_conflicts += other.ldmatrix_conflicts;
    cp_async += other.cp_async;
    cp_async_conflicts += other.cp_async_conflicts;
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

  // The lanes of a warp have met: what each has issued is complete.
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

 private:
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
};

}  // namespace sdpa::simt
