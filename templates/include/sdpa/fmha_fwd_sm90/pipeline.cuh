// The barriers between the warp that loads and the warpgroups that compute. A buffer is `full` when its bytes are there
// and `empty` when every warp has read it; both kinds of waits go by the parity of how often the ring has gone round.
#pragma once

#include "sdpa/attention/sequence.cuh"
#include "sdpa/fmha_fwd_sm90/kernel_traits.cuh"

namespace sdpa::fmha_fwd_sm90 {

// A place in a ring of kStages buffers. K and V of a block have the same; Q has a ring of its own.
template <int kStages>
struct Slot {
  int index = 0;
  int phase = 0;

  SDPA_DEVICE void advance() {
    if (kStages > 1 && ++index < kStages) return;
    index = 0;
    phase ^= 1;
  }
};

// Where the rows of a sequence lie in a ragged map: see GeneralParams. Plain kernels have no use for it.
template <class Traits>
struct MapRows {
  int before = 0;  // rows of the map before the sequence's first
  int end = 0;     // the fourth coordinate

  // `num_rows`: those that are read, or written.
  SDPA_DEVICE static MapRows make(const RaggedSteps &steps, int bidb, int64_t first_row, int num_rows) {
    return {kRaggedRows - num_rows, (static_cast<int>(first_row) + num_rows) * steps.row + bidb * steps.batch};
  }
};

// By one thread; a barrier of the CTA, or of the cluster, has to follow.
template <class Traits>
SDPA_DEVICE void init_barriers(typename Traits::SharedStorage &smem) {
  using Arch = typename Traits::Arch;
  constexpr int kWarps = kWarpgroup / 32;                                   // of a warpgroup
  constexpr int kReaders = kWarps * Traits::kConsumers * Traits::kCluster;  // of K and V
  CUTE_UNROLL
  for (int i = 0; i < Traits::kStagesQ * Traits::kConsumers; ++i) {
    Arch::mbarrier_init(&smem.q_full[0][0] + i, 1);
    Arch::mbarrier_init(&smem.q_empty[0][0] + i, kWarps);
  }
  CUTE_UNROLL
  for (int i = 0; i < Traits::kStages; ++i) {
    Arch::mbarrier_init(&smem.k_full[i], 1);
    Arch::mbarrier_init(&smem.k_empty[i], kReaders);
    Arch::mbarrier_init(&smem.v_full[i], 1);
    Arch::mbarrier_init(&smem.v_empty[i], kReaders);
  }
  Arch::fence_mbarrier_init();
}

// A warp has read a buffer: its own wgmma on it are complete. One thread may not speak for its warpgroup, whose warps
// drift apart.
template <class Arch>
SDPA_DEVICE void release(uint64_t *empty) {
  if (Arch::thread_idx() % 32 == 0) Arch::mbarrier_arrive(empty);
}

// The same for a buffer of K or V, which both CTAs of a pair fill: each waits for the consumers of both.
template <class Traits>
SDPA_DEVICE void release_kv(uint64_t *empty) {
  using Arch = typename Traits::Arch;
  if constexpr (Traits::kIsPair) {
    const int rank = Arch::thread_idx() % 32;
    if (rank < Traits::kCluster) Arch::mbarrier_arrive_at(empty, rank);
  } else {
    release<Arch>(empty);
  }
}

// A warp waited for a buffer and had nothing to read. A lane that has yet to see it full would wait for ever if the ring
// went round twice meanwhile.
template <class Arch>
SDPA_DEVICE void release_unread(uint64_t *empty) {
  Arch::syncwarp();
  release<Arch>(empty);
}

template <class Traits>
SDPA_DEVICE void release_unread_kv(uint64_t *empty) {
  Traits::Arch::syncwarp();
  release_kv<Traits>(empty);
}

// Consumers take turns at the tensor cores, so that one exponentiates while another multiplies: each waits for its
// barrier, and passes the turn to the next one's. All take the same number of turns.
template <class Traits>
struct Turn {
  using Arch = typename Traits::Arch;

  // Before the first turn.
  SDPA_DEVICE static void start(int consumer) {
    if (consumer == 0) Arch::template named_arrive<1>(2 * kWarpgroup);
  }
  SDPA_DEVICE static void wait(int consumer) {
    if (consumer == 0) {
      Arch::template named_sync<1>(2 * kWarpgroup);
    } else if (consumer == 1) {
      Arch::template named_sync<2>(2 * kWarpgroup);
    } else {
      Arch::template named_sync<3>(2 * kWarpgroup);
    }
  }
  SDPA_DEVICE static void pass(int consumer) {
    if (consumer == 0) {
      Arch::template named_arrive<2>(2 * kWarpgroup);
    } else if (consumer == 1 && Traits::kConsumers == 3) {
      Arch::template named_arrive<3>(2 * kWarpgroup);
    } else {
      Arch::template named_arrive<1>(2 * kWarpgroup);
    }
  }
  // After the last turn: nobody has to wait for the one that consumer 0 was passed.
  SDPA_DEVICE static void end(int consumer) {
    if (consumer == 0) Arch::template named_sync<1>(2 * kWarpgroup);
  }
};

}  // namespace sdpa::fmha_fwd_sm90
