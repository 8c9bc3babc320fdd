// The order in which the threads of one block run, as a function of (seed, block index) and of nothing else.
//
// Seed 0 is program order: a warp runs until it waits for another one, lanes and warps in ascending order. Any other
// seed draws the next lane at random, and a block draws how eagerly it leaves a warp that could go on: never, so
// that one warp runs ahead of the others as far as the barriers let it, or at every 64th, 8th or 2nd chance, so that
// the warps interleave closely. Both ends expose missing barriers that the other end hides.
#pragma once

#include <cstdint>

namespace sdpa::simt {

class Schedule {
 public:
  void start(uint64_t seed, int64_t block) {
    in_order_ = seed == 0;
    state_ = mix(mix(seed) + uint64_t(block)) | 1;
    constexpr uint32_t kLeaveOneIn[] = {0, 64, 8, 2};
    leave_one_in_ = kLeaveOneIn[random() % 4];
  }

  bool in_order() const { return in_order_; }

  // Whether a warp that has runnable lanes gives way to another warp at this point.
  bool leaves_warp() { return !in_order_ && leave_one_in_ != 0 && random() % leave_one_in_ == 0; }

  // One of the set bits of `ready` (at least one): the next one after bit `current`, cyclically, or a random one.
  int next_lane(uint32_t ready, int current) {
    const int start = in_order_ ? current + 1 : int(random() % 32);
    const uint32_t above = start > 31 ? 0 : ready & (~0u << start);
    return __builtin_ctz(above != 0 ? above : ready);
  }

  // Where the search for a runnable warp begins.
  int first_warp(int current, int num_warps) { return in_order_ ? current : int(random() % uint32_t(num_warps)); }

 private:
  // The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }

  // xorshift64* (Vigna 2016), the upper half.
  uint32_t random() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return uint32_t((state_ * 0x2545f4914f6cdd1du) >> 32);
  }

  uint64_t state_ = 1;
  uint32_t leave_one_in_ = 0;
  bool in_order_ = true;
};

}  // namespace sdpa::simt
