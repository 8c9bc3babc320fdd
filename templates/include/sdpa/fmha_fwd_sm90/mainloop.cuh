// The consumer: O (64 x kHeadDim) and the softmax statistics of one warpgroup's rows over the key blocks of its tile.
//
//   for every key block n, from the last to the first:  S(n) = Q Kᵀ,  mask,  P(n) = streaming softmax (S(n)),  O += P V
//
// Q Kᵀ of block n and P V of block n + 1 are queued together, and the softmax of block n runs under P V. The turn at the
// tensor cores is held while both are queued. O is rescaled behind the wait, so no accumulator is touched in flight. A
// general kernel may add a dense mask to the scores, asked for before Q Kᵀ, and drop elements of P, also under P V.
// Blocks that a boolean mask hides from the whole tile are left out, those that it hides from these rows passed on.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/dropout.cuh"
#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/mask.cuh"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_fwd_sm90/dense_mask.cuh"
#include "sdpa/fmha_fwd_sm90/mask_blocks.cuh"
#include "sdpa/fmha_fwd_sm90/pipeline.cuh"
#include "sdpa/fmha_fwd_sm90/position_mask.cuh"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
struct Mainloop {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SharedStorage = typename Traits::SharedStorage;
  using SoftmaxState = Softmax<Arch, 2>;
  using OwnTile = WarpgroupTile<Traits>;

  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;

  // tOrO ((2, 2, kHeadDim / 8), 1, 1) must be zero. `keys` is the tile's range, `own` the warpgroup's part of it.
  // `under_last_pv` is called once, where there is time.
  template <class Accumulator, class UnderLastPV>
  SDPA_DEVICE static void run(const Params &params, SharedStorage &smem, int consumer, uint32_t index,
                              const WorkTile &tile, const Sequence &sequence, const KeyRange &keys, const KeyRange &own,
                              const Slot<Traits::kStagesQ> &slot_q, Slot<Traits::kStages> &slot, Accumulator &tOrO,
                              SoftmaxState &softmax, const UnderLastPV &under_last_pv) {
    const int tid = (Traits::kKeepsNothing ? Arch::thread_idx_again() : Arch::thread_idx()) % kWarpgroup;
    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    const auto thr_qk = mma_qk.get_slice(tid);
    const auto thr_pv = mma_pv.get_slice(tid);
    Tensor sQ =
        make_tensor(make_smem_ptr(smem.q[slot_q.index][consumer]), typename Traits::SmemLayoutQ{});  // (64, kHeadDim)
    Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});    // (kBlockN, kHeadDim, stages)
    Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::SmemLayoutVt{});  // (kHeadDim, kBlockN, stages)
    Tensor tSrQ = thr_qk.partition_fragment_A(sQ);    // descriptors (1, 1, kHeadDim / 16)
    Tensor tSrK = thr_qk.partition_fragment_B(sK);    // descriptors (1, 1, kHeadDim / 16, stages)
    Tensor tOrVt = thr_pv.partition_fragment_B(sVt);  // descriptors (1, 1, kBlockN / 16, stages)
    const auto make_scores = [&] {
      return partition_fragment_C(mma_qk, Shape<Int<kWarpgroupRows>, Int<kBlockN>>{});  // ((2, 2, kBlockN / 8), 1, 1)
    };
    Tensor tScS_ = thr_qk.partition_C(make_identity_tensor(Shape<Int<kWarpgroupRows>, Int<kBlockN>>{}));
    Tensor tScS = make_tensor(tScS_.data(), wgmma_rows_cols(tScS_.layout()));        // (2, cols) → (row, key)
    Tensor tOrO_rows = make_tensor(tOrO.data(), wgmma_rows_cols(tOrO.layout()));     // (2, cols)
    Tensor tOrP = make_tensor<Element>(wgmma_as_operand_a(make_scores().layout()));  // ((2, 2, 2), 1, kBlockN / 16)
    [[maybe_unused]] const int first_row = Traits::first_row(tile.m_block, consumer);
    const int n_block_min = Traits::kMayHaveWindow ? own.n_block_min : 0;
    // Blocks whose scores are not as they come: from the first one on, and under a window before the last one.
    const int first_special = !Traits::kHasBias && params.negate_q ? 0 : own.n_block_full;
    const int last_special = Traits::kMayHaveWindow ? own.n_block_full_min : 0;

    const auto queue_qk = [&](auto &tSrS, int stage) SDPA_INLINE_LAMBDA {
      Arch::fence_operand(tSrS);
      Arch::wgmma_fence();
      mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tSrQ); ++k) {
        Arch::wgmma(mma_qk, tSrQ(_, _, k), tSrK(_, _, k, stage), tSrS);
        mma_qk.accumulate_ = GMMA::ScaleOut::One;
      }
      Arch::wgmma_commit();
      Arch::fence_operand(tSrS);
    };
    const auto queue_pv = [&](int stage) SDPA_INLINE_LAMBDA {
      Arch::fence_operand(tOrO);
      Arch::fence_operand(tOrP);
      Arch::wgmma_fence();
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tOrP); ++k) Arch::wgmma(mma_pv, tOrP(_, _, k), tOrVt(_, _, k, stage), tOrO);
      Arch::wgmma_commit();
      Arch::fence_operand(tOrO);
    };
    const auto wait_pv = [&](int stage) SDPA_INLINE_LAMBDA {
      Arch::template wgmma_wait<0>();
      Arch::fence_operand(tOrO);
      Arch::fence_operand(tOrP);
      release_kv<Traits>(&smem.v_empty[stage]);  // V was read by this warp
    };
    // ---- what only some general kernels have ----
    [[maybe_unused]] const int seqlen_k = sequence.seqlen_k;
    [[maybe_unused]] auto mask = [&] {
      if constexpr (Traits::kHasMask) {
        return DenseMask<Traits>(params.mask, tile, sequence, tScS, first_row);
      } else {
        return nullptr;
      }
    }();
    [[maybe_unused]] const auto dropout = [&] {
      if constexpr (Traits::kHasDropout && !Traits::kFindsDropoutAgain) {
        return Dropout<Traits>(params, tile);
      } else {
        return nullptr;
      }
    }();

    // S → P, both in the registers of S; factors of what O is to be rescaled with.
    const auto exponentiate = [&](auto &tSrS, int n_block, bool may_be_hidden, auto &factors) SDPA_INLINE_LAMBDA {
      Tensor scores = make_tensor(tSrS.data(), wgmma_rows_cols(tSrS.layout()));  // (2, cols)
      if constexpr (Traits::kHasBias) mask.apply(scores, tScS, n_block * kBlockN, seqlen_k);
      if (n_block >= first_special || (Traits::kMayHaveWindow && n_block < last_special)) {
        if (!Traits::kHasBias && params.negate_q) {  // a bias meets scores that have their sign
          CUTE_UNROLL
          for (int i = 0; i < size(tSrS); ++i) tSrS(i) = -tSrS(i);
        }
        if constexpr (Traits::kIsGeneral) {  // there are no registers to keep the sequence for the loop
          const WorkTile tile = Traits::work_tile_again(params, index);
          const int row = tile.m_block * Traits::kBlockM + consumer * kWarpgroupRows;
          const Sequence same_sequence = sequence_of<Traits>(params, tile);
          if constexpr (Traits::kHasMask) {
            apply_mask<OwnTile>(scores, tScS, row, n_block * kBlockN, params, same_sequence);
          } else {
            apply_position_mask<OwnTile>(scores, tScS, row, n_block * kBlockN, params, same_sequence);
          }
        } else {
          apply_mask<OwnTile>(scores, tScS, first_row, n_block * kBlockN, params, sequence);
        }
      }
      fill(factors, 1.f);
      if constexpr (Traits::kMask == MaskKind::kBool) {
        if (may_be_hidden) mask.apply(scores, tScS, n_block * kBlockN, seqlen_k);
      }
      softmax.template update<Traits::kHasBias>(scores, factors, params.softmax_scale_log2);
    };
    const auto convert_p = [&](auto &tSrS) SDPA_INLINE_LAMBDA {
      Tensor as_a = make_tensor(tSrS.data(), wgmma_as_operand_a(tSrS.layout()));
      Tensor pairs = recast<uint32_t>(tOrP);
      CUTE_UNROLL
      for (int i = 0; i < size(pairs); ++i) pairs(i) = arch::pack<Element>(as_a(2 * i), as_a(2 * i + 1));
    };
    // The same with dropout, whose random numbers are made under P V. What P V reads is written behind `wait`.
    const auto drop_p = [&](auto &tSrS, int n_block, const auto &wait) SDPA_INLINE_LAMBDA {
      if constexpr (Traits::kHasDropout) {
        using PairsByRow = Shape<_2, _1, Int<kBlockN / 8>>;  // (row, 1, keys / 8)
        Tensor as_a = make_tensor(tSrS.data(), wgmma_as_operand_a(tSrS.layout()));
        Tensor rounded = make_tensor<uint32_t>(PairsByRow{});
        Tensor kept = make_tensor<uint32_t>(PairsByRow{});  // all bits of the elements that are left
        CUTE_UNROLL
        for (int i = 0; i < size(rounded); ++i) rounded(i) = arch::pack<Element>(as_a(2 * i), as_a(2 * i + 1));
        fill(kept, ~0u);
        if constexpr (Traits::kFindsDropoutAgain) {
          const WorkTile same_tile = Traits::work_tile_again(params, index);
          Dropout<Traits>(params, same_tile).apply(kept, tScS, first_row, n_block * kBlockN);
        } else {
          dropout.apply(kept, tScS, first_row, n_block * kBlockN);
        }
        wait();
        Tensor pairs = recast<uint32_t>(tOrP);
        CUTE_UNROLL
        for (int i = 0; i < size(pairs); ++i) pairs(i) = rounded(i) & kept(i);
      }
    };
    const auto rescale = [&](const auto &factors) SDPA_INLINE_LAMBDA {
      if (factors(0) == 1.f && factors(1) == 1.f) return;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); ++j) {
        tOrO_rows(0, j) *= factors(0);
        tOrO_rows(1, j) *= factors(1);
      }
    };

    // A block that only other warpgroups see.
    const auto pass_on = [&] SDPA_INLINE_LAMBDA {
      Arch::mbarrier_wait(&smem.k_full[slot.index], slot.phase);
      Turn<Traits>::wait(consumer);
      Turn<Traits>::pass(consumer);
      release_kv<Traits>(&smem.k_empty[slot.index]);
      Arch::mbarrier_wait(&smem.v_full[slot.index], slot.phase);
      release_unread_kv<Traits>(&smem.v_empty[slot.index]);
      slot.advance();
    };

    Tensor factors = make_tensor<float>(Shape<_2, _1>{});
    // P of the block in `slot`, with no P V to queue.
    const auto first_p = [&](int n_block, bool may_be_hidden) SDPA_INLINE_LAMBDA {
      if constexpr (Traits::kHasMask) {
        if (may_be_hidden) mask.fetch(tScS, n_block * kBlockN, seqlen_k);
      }
      Tensor tSrS = make_scores();
      Arch::mbarrier_wait(&smem.k_full[slot.index], slot.phase);  // K(n) is visible
      Turn<Traits>::wait(consumer);
      queue_qk(tSrS, slot.index);
      Turn<Traits>::pass(consumer);
      Arch::template wgmma_wait<0>();
      Arch::fence_operand(tSrS);
      release_kv<Traits>(&smem.k_empty[slot.index]);  // K(n) was read by this warp
      exponentiate(tSrS, n_block, may_be_hidden, factors);
      if constexpr (Traits::kHasDropout) {
        drop_p(tSrS, n_block, [] {});
      } else {
        convert_p(tSrS);
      }
    };
    // The same behind a block that the warpgroup saw, with P V of that one.
    const auto next_p = [&](int n_block, bool may_be_hidden, const Slot<Traits::kStages> &before) SDPA_INLINE_LAMBDA {
      if constexpr (Traits::kHasMask) {
        if (may_be_hidden) mask.fetch(tScS, n_block * kBlockN, seqlen_k);
      }
      Tensor tSrS = make_scores();
      Arch::mbarrier_wait(&smem.k_full[slot.index], slot.phase);  // K(n) is visible
      Turn<Traits>::wait(consumer);
      queue_qk(tSrS, slot.index);
      Arch::mbarrier_wait(&smem.v_full[before.index], before.phase);  // V(n + 1) is visible
      queue_pv(before.index);
      Turn<Traits>::pass(consumer);
      Arch::template wgmma_wait<1>();  // S(n), while P V of block n + 1 goes on
      Arch::fence_operand(tSrS);
      release_kv<Traits>(&smem.k_empty[slot.index]);  // K(n) was read by this warp
      exponentiate(tSrS, n_block, may_be_hidden, factors);
      if constexpr (Traits::kHasDropout) {
        drop_p(tSrS, n_block, [&] SDPA_INLINE_LAMBDA { wait_pv(before.index); });
      } else {
        wait_pv(before.index);
        convert_p(tSrS);
      }
      rescale(factors);
    };
    const auto last_pv = [&](const Slot<Traits::kStages> &last, const auto &under_pv) SDPA_INLINE_LAMBDA {
      Arch::mbarrier_wait(&smem.v_full[last.index], last.phase);  // V of the last block is visible
      queue_pv(last.index);
      under_pv();
      wait_pv(last.index);
    };

    if constexpr (Traits::kLeavesBlocksOut) {
      Arch::mbarrier_wait(&smem.q_full[slot_q.index][consumer], slot_q.phase);  // Q is visible
      VisibleBlocks<Traits> blocks(keys);
      const auto next = [&] SDPA_INLINE_LAMBDA {
        return blocks.next(params, consumer, [&] {  // there are no registers to keep these for the loop
          const WorkTile tile = Traits::work_tile_again(params, index);
          const Sequence sequence = Sequence::make(params, tile.bidb);
          return TileRange{tile, key_range<Traits>(params, sequence, tile.m_block),
                           key_range<OwnTile>(params, sequence, tile.m_block * Traits::kConsumers + consumer)};
        });
      };
      bool is_block = next();
      while (is_block) {
        if (!blocks.is_seen()) {
          pass_on();
          is_block = next();
          continue;
        }
        // ---- neighbours among them that the warpgroup sees ----
        first_p(blocks.index, !blocks.is_seen_whole());
        rescale(factors);
        Slot<Traits::kStages> before = slot;
        slot.advance();
        for (is_block = next(); is_block && blocks.is_seen(); is_block = next()) {
          next_p(blocks.index, !blocks.is_seen_whole(), before);
          before = slot;
          slot.advance();
        }
        last_pv(before, [] {});
      }
      under_last_pv();
      return;
    }

    int n_block = keys.n_block_max - 1;
    if constexpr (Traits::kMayHaveWindow) {  // rows that see no key have no blocks at all
      for (; n_block >= cute::max(own.n_block_max, keys.n_block_min); --n_block) pass_on();
    } else {
      for (; n_block >= own.n_block_max; --n_block) pass_on();
    }
    Arch::mbarrier_wait(&smem.q_full[slot_q.index][consumer], slot_q.phase);  // Q is visible
    if (Traits::kMayHaveWindow ? own.n_block_max == 0 : n_block < 0) {
      if constexpr (!Traits::kOutInQ) release_unread<Arch>(&smem.q_empty[slot_q.index][consumer]);
      under_last_pv();
      return;
    }
    first_p(n_block, true);
    for (--n_block; n_block >= n_block_min; --n_block) {
      const Slot<Traits::kStages> before = slot;  // of block n + 1
      slot.advance();
      next_p(n_block, true, before);
    }
    if constexpr (!Traits::kOutInQ) release<Arch>(&smem.q_empty[slot_q.index][consumer]);  // Q was read by this warp
    last_pv(slot, under_last_pv);
    slot.advance();
    if constexpr (Traits::kMayHaveWindow) {
      int first = keys.n_block_min;
      if constexpr (Traits::kKeepsNothing) {
        if (n_block >= 0) {
          const WorkTile tile = Traits::work_tile_again(params, index);
          first = key_range<Traits>(params, Sequence::make(params, tile.bidb), tile.m_block).n_block_min;
        }
      }
      for (; n_block >= first; --n_block) pass_on();
    }
  }
};

}  // namespace sdpa::fmha_fwd_sm90
