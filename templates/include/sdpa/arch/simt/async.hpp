// What goes on in a block next to its threads, on sm_90: TMA copies, phases of mbarriers, wgmma of the warps, registers
// that warpgroups hand to each other. Everything happens as late as PTX allows: a load lands when no thread can run (or
// when the schedule draws it), a store reads when it is waited for, a wgmma multiplies when its group is waited for.
// Until then what they are going to write holds poison.
//
// In a cluster of two CTAs a load to both is a load of its own in each, and a thread may arrive at an mbarrier of the other
// CTA. `there` is the CTA whose shared memory and mbarriers are meant, `block` the one that runs.
//
// The rules that they can break are checked in async_rules.hpp. Not found: races of plain loads and stores that only an
// mbarrier would order, and timing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "sdpa/arch/simt/mbarrier.hpp"
#include "sdpa/arch/simt/tensor_map.hpp"
#include "sdpa/arch/simt/wgmma.hpp"

namespace sdpa::simt {

class Block;

// One instruction of one warp.
struct Wgmma {
  using Decode = void (*)(Block &block, const Wgmma &op, int first_row, WgmmaOperands &operands);
  using Multiply = void (*)(const WgmmaOperands &operands, float *acc, int n);

  Decode decode;
  Multiply multiply;
  int n;
  bool is_b_mn_major;
  bool has_a_in_registers;
  bool is_zeroed;                      // D = A B, not A B + D
  uint64_t a, b;                       // descriptors
  int accumulator;                     // of the warp's
  uint32_t lane_a[32][4];              // registers as they were when it was issued
  const uint32_t *lane_a_address[32];  // and where they are
};

// What a warp's wgmma write to. While some are in flight, the lanes' registers hold poison and the values are here.
struct WgmmaAccumulator {
  char *lanes[32];  // n / 2 registers
  int n;
  int num_pending;
  std::vector<float> tile;  // [16][n], or the bits of int32
};

struct WgmmaQueue {
  // What a lane hands over when it issues one.
  struct Operands {
    void *accumulator;
    const uint32_t *a_registers;
    uint64_t a, b;
    bool is_zeroed;
  };
  std::array<Operands, 32> lanes;
  bool is_fenced = false;
  std::vector<Wgmma> ops;      // oldest first; the last num_uncommitted belong to no group yet
  std::vector<size_t> groups;  // instructions in each pending group, oldest first
  size_t num_uncommitted = 0;
  std::vector<WgmmaAccumulator> accumulators;
  std::vector<uint64_t> issued;  // a digest of each instruction since the warpgroup's warps last agreed
};

class Async {
 public:
  void reset(int threads);

  // ---- mbarriers, for the running thread ----
  void init(Block &block, const void *barrier, int arrivals);
  void fence_inits(int thread);  // of this thread
  void share_inits();            // all CTAs of the cluster have met
  // Bytes that copies are going to complete. The barrier's address is that of the running CTA's own one.
  void arrive(Block &block, Block &there, const void *barrier, int bytes);
  void arrive(Block &block, const void *barrier, int bytes) { arrive(block, block, barrier, bytes); }
  void wait(Block &block, const void *barrier, int parity);

  // ---- TMA ----
  bool has_loads() const { return !loads_.empty(); }
  void load(Block &block, Block &there, const TensorMap &map, const void *barrier, void *smem,
            const int (&coordinates)[kMaxRank]);
  void load(Block &block, const TensorMap &map, const void *barrier, void *smem, const int (&coordinates)[kMaxRank]) {
    load(block, block, map, barrier, smem, coordinates);
  }
  void land_one(Block &block);
  void store(Block &block, const TensorMap &map, const void *smem, const int (&coordinates)[kMaxRank]);
  void commit_stores(Block &block);
  void wait_stores(Block &block, size_t num_pending);

  // ---- the two ways to shared memory: a thread's own writes are seen by copies and wgmma behind its fence ----
  void generic_write(Block &block, const void *address, size_t bytes, int thread);
  void fence(int thread) { ++fences_[static_cast<size_t>(thread)]; }

  // ---- wgmma, for a warp whose lanes have met ----
  WgmmaQueue &queue(int warp) { return queues_[static_cast<size_t>(warp)]; }
  void issue(Block &block, int warp, const Wgmma &op);
  void commit(Block &block, int warp);
  void wait(Block &block, int warp, size_t num_pending);
  const uint16_t *operand(Block &block, uint32_t shared, const char *what);

  void set_registers(Block &block, int warp, int count);

  // A thread, then the block, comes to its end.
  void check_exit(Block &block, int thread);
  void check_end(Block &block);
  void describe_waits(char *text, size_t size, const char *lead) const;

 private:
  struct Waiter {
    int thread;
    size_t barrier;
    int parity;
  };
  struct Load {
    TensorMap map;
    int coordinates[kMaxRank];
    size_t barrier, destination;
    bool is_from_other;  // CTA, which may run ahead of what this one expects
  };
  struct Store {
    TensorMap map;
    int coordinates[kMaxRank];
    size_t source;
    int thread;
    size_t group;  // of its thread
  };
  struct GenericWrite {
    int thread = -1;
    uint32_t fences = 0;  // of the thread, when it wrote
  };
  static constexpr size_t kGrainBytes = 16;

  Mbarrier &known(Block &block, Block &there, const void *barrier, const char *what);
  void complete(Block &block, Mbarrier &barrier);
  void check_bytes(Block &block, const Mbarrier &barrier);
  void check_seen(Block &block, size_t offset, size_t bytes, const char *what);
  void execute(Block &block, WgmmaQueue &queue, int warp, const Wgmma &op);

  Mbarriers barriers_;
  std::vector<Waiter> waiters_;
  std::vector<Load> loads_;
  std::vector<Store> stores_;
  std::vector<size_t> groups_;         // of stores that each thread has committed
  std::vector<uint32_t> fences_;       // of each thread
  std::vector<GenericWrite> written_;  // [grain]
  std::array<WgmmaQueue, 32> queues_;
  std::array<int, 32> registers_ = {};  // of a thread of each warp; 0: as launched
  WgmmaOperands operands_;
};

}  // namespace sdpa::simt
