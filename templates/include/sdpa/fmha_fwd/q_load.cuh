// How the rows of Q of one query tile get to the operand of Q Kᵀ: QLoad. Which way it is depends on who shares K and V
// (kernel_traits.cuh): by cp.async into shared memory, from there into registers, or straight into registers.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/sequence.cuh"
#include "sdpa/attention/tile_scheduler.cuh"
#include "sdpa/fmha_fwd/kernel_traits.cuh"
#include "sdpa/fmha_fwd/tile_copy.cuh"

namespace sdpa::fmha_fwd {

template <class Traits>
struct QLoad {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kIsGeneral = Traits::kIsGeneral;

  // Reads the tile's rows of Q straight into the operand's registers: no shared memory, no barrier. `q_ptr` is row 0 of
  // the tile's head, in a split kernel of the first head of its key head.
  template <class Gmem, class Fragment, class ThrMma>
  SDPA_DEVICE static void to_registers(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                       const Element *q_ptr, const Gmem &gQ, Fragment &tSrQ, const ThrMma &thr_mma) {
    Tensor tScQ = thr_mma.partition_A(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{}));
    Tensor tSgQ = thr_mma.partition_A(gQ);
    auto pairs = recast<uint32_t>(tSrQ);
    const int first_row = tile.m_block * kBlockM;
    const int first_col = get<1>(tScQ(0));
    [[maybe_unused]] const Element *rows[Traits::kRowsPerThread];  // several heads': their addresses take long to find
    if constexpr (Traits::kIsSplit) {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kRowsPerThread; ++i) {
        const int row = get<0>(tScQ(2 * (i / 2 * 4 + i % 2)));
        rows[i] = q_ptr + Traits::row_offset(params, params.q, first_row + row) + first_col;
      }
    }
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) {
      const int row = get<0>(tScQ(2 * i)), col = get<1>(tScQ(2 * i));
      const bool inside = row < sequence.seqlen_q - first_row && (!kIsGeneral || col < Traits::head_dim(params));
      const Element *source = &tSgQ(2 * i);
      if constexpr (Traits::kIsSplit) source = rows[i / 4 % Traits::kMmaM * 2 + i % 2] + (col - first_col);
      pairs(i) = inside ? *reinterpret_cast<const uint32_t *>(source) : 0u;
    }
  }

  // Queues the tile's rows of Q.
  SDPA_DEVICE static auto queue(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                const Element *q_ptr, Element *smem_q, int tid) {
    const TileCopy<Traits, kBlockM> copy(q_ptr, sequence.seqlen_q, params.q.row_stride, tid);
    copy.template load<true>(copy.source(), tile.m_block, smem_q, sequence.seqlen_q - tile.m_block * kBlockM,
                             Traits::head_dim(params));
    return copy;
  }

  // Queues the tile's rows of Q and, for a negative softmax_scale, turns their sign once they have landed.
  SDPA_DEVICE static void load(const Params &params, const WorkTile &tile, const Sequence &sequence,
                               const Element *q_ptr, Element *smem_q) {
    const auto copy = queue(params, tile, sequence, q_ptr, smem_q, Arch::thread_idx());
    if (params.negate_q) {
      Arch::cp_async_fence();
      Arch::template cp_async_wait<0>();
      negate(copy.destination(smem_q));
    }
  }

  // Puts the tile's rows of Q, which are several heads', into shared memory, while K and V are on their way. The barrier
  // before the first K shows them.
  SDPA_DEVICE static void store(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                const Element *q_ptr, Element *smem_q) {
    Tensor sQ = make_tensor(make_smem_ptr(smem_q), typename Traits::SmemLayoutQ{});  // (kBlockM, kHeadDim)
    constexpr int kVectors = kHeadDim / 8;                                           // of a row
    constexpr int kPerThread = kBlockM * kVectors / Traits::kThreads;
    static_assert(kBlockM * kVectors % Traits::kThreads == 0, "every thread takes as many vectors");
    static_assert(!Traits::kQInRegs, "registers would take Q before it is there");
    const int first_row = tile.m_block * kBlockM;
    const uint32_t sign = params.negate_q ? 0x80008000u : 0u;
    uint4 vectors[kPerThread];  // all are asked for before the first is waited for
    const auto row_of = [](int i) SDPA_INLINE_LAMBDA { return (Arch::thread_idx() + i * Traits::kThreads) / kVectors; };
    const auto col_of = [](int i)
                            SDPA_INLINE_LAMBDA { return (Arch::thread_idx() + i * Traits::kThreads) % kVectors * 8; };
    CUTE_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      vectors[i] = make_uint4(0, 0, 0, 0);
      if (row_of(i) < sequence.seqlen_q - first_row && col_of(i) < Traits::head_dim(params))
        vectors[i] = *reinterpret_cast<const uint4 *>(
            q_ptr + Traits::row_offset(params, params.q, first_row + row_of(i)) + col_of(i));
    }
    CUTE_UNROLL
    for (int i = 0; i < kPerThread; ++i) {
      const uint4 vector = vectors[i];
      *reinterpret_cast<uint4 *>(&sQ(row_of(i), col_of(i))) =
          make_uint4(vector.x ^ sign, vector.y ^ sign, vector.z ^ sign, vector.w ^ sign);
    }
  }

  // Two elements at a time.
  template <class Elements>
  SDPA_DEVICE static void negate(Elements &&elements) {
    auto pairs = recast<uint32_t>(elements);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) ^= 0x80008000u;
  }
};

}  // namespace sdpa::fmha_fwd
