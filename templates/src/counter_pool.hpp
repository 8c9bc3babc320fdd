// Which counters the CTAs of a split kernel meet at: one set for each stream, and for each stream of each captured
// graph, on one device. The memory is the device's and is made in chunks by `make_chunk`; this file knows no CUDA.
//
// Sets are never taken back. Work of a stream that was destroyed may still run, and a graph may be replayed at any
// time, so neither can say when its set is free. Streams are told apart by ids that no two streams of the process
// share, so a later stream does not inherit the set of an earlier one. What that may cost is bounded: when kMaxChunks
// are handed out, or memory is short, `find` gives null, and the caller has to bring counters of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "sdpa/c_api.h"

namespace sdpa {

// A stream's id and 0; or while a capture goes on in it, its handle and the capture's id + 1.
using CounterUser = std::pair<uint64_t, uint64_t>;

class CounterPool {
 public:
  static constexpr size_t kSetBytes = SDPA_MAX_SPLIT_TILES * sizeof(uint32_t);
  static constexpr size_t kSetsPerChunk = 256;
  static constexpr size_t kMaxChunks = 16;
  static constexpr size_t kChunkBytes = kSetsPerChunk * kSetBytes;

  // Gives kChunkBytes of zeros that are there before it returns, or null.
  using MakeChunk = uint32_t *(*)();

  // Makes the first chunk, unless there is one or memory is short.
  void reserve(MakeChunk make_chunk) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_chunks_ == 0) add_chunk(make_chunk);
  }

  // The counters of `user`, always the same; or null, when all are taken or memory is short.
  uint32_t *find(const CounterUser &user, MakeChunk make_chunk) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = sets_.find(user);
    if (known != sets_.end()) return known->second;
    if (num_unused_ == 0 && !add_chunk(make_chunk)) return nullptr;
    uint32_t *const counters = unused_;
    sets_.emplace(user, counters);
    unused_ += SDPA_MAX_SPLIT_TILES;
    --num_unused_;
    return counters;
  }

 private:
  bool add_chunk(MakeChunk make_chunk) {
    if (num_chunks_ == kMaxChunks) return false;
    uint32_t *const chunk = make_chunk();
    if (chunk == nullptr) return false;
    unused_ = chunk;
    num_unused_ = kSetsPerChunk;
    ++num_chunks_;
    return true;
  }

  std::mutex mutex_;
  std::map<CounterUser, uint32_t *> sets_;
  uint32_t *unused_ = nullptr;
  size_t num_unused_ = 0;
  size_t num_chunks_ = 0;
};

}  // namespace sdpa
