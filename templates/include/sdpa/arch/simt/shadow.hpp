// The shadow of a block's shared memory: who accessed each grain last, and whether barriers lie in between.
//
// Every warp counts epochs: syncwarp and barriers end one. `known_[w][v]` is the last epoch of warp v that lies before
// everything that warp w does now; a barrier joins what its warps know. An access is ordered behind an earlier one when
// both are the same thread's or when the other warp's epoch is known (Flanagan and Freund, "FastTrack", 2009, with one
// clock a warp). This depends on the barriers alone: a missing one is found in every schedule that makes both
// accesses, seed 0 included.
//
// A cp.async is a write that lasts from its issue to the wait of its thread that covers its group: nobody, the thread
// itself included, may touch the grain meanwhile, and others need a barrier behind the wait.
// mma, ldmatrix, shuffles and votes order nothing, as in PTX.
//
// cp.async and ldmatrix are always seen. Plain loads and stores of a kernel are seen in observed builds only
// (observed.hpp); then the grain is 4 bytes instead of 16, and reading what nobody wrote is an error as well.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sdpa/arch/simt/places.hpp"

namespace sdpa::simt {

enum class AccessKind : uint8_t { kNone, kLoad, kStore, kLdmatrix, kCpAsync };

inline const char *verb(AccessKind kind) {
  constexpr const char *kVerbs[] = {"nothing", "a load reads", "a store writes", "ldmatrix reads for its warp",
                                    "cp.async writes"};
  return kVerbs[int(kind)];
}

struct Access {
  AccessKind kind = AccessKind::kNone;
  bool is_pending = false;  // a cp.async that no wait has covered yet
  bool is_by_warp = false;  // several lanes, or a collective
  uint8_t site = 0;         // the last call into the machine that the thread made before
  uint16_t chain = 0;       // the calls that led here
  uint16_t thread = 0;
  uint32_t epoch = 0;  // of the thread's warp, from 1 on; of the wait, for a cp.async
};

class Shadow {
 public:
  static constexpr int kGrainBytes = kIsObserved ? 4 : 16;
  static constexpr int kMaxWarps = 32;

  // What an access collides with; `is_unwritten`: it reads what nobody wrote.
  struct Race {
    bool found = false;
    bool is_unwritten = false;
    size_t offset = 0;
    Access earlier;
  };

  // Throws std::bad_alloc.
  void reset(int bytes, int num_warps) {
    const size_t grains = (size_t(bytes) + kGrainBytes - 1) / kGrainBytes;
    num_warps_ = size_t(num_warps);
    writes_.assign(grains, Access());
    reads_.assign(grains * num_warps_, Access());
    epochs_.fill(1);
    for (auto &known : known_) known.fill(0);
  }

  void sync_warp(int warp) {
    known_[size_t(warp)][size_t(warp)] = epochs_[size_t(warp)];
    ++epochs_[size_t(warp)];
  }

  // The warps whose bits are set meet at a barrier.
  void sync_warps(uint32_t warps) {
    std::array<uint32_t, kMaxWarps> joined = {};
    for_each_bit(warps, [&](size_t w) {
      sync_warp(int(w));
      for (size_t v = 0; v < num_warps_; ++v) joined[v] = joined[v] < known_[w][v] ? known_[w][v] : joined[v];
    });
    for_each_bit(warps, [&](size_t w) { known_[w] = joined; });
  }

  uint32_t epoch(int thread) const { return epochs_[size_t(thread) / 32]; }

  // Whether what `earlier` did in this epoch of its warp lies before what `thread` does now.
  bool is_before(int earlier, uint32_t epoch, int thread) const {
    return earlier == thread || epoch <= known_[size_t(thread) / 32][size_t(earlier) / 32];
  }

  // `bytes` at `offset`, all of them inside.
  Race read(size_t offset, size_t bytes, AccessKind kind, int thread, Place place) {
    const size_t warp = size_t(thread) / 32;
    const bool is_by_warp = kind == AccessKind::kLdmatrix;
    for (size_t grain = offset / kGrainBytes; grain * kGrainBytes < offset + bytes; ++grain) {
      const Access &write = writes_[grain];
      if (write.kind == AccessKind::kNone) {
        if (kIsObserved) return {true, true, grain * kGrainBytes, write};
      } else if (write.is_pending || !is_ordered(write, warp, thread, is_by_warp)) {
        return {true, false, grain * kGrainBytes, write};
      }
      Access &read = reads_[grain * num_warps_ + warp];
      const bool is_shared = read.epoch == epochs_[warp] && (read.is_by_warp || read.thread != thread);
      read = {kind, false, is_by_warp || is_shared, place.site, place.chain, uint16_t(thread), epochs_[warp]};
    }
    return {};
  }

  Race write(size_t offset, size_t bytes, AccessKind kind, int thread, Place place) {
    const size_t warp = size_t(thread) / 32;
    for (size_t grain = offset / kGrainBytes; grain * kGrainBytes < offset + bytes; ++grain) {
      Access &write = writes_[grain];
      if (write.is_pending || !is_ordered(write, warp, thread, false)) {
        return {true, false, grain * kGrainBytes, write};
      }
      for (size_t w = 0; w < num_warps_; ++w) {
        Access &read = reads_[grain * num_warps_ + w];
        if (!is_ordered(read, warp, thread, false)) return {true, false, grain * kGrainBytes, read};
        read.kind = AccessKind::kNone;
      }
      write = {kind, kind == AccessKind::kCpAsync, false, place.site, place.chain, uint16_t(thread), epochs_[warp]};
    }
    return {};
  }

  // A wait of `thread` covers its cp.async of `bytes` at `offset`.
  void complete(size_t offset, size_t bytes, int thread) {
    for (size_t grain = offset / kGrainBytes; grain * kGrainBytes < offset + bytes; ++grain) {
      writes_[grain].is_pending = false;
      writes_[grain].epoch = epochs_[size_t(thread) / 32];
    }
  }

 private:
  // Whether `earlier` lies before what `thread` of `warp` does now; with for_warp, before what all its lanes do.
  bool is_ordered(const Access &earlier, size_t warp, int thread, bool for_warp) const {
    if (earlier.kind == AccessKind::kNone) return true;
    if (earlier.thread == thread && !earlier.is_by_warp && !for_warp) return true;
    return earlier.epoch <= known_[warp][earlier.thread / 32];
  }

  template <class Body>
  static void for_each_bit(uint32_t bits, const Body &body) {
    for (; bits != 0; bits &= bits - 1) body(size_t(__builtin_ctz(bits)));
  }

  size_t num_warps_ = 0;
  std::vector<Access> writes_;  // [grain]: the last one
  std::vector<Access> reads_;   // [grain][warp]: the last one since then
  std::array<uint32_t, kMaxWarps> epochs_ = {};
  std::array<std::array<uint32_t, kMaxWarps>, kMaxWarps> known_ = {};
};

}  // namespace sdpa::simt
