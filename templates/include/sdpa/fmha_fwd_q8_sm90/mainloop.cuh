// The consumer: O (64 x kHeadDim) and the softmax statistics of one warpgroup's rows over the key blocks of its tile.
//
//   for every key block n, from the last to the first:  S(n) = Q̂ K̂ᵀ,  mask,  P̂(n) = softmax (S(n)),  O += P̂ V̂
//
// Q̂ K̂ᵀ of block n and P̂ V̂ of block n + 1 are queued together, and the softmax of block n runs under P̂ V̂, as in
// fmha_fwd_sm90/mainloop.cuh. Both sums are integers. Those of P̂ V̂ are of one block, whose weight in O the softmax keeps
// up to date until they are done.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/mask.cuh"
#include "sdpa/fmha_fwd_q8/softmax.cuh"
#include "sdpa/fmha_fwd_q8_sm90/kernel_traits.cuh"
#include "sdpa/fmha_fwd_q8_sm90/q_fragment.cuh"
#include "sdpa/fmha_fwd_sm90/pipeline.cuh"

namespace sdpa::fmha_fwd_q8_sm90 {

// In place of fmha_fwd_sm90::Turn, for warpgroups that need none.
struct NoTurn {
  SDPA_DEVICE static void start(int) {}
  SDPA_DEVICE static void wait(int) {}
  SDPA_DEVICE static void pass(int) {}
  SDPA_DEVICE static void end(int) {}
};

template <class Traits>
struct Mainloop {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;
  using SharedStorage = typename Traits::SharedStorage;
  using SoftmaxState = fmha_fwd_q8::QuantizedSoftmax<Traits>;
  using OwnTile = fmha_fwd_sm90::WarpgroupTile<Traits>;
  // Of three warpgroups one exponentiates while another multiplies anyway.
  using Turn = std::conditional_t<Traits::kConsumers == 2, fmha_fwd_sm90::Turn<Traits>, NoTurn>;
  using Slot = fmha_fwd_sm90::Slot<Traits::kStages>;
  using Block = typename Traits::Block;

  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;

  // tOrO ((2, 2, kHeadDim / 8), 1, 1) must be zero. `keys` is the tile's range, `own` the warpgroup's part of it.
  template <class Accumulator>
  SDPA_DEVICE static void run(const Params &params, SharedStorage &smem, int consumer, const WorkTile &tile,
                              const Sequence &sequence, const KeyRange &keys, const KeyRange &own, Accumulator &tOrO,
                              SoftmaxState &softmax) {
    const int row_tid = Arch::thread_idx() - kWarpgroup, tid = row_tid % kWarpgroup;
    typename Traits::MmaQK mma_qk;
    typename Traits::MmaPV mma_pv;
    const auto thr_qk = mma_qk.get_slice(tid);
    const auto thr_pv = mma_pv.get_slice(tid);
    Tensor sK = make_tensor(make_smem_ptr(smem.k[0]), typename Traits::SmemLayoutK{});    // (64, kHeadDim, stages)
    Tensor sVt = make_tensor(make_smem_ptr(smem.v[0]), typename Traits::SmemLayoutVt{});  // (kHeadDim, 64, stages)
    Tensor tSrK = thr_qk.partition_fragment_B(sK);    // descriptors (1, 1, kHeadDim / 32, stages)
    Tensor tOrVt = thr_pv.partition_fragment_B(sVt);  // descriptors (1, 1, 2, stages)
    Tensor tSrQ = make_tensor<int8_t>(Shape<Shape<_4, _2, _2>, _1, Int<kHeadDim / 32>>{});
    Tensor tOrP = make_tensor<uint8_t>(Shape<Shape<_4, _2, _2>, _1, Int<kBlockN / 32>>{});
    Tensor tSrS_ = partition_fragment_C(mma_qk, Shape<Int<kWarpgroupRows>, Int<kBlockN>>{});      // ((2, 2, 8), 1, 1)
    Tensor sums = partition_fragment_C(mma_pv, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{});      // as tOrO
    Tensor integers = make_tensor(tSrS_.data(), fmha_fwd_sm90::wgmma_rows_cols(tSrS_.layout()));  // (2, cols)
    Tensor tSrS = make_tensor<float>(tSrS_.layout());
    Tensor scores = make_tensor(tSrS.data(), fmha_fwd_sm90::wgmma_rows_cols(tSrS.layout()));     // (2, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), fmha_fwd_sm90::wgmma_rows_cols(tOrO.layout()));  // (2, cols)
    Tensor sums_rows = make_tensor(sums.data(), fmha_fwd_sm90::wgmma_rows_cols(sums.layout()));  // (2, cols)
    Tensor tScS_ = thr_qk.partition_C(make_identity_tensor(Shape<Int<kWarpgroupRows>, Int<kBlockN>>{})
                                          .compose(_, typename Traits::KeyOrder{}));          // → (row, key)
    Tensor tScS = make_tensor(tScS_.data(), fmha_fwd_sm90::wgmma_rows_cols(tScS_.layout()));  // (2, cols)
    const int first_row = tile.m_block * Traits::kBlockM + consumer * kWarpgroupRows;

    const auto queue_qk = [&](int stage) SDPA_INLINE_LAMBDA {
      Arch::fence_operand(tSrS_);
      Arch::wgmma_fence();
      mma_qk.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tSrQ); ++k) {
        Arch::wgmma(mma_qk, tSrQ(_, _, k), tSrK(_, _, k, stage), tSrS_);
        mma_qk.accumulate_ = GMMA::ScaleOut::One;
      }
      Arch::wgmma_commit();
      Arch::fence_operand(tSrS_);
    };
    const auto queue_pv = [&](int stage) SDPA_INLINE_LAMBDA {
      Arch::fence_operand(sums);
      Arch::fence_operand(tOrP);
      Arch::wgmma_fence();
      mma_pv.accumulate_ = GMMA::ScaleOut::Zero;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tOrP); ++k) {
        Arch::wgmma(mma_pv, tOrP(_, _, k), tOrVt(_, _, k, stage), sums);
        mma_pv.accumulate_ = GMMA::ScaleOut::One;
      }
      Arch::wgmma_commit();
      Arch::fence_operand(sums);
    };
    float weight[2];
    // O += P̂ V̂ of the block in `stage`, once these are done.
    const auto add = [&](int stage) SDPA_INLINE_LAMBDA {
      Arch::template wgmma_wait<0>();
      Arch::fence_operand(sums);
      Arch::fence_operand(tOrP);
      fmha_fwd_sm90::release<Arch>(&smem.empty[stage]);  // K and V were read by this warp
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(tOrO_rows); ++j)
          tOrO_rows(i, j) = fmaf(softmax.late_weight[i], static_cast<float>(sums_rows(i, j)), tOrO_rows(i, j));
      }
    };
    // The integers of S → 252 P · 2^-24, and the block's weight.
    const auto exponentiate = [&](int n_block, int stage) SDPA_INLINE_LAMBDA {
      const auto &scales = smem.scales[stage];
      const float k_scale = scales.k[tid % 4];
      const float *const v_log2 = scales.v_log2 + tid % 4 * 4, *const v_inverse = scales.v_inverse + tid % 4 * 4;
      float most[2];
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) most[i] = static_cast<float>(largest(integers, i));
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) = static_cast<float>(tSrS_(i));
      if (n_block >= own.n_block_full || n_block < own.n_block_full_min) {
        apply_mask<OwnTile>(scores, tScS, first_row, n_block * kBlockN, params, sequence);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) most[i] = SoftmaxState::largest(scores, i);
      }
      if (Arch::any(*v_inverse < 0.f)) {
        softmax.update(scores, most, tOrO_rows, k_scale, *v_log2, -*v_inverse, weight);
      } else {
        softmax.update(scores, tOrO_rows, k_scale, v_log2, v_inverse, weight);
      }
    };
    // Columns of S → operand of P V: fmha_fwd_q8/mainloop.cuh says which.
    const auto convert_p = [&] SDPA_INLINE_LAMBDA {
      Tensor words = recast<uint32_t>(tOrP);  // ((1, 2, 2), 1, 2)
      CUTE_UNROLL
      for (int k = 0; k < kBlockN / 32; ++k) {
        CUTE_UNROLL
        for (int h = 0; h < 4; ++h) {
          const int half = h % 2, tile = 2 * (2 * k + h / 2);
          const auto at = [&](int column, int of)
                              SDPA_INLINE_LAMBDA { return tSrS(make_coord(column, half, of), 0, 0); };
          words(make_coord(0, half, h / 2), 0, k) =
              Arch::pack_subnormals(at(0, tile), at(1, tile), at(0, tile + 1), at(1, tile + 1));
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < 2; ++i) softmax.late_weight[i] = weight[i];
    };

    Slot slot;
    // A block that only other warpgroups see.
    const auto pass_on = [&] SDPA_INLINE_LAMBDA {
      Arch::mbarrier_wait(&smem.full[slot.index], slot.phase);
      Turn::wait(consumer);
      Turn::pass(consumer);
      fmha_fwd_sm90::release_unread<Arch>(&smem.empty[slot.index]);
      slot.advance();
    };

    Turn::start(consumer);
    QFragment<Traits>::load(params, tile, sequence, row_tid, tSrQ, softmax.q_scale);
    int n_block = keys.n_block_max - 1;
    for (; n_block >= cute::max(own.n_block_max, keys.n_block_min); --n_block) pass_on();
    if (own.n_block_max > own.n_block_min) {
      Arch::mbarrier_wait(&smem.full[slot.index], slot.phase);  // K(n) and V(n) are visible
      Turn::wait(consumer);
      queue_qk(slot.index);
      Turn::pass(consumer);
      Arch::template wgmma_wait<0>();
      Arch::fence_operand(tSrS_);
      exponentiate(n_block, slot.index);
      convert_p();
      for (--n_block; n_block >= own.n_block_min; --n_block) {
        const int stage_before = slot.index;  // of block n + 1
        slot.advance();
        Arch::mbarrier_wait(&smem.full[slot.index], slot.phase);  // K(n) and V(n) are visible
        Turn::wait(consumer);
        queue_qk(slot.index);
        queue_pv(stage_before);
        Turn::pass(consumer);
        Arch::template wgmma_wait<1>();  // S(n), while P V of block n + 1 goes on
        Arch::fence_operand(tSrS_);
        exponentiate(n_block, slot.index);
        add(stage_before);
        convert_p();
      }
      queue_pv(slot.index);
      add(slot.index);
      slot.advance();
    }
    for (; n_block >= keys.n_block_min; --n_block) pass_on();
    Turn::end(consumer);
  }

 private:
  template <class Integers>
  SDPA_DEVICE static int largest(const Integers &integers, int i) {
    constexpr int kCols = decltype(size<1>(integers))::value;
    int max = cute::max(integers(i, 0), integers(i, 1));
    CUTE_UNROLL
    for (int j = 2; j < kCols; j += 2) max = Arch::max3(max, integers(i, j), integers(i, j + 1));
    return max;
  }
};

}  // namespace sdpa::fmha_fwd_q8_sm90
