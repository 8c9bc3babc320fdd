// Launches on the host target: spreads the blocks of a grid over OS threads.
//
// Blocks, or clusters of two, are handed out in ascending order to the calling thread and, for grids of more than one block, to helpers
// that live as long as the launch. What a block computes does not depend on the number of helpers, nor does the
// error: when blocks fail, the launch reports the failed block with the lowest index. Fiber stacks are kept for
// later launches. When the environment variable SDPA_CUTLASS_HOST_STATISTICS names a file, every launch appends a line
// with its kernel's bank conflicts to it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "sdpa/arch/simt/block.hpp"
#include "sdpa/arch/simt/observed.hpp"
#include "sdpa/registry.hpp"

namespace sdpa::simt {

// Process-wide. A launch reads them once, when it starts.
struct Settings {
  std::atomic<uint64_t> seed{0};
  std::atomic<int> num_threads{0};
};
inline Settings settings;

// seed: of the schedule (schedule.hpp), 0 for program order. num_threads: OS threads that run blocks, 0 or less for
// one per processor.
inline void configure(uint64_t seed, int num_threads) {
  settings.seed.store(seed);
  settings.num_threads.store(std::max(num_threads, 0));
}

namespace detail {

// Blocks whose fiber stacks wait for their next use.
class BlockPool {
 public:
  std::unique_ptr<Block> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Block>();
    std::unique_ptr<Block> block = std::move(idle_.back());
    idle_.pop_back();
    return block;
  }

  void give_back(std::unique_ptr<Block> block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(block));
  }

  static BlockPool &instance() {
    static BlockPool pool;
    return pool;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Block>> idle_;
};

// One launch, shared by the OS threads that work on it.
class Grid {
 public:
  Grid(const KernelCall &call, int64_t num_blocks) : call_(call), num_blocks_(num_blocks), failed_block_(num_blocks) {}

  // Runs blocks until none is left or one has failed.
  void work() {
    BankCounts counts;
    try {
      std::unique_ptr<Block> block = BlockPool::instance().take();
      std::unique_ptr<Block> peer = call_.cluster == 1 ? nullptr : BlockPool::instance().take();
      while (failed_block_.load() == num_blocks_) {
        const int64_t index = next_block_.fetch_add(call_.cluster);
        if (index >= num_blocks_) break;
        if (!block->run(call_, index, peer.get())) report(index, block->error());
        counts += block->bank_conflicts().counts();
        if (peer != nullptr) counts += peer->bank_conflicts().counts();
      }
      BlockPool::instance().give_back(std::move(block));
      if (peer != nullptr) BlockPool::instance().give_back(std::move(peer));
    } catch (const std::bad_alloc &) {
      report(-1, "out of memory for fiber stacks or shared memory");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_ += counts;
  }

  // One line of JSON: what all blocks have counted.
  void write_statistics(const char *path) const {
    std::FILE *const file = std::fopen(path, "a");
    if (file == nullptr) return;
    std::fprintf(file,
                 "{\"kernel\": \"%s\", \"blocks\": %lld, \"ldmatrix\": %lld, \"ldmatrix_conflicts\": %lld, "
                 "\"cp_async\": %lld, \"cp_async_conflicts\": %lld, \"plain\": %lld, \"plain_conflicts\": %lld}\n",
                 call_.name, static_cast<long long>(num_blocks_), static_cast<long long>(counts_.ldmatrix),
                 static_cast<long long>(counts_.ldmatrix_conflicts), static_cast<long long>(counts_.cp_async),
                 static_cast<long long>(counts_.cp_async_conflicts), static_cast<long long>(counts_.plain),
                 static_cast<long long>(counts_.plain_conflicts));
    std::fclose(file);
  }

  Status status() const {
    return failed_block_.load() == num_blocks_ ? Status{} : make_status(SDPA_HOST_CHECK, "%s", error_);
  }

 private:
  void report(int64_t index, const char *error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (index >= failed_block_.load()) return;
    failed_block_.store(index);
    std::snprintf(error_, sizeof(error_), "%s", error);
  }

  const KernelCall &call_;
  const int64_t num_blocks_;
  std::atomic<int64_t> next_block_{0};
  std::atomic<int64_t> failed_block_;  // num_blocks_: none
  std::mutex mutex_;
  BankCounts counts_;
  char error_[kMessageBytes] = {};
};

inline int num_workers(int64_t num_blocks, int threads_per_block) {
  constexpr int kMaxFibers = 1 << 14;  // each takes two of the 65530 mappings that Linux gives a process by default
  int workers = settings.num_threads.load();
  if (workers == 0) workers = std::max(1, int(std::thread::hardware_concurrency()));
  return int(std::min<int64_t>({workers, num_blocks, std::max(1, kMaxFibers / threads_per_block)}));
}

inline Status run_grid(const KernelCall &call, int64_t num_blocks) {
  if (num_blocks < 1 || num_blocks > INT32_MAX) {
    return make_status(SDPA_INVALID_ARGUMENT, "kernel %s: a grid of %lld blocks", call.name,
                       static_cast<long long>(num_blocks));
  }
  if (call.threads < 1 || call.threads > kMaxThreads || call.smem_bytes < 0) {
    return make_status(SDPA_INVALID_ARGUMENT, "kernel %s: a block of %d threads and %d bytes of shared memory",
                       call.name, call.threads, call.smem_bytes);
  }
  if (call.cluster < 1 || call.cluster > 2 || num_blocks % call.cluster != 0) {
    return make_status(SDPA_INVALID_ARGUMENT, "kernel %s: %lld blocks in clusters of %d", call.name,
                       static_cast<long long>(num_blocks), call.cluster);
  }
  Grid grid(call, num_blocks);
  std::vector<std::thread> helpers;
  try {
    for (int i = num_workers(num_blocks / call.cluster, call.threads * call.cluster); i > 1; --i)
      helpers.emplace_back([&grid] { grid.work(); });
  } catch (const std::exception &) {
    // Fewer helpers then; the calling thread always works.
  }
  grid.work();
  for (std::thread &helper : helpers) helper.join();
  const char *const statistics = std::getenv("SDPA_CUTLASS_HOST_STATISTICS");
  if (statistics != nullptr && statistics[0] != '\0') grid.write_statistics(statistics);
  return grid.status();
}

}  // namespace detail

// Runs `kernel(params)` in every thread of every block and returns when all are done. SDPA_INVALID_ARGUMENT for an
// impossible grid or block; SDPA_HOST_CHECK when the kernel broke a rule of the machine model.
template <class Params>
Status launch(void (*kernel)(Params), const char *name, int64_t grid, int threads, int smem_bytes, const Params &params,
              int smem_alignment = SharedMemory::kAlignment, int cluster = 1) {
  struct Closure {
    void (*kernel)(Params);
    const Params *params;
  };
  const Closure closure{kernel, &params};
  KernelCall call;
  call.name = name;
  call.run = [](const void *erased) {
    const Closure &typed = *static_cast<const Closure *>(erased);
    typed.kernel(*typed.params);
  };
  call.closure = &closure;
  call.threads = threads;
  call.smem_bytes = smem_bytes;
  call.seed = settings.seed.load();
  call.smem_alignment = smem_alignment;
  call.cluster = cluster;
  return detail::run_grid(call, grid);
}

}  // namespace sdpa::simt
