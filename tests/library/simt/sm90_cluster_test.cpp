// Clusters of two CTAs: what they do to each other's shared memory and mbarriers, and that every rule of it which a kernel
// breaks is found, in every schedule.
#include "sm90_operands.hpp"

using namespace sdpa::simt;
using namespace simt_test;
using namespace simt_test::sm90;

namespace {

// Boxes of a half of B's rows.
const TensorMap &halves() {
  static const TensorMap map = kB.map(16, kN / 2);
  return map;
}
constexpr int kHalfBytes = kN / 2 * 32;

inline int rank() { return block_idx() % 2; }

template <class Body>
sdpa::Status run_clusters(int64_t clusters, int threads, const Body &body) {
  return sdpa::simt::launch(&body_kernel<Body>, "test_kernel", 2 * clusters, threads, kSmemBytes,
                            BodyParams<Body>{&body}, 1024, 2);
}

inline void arrive_at(uint64_t *at, int cta) {
  Block &there = current_block->cta(cta, "mbarrier_arrive_at");
  there.async().arrive(*current_block, there, at, 0);
}

// This CTA's half of B, to the CTAs from `first` on.
inline void load_half(uint64_t *at, int first = 0) {
  for (int cta = first; cta < 2; ++cta) {
    Block &there = current_block->cta(cta, "tma_load");
    there.async().load(*current_block, there, halves(), at, dynamic_smem() + kOffsetB + rank() * kHalfBytes,
                       {0, rank() * kN / 2, 0, 0, 0});
  }
}

// Two mbarriers: 0 is full, 1 is released by a thread of each CTA.
inline void start(bool has_fence = true, bool meets = true) {
  if (thread_idx() == 0) {
    init(barrier(), 1);
    init(barrier(1), 2);
    if (has_fence) async().fence_inits(thread_idx());
  }
  if (meets) {
    current_block->sync_cluster();
  } else {
    syncthreads();
  }
}

// `other` is what the schedule may show instead.
template <class Body>
void check_broken_by_clusters(const std::string &text, const Body &body, int threads = 64,
                              const std::string &other = {}) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    const sdpa::Status status = run_clusters(2, threads, body);
    const bool is_other = !other.empty() && std::string(status.message).find(other) != std::string::npos;
    CHECK_BROKEN_RULE(status, is_other ? other : text);
    CHECK_OK(run_clusters(1, threads, [] { start(); }));
  }
}

}  // namespace

SIMT_CASE(halves_come_to_both_ctas_of_a_cluster) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed, 2);
    int wrong = 0;
    CHECK_OK(run_clusters(5, 64, [&] {
      start();
      for (int round = 0; round < 4; ++round) {
        if (thread_idx() == 0) {
          if (round > 0) wait(barrier(1), (round - 1) % 2);
          expect(barrier(), 2 * kHalfBytes);
          load_half(barrier());
        }
        if (thread_idx() / 32 == 1) {
          wait(barrier(), round % 2);
          for (int row = thread_idx() % 32; row < kN; row += 32) {
            uint16_t first;
            const uint32_t place = swizzled(uint32_t(kOffsetB + row * 32), 32);
            std::memcpy(&first, dynamic_smem() + place, sizeof(first));
            if (first != kB.bits[size_t(row * 16)]) ++wrong;
          }
          syncwarp();
          if (thread_idx() % 32 < 2) arrive_at(barrier(1), thread_idx() % 32);
        }
      }
      if (thread_idx() == 0) wait(barrier(1), 1);
    }));
    CHECK(wrong == 0);
  }
}

SIMT_CASE(all_threads_of_a_cluster_meet) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    int arrived = 0, early = 0;
    CHECK_OK(run_clusters(1, 96, [&] {
      if (thread_idx() >= 64) return;  // who has left is not waited for
      for (int round = 1; round <= 3; ++round) {
        ++arrived;
        current_block->sync_cluster();
        if (arrived != round * 128) ++early;
        current_block->sync_cluster();
      }
    }));
    CHECK(arrived == 3 * 128 && early == 0);
  }
}

SIMT_CASE(a_cluster_is_whole) {
  const auto nothing = [] {};
  const BodyParams<decltype(nothing)> params{&nothing};
  CHECK(launch(&body_kernel<decltype(nothing)>, "test_kernel", 3, 32, 0, params, 128, 2).code == SDPA_INVALID_ARGUMENT);
  CHECK(launch(&body_kernel<decltype(nothing)>, "test_kernel", 3, 32, 0, params, 128, 3).code == SDPA_INVALID_ARGUMENT);
  CHECK_BROKEN_RULE(run_kernel(1, 32, kSmemBytes, [] { arrive_at(barrier(), 1); }), "a cluster of 1 has no CTA 1");
}

SIMT_CASE(the_other_cta_has_initialised_its_mbarriers) {
  const auto arrives = [](bool has_fence, bool meets) {
    return [=] {
      start(has_fence, meets);
      if (thread_idx() == 0) arrive_at(barrier(1), 1 - rank());
      if (thread_idx() == 0) arrive_at(barrier(1), rank());
      if (thread_idx() == 0) wait(barrier(1), 0);
    };
  };
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_clusters(1, 64, arrives(true, true)));
    CHECK_BROKEN_RULE(run_clusters(1, 64, arrives(true, false)), "of the cluster's other CTA was ");
  }
  check_broken_by_clusters("no fence_mbarrier_init lies in between", arrives(false, true));
}

SIMT_CASE(a_load_to_the_other_cta_finds_its_mbarrier) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_BROKEN_RULE(run_clusters(1, 64,
                                   [] {
                                     start(true, false);
                                     if (thread_idx() != 0) return;
                                     expect(barrier(), 2 * kHalfBytes);
                                     load_half(barrier());
                                     wait(barrier(), 0);
                                   }),
                      "of the cluster's other CTA was ");
  }
}

SIMT_CASE(a_cta_does_not_exit_before_the_last_arrival) {
  check_broken_by_clusters(
      "is gone, because that CTA has exited",
      [] {
        start();
        if (thread_idx() == 0) arrive_at(barrier(1), 1 - rank());
      },
      64, "nobody has waited for what its cluster's other CTA did");
}

SIMT_CASE(a_cta_does_not_exit_before_the_last_load) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    const sdpa::Status status = run_clusters(1, 64, [] {
      start();
      if (thread_idx() != 0 || rank() == 0) return;
      expect(barrier(), kHalfBytes);
      load_half(barrier());
      wait(barrier(), 0);
    });
    const std::string message = status.message;
    CHECK(status.code == SDPA_HOST_CHECK);
    CHECK(message.find("that CTA has exited") != std::string::npos ||
          message.find("the block ends with 1 TMA loads in flight") != std::string::npos ||
          message.find("bytes more than it expects") != std::string::npos);
  }
}

SIMT_CASE(both_halves_are_expected) {
  // The half that was not expected may still be on its way.
  check_broken_by_clusters(
      "bytes more than it expects",
      [] {
        start();
        if (thread_idx() != 0) return;
        expect(barrier(), kHalfBytes);
        load_half(barrier());
        wait(barrier(), 0);
        arrive_at(barrier(1), 0);
        arrive_at(barrier(1), 1);
        wait(barrier(1), 0);
      },
      64, "the block ends with 1 TMA loads in flight");
  check_broken_by_clusters("which misses 0 arrivals and 512 bytes", [] {
    start();
    if (thread_idx() != 0) return;
    expect(barrier(), 3 * kHalfBytes);
    load_half(barrier());
    wait(barrier(), 0);
  });
}

SIMT_CASE(the_other_half_may_come_before_it_is_expected) {
  for (uint64_t seed = 0; seed < kNumSeeds; ++seed) {
    const Configured configured(seed);
    CHECK_OK(run_clusters(1, 64, [] {
      start();
      if (thread_idx() == 0 && rank() == 0) {
        load_half(barrier());
        expect(barrier(), 2 * kHalfBytes);
      }
      if (thread_idx() == 0 && rank() == 1) {
        load_half(barrier(), 1);
        Block &there = current_block->cta(0, "tma_load");
        there.async().load(*current_block, there, halves(), barrier(), dynamic_smem() + kOffsetB + kHalfBytes,
                           {0, kN / 2, 0, 0, 0});
        expect(barrier(), 2 * kHalfBytes);
      }
      wait(barrier(), 0);
      current_block->sync_cluster();
    }));
  }
}

SIMT_CASE(the_other_ctas_buffer_is_not_filled_while_wgmma_reads_it) {
  check_broken_by_clusters(
      "of the cluster's other CTA, which a wgmma of warp",
      [] {
        bring_operands();
        if (thread_idx() == 0) {
          init(barrier(2), 1);
          async().fence_inits(0);
        }
        current_block->sync_cluster();
        float d[kN / 2];
        wgmma_fence();
        multiply_operands(d);
        wgmma_commit();
        current_block->sync_cluster();
        if (thread_idx() == 0 && rank() == 0) {
          Block &there = current_block->cta(1, "tma_load");
          there.async().load(*current_block, there, halves(), barrier(2), dynamic_smem() + kOffsetB, {0, 0, 0, 0, 0});
        }
        current_block->sync_cluster();
        wgmma_wait<0>();
      },
      kThreads);
}

SIMT_CASE(the_other_ctas_buffer_is_not_filled_before_anybody_waited_for_it) {
  check_broken_by_clusters("of the cluster's other CTA, where nobody has waited for what was loaded before", [] {
    start();
    if (thread_idx() == 0) {
      expect(barrier(), 2 * kHalfBytes);
      load_half(barrier());
    }
    if (rank() == 0) wait(barrier(), 0);
    if (thread_idx() == 0 && rank() == 0) {
      Block &there = current_block->cta(1, "tma_load");
      while (there.async().has_loads()) there.async().land_one(there);
      load_half(barrier(), 1);
    }
    current_block->sync_cluster();
  });
}

SIMT_CASE(a_deadlock_of_a_cluster_names_both_ctas) {
  check_broken_by_clusters("; in block ", [] {
    start();
    if (thread_idx() == 0 && rank() == 0) wait(barrier(1), 0);
    current_block->sync_cluster();
  });
}
