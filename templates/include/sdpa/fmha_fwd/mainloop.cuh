// The mainloop: O (kBlockM x kHeadDim) and the softmax statistics of one query tile over the key blocks of one group.
//
//   for every key block:  S = Q Kᵀ,  mask,  P = streaming softmax (S),  O += P V
//
// Blocks are visited from the last to the first, so that the few which need a mask come first; under a window, others
// that need one come last. With several KV groups, group g takes every kKvGroups-th block.
// Two schedules of the same step:
//   kStages == 1   a ring of kRingTiles buffers takes K(n), V(n), K(n-1), ... in turn; a buffer is refilled as soon as
//                  everyone has read it, two barriers a block
//   kStages >= 2   K(n) and V(n) travel together, kStages - 1 blocks ahead, one barrier a block
// A general kernel adds a dense mask to the scores, drops elements of P, and loads columns below head_dim only.
// The file does not know where tiles come from (tile_scheduler) nor how O leaves (epilogue).
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/arch/static_for.hpp"
#include "sdpa/attention/dense_mask.cuh"
#include "sdpa/attention/dropout.cuh"
#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/mask.cuh"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_fwd/kernel_traits.cuh"
#include "sdpa/fmha_fwd/q_load.cuh"
#include "sdpa/fmha_fwd/tile_copy.cuh"

namespace sdpa::fmha_fwd {

// acc += A B. Operands of the next k-step are fetched from shared memory under the multiplication of this one; an A
// that is already in registers is not fetched. tCsX are views of shared memory, tCrX_view the fragments as ldmatrix
// fills them.
template <bool kAInRegs, class AtomA, class AtomB, class TiledMma, class Acc, class FragA, class FragB, class SmemA,
          class SmemB, class ViewA, class ViewB>
SDPA_DEVICE void gemm(const TiledMma &mma, Acc &acc, const FragA &tCrA, const FragB &tCrB, const SmemA &tCsA,
                      const SmemB &tCsB, ViewA &&tCrA_view, ViewB &&tCrB_view) {
  constexpr int kSteps = decltype(size<2>(tCrB))::value;
  const auto fetch = [&](auto k) SDPA_INLINE_LAMBDA {
    if constexpr (!kAInRegs) cute::copy(AtomA{}, tCsA(_, _, k), tCrA_view(_, _, k));
    cute::copy(AtomB{}, tCsB(_, _, k), tCrB_view(_, _, k));
  };
  fetch(_0{});
  arch::static_for<kSteps>([&](auto k) SDPA_INLINE_LAMBDA {
    if constexpr (decltype(k)::value + 1 < kSteps) fetch(Int<decltype(k)::value + 1>{});
    cute::gemm(mma, tCrA(_, _, k), tCrB(_, _, k), acc);
  });
}

// Barrier of the warps that share K and V buffers.
template <class Traits>
SDPA_DEVICE void sync_kv_group(int group) {
  using Arch = typename Traits::Arch;
  if constexpr (Traits::kKvGroups == 1) {
    Arch::syncthreads();
  } else if constexpr (Traits::kGroupThreads == 32) {
    Arch::syncwarp();
  } else {
    Arch::sync_group(1 + group, Traits::kGroupThreads);
  }
}

template <class Traits>
struct Mainloop {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using CopyAtom = typename Traits::SmemCopyAtom;
  using CopyAtomT = typename Traits::SmemCopyAtomT;
  using SoftmaxState = Softmax<Arch, Traits::kRowsPerThread>;
  using Params = typename Traits::Params;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr bool kHasMask = Traits::kHasMask;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kKvGroups = Traits::kKvGroups;
  static constexpr int kRing = Traits::kRingTiles;
  static constexpr bool kQFromSmem = !Traits::kQInRegs && kKvGroups == 1;

  SDPA_DEVICE static void sync_group(int group) { sync_kv_group<Traits>(group); }

  // tOrO ((2, 2), MMA_M, MMA_K) must be zero. n_block_max > 0.
  template <class Accumulator>
  SDPA_DEVICE static void run(const Params &params, const WorkTile &tile, const Sequence &sequence,
                              const KeyRange &keys, char *smem, Accumulator &tOrO, SoftmaxState &softmax) {
    const int group = kKvGroups == 1 ? 0 : Arch::thread_idx() / Traits::kGroupThreads;
    const int tid = kKvGroups == 1 ? Arch::thread_idx() : Arch::thread_idx() % Traits::kGroupThreads;
    Element *const smem_elements = reinterpret_cast<Element *>(smem + group * Traits::kGroupBytes);
    Element *const smem_k = smem_elements + Traits::kOffsetK;
    Element *const smem_v = smem_elements + Traits::kOffsetV;

    // ---- tensors ----
    const auto base = [&](const TensorRef &tensor, int bidh, int64_t first_row) SDPA_INLINE_LAMBDA {
      return static_cast<const Element *>(tensor.data) + tile.bidb * tensor.batch_stride + bidh * tensor.head_stride +
             first_row * tensor.row_stride;
    };
    const auto q_ptr = base(params.q, tile.bidh, sequence.first_row_q);
    const auto k_ptr = base(params.k, tile.bidh_kv, sequence.first_row_k);
    const auto v_ptr = base(params.v, tile.bidh_kv, sequence.first_row_k);
    Tensor mQ = make_tensor(make_gmem_ptr(q_ptr), make_shape(sequence.seqlen_q, Int<kHeadDim>{}),
                            make_stride(params.q.row_stride, _1{}));  // (seqlen_q, kHeadDim)
    Tensor gQ =
        local_tile(mQ, Shape<Int<kBlockM>, Int<kHeadDim>>{}, make_coord(tile.m_block, 0));  // (kBlockM, kHeadDim)
    Element *const smem_q = smem_elements + Traits::kOffsetQ;
    Tensor sQ = make_tensor(make_smem_ptr(smem_q), typename Traits::SmemLayoutQ{});  // (kBlockM, kHeadDim)
    const auto sK = [&](int slot) SDPA_INLINE_LAMBDA {                               // (kBlockN, kHeadDim)
      return make_tensor(make_smem_ptr(smem_k + slot * Traits::kTileKV), typename Traits::SmemLayoutKV{});
    };
    const auto sVt = [&](int slot) SDPA_INLINE_LAMBDA {  // (kHeadDim, kBlockN)
      return make_tensor(make_smem_ptr(smem_v + slot * Traits::kTileKV), typename Traits::SmemLayoutVt{});
    };

    // What follows from `value` is computed where it is used.
    const auto again = [](int value) SDPA_INLINE_LAMBDA {
      if constexpr (Traits::kComputesAgain) return Arch::forget_origin(value);
      return value;
    };

    // ---- global → shared ----
    using CopyKV = TileCopy<Traits, kBlockN, typename Traits::KeyOrder>;
    const CopyKV copy_k(k_ptr, sequence.seqlen_k, params.k.row_stride, tid);
    const CopyKV copy_v(v_ptr, sequence.seqlen_k, params.v.row_stride, tid);
    [[maybe_unused]] Tensor tKgK = copy_k.source();  // (8, CPY_N, CPY_K, blocks)
    [[maybe_unused]] Tensor tVgV = copy_v.source();  // (8, CPY_N, CPY_K, blocks)
    const auto load = [&](auto may_end, const CopyKV &copy, const auto &source, int n_block, Element *tile_of_slot,
                          int num_cols) SDPA_INLINE_LAMBDA {
      const int rows_left = sequence.seqlen_k - n_block * kBlockN;
      if constexpr (Traits::kRecomputesAddresses) {
        copy.template load<decltype(may_end)::value>(copy.source(), n_block, tile_of_slot, rows_left, num_cols);
      } else {
        copy.template load<decltype(may_end)::value>(source, n_block, tile_of_slot, rows_left, num_cols);
      }
    };
    // Only a group's first block can reach beyond seqlen_k.
    const auto load_k = [&](auto may_end, int n_block, int slot) SDPA_INLINE_LAMBDA {
      load(may_end, copy_k, tKgK, n_block, smem_k + slot * Traits::kTileKV, again(Traits::head_dim(params)));
    };
    const auto load_v = [&](auto may_end, int n_block, int slot) SDPA_INLINE_LAMBDA {
      load(may_end, copy_v, tVgV, n_block, smem_v + slot * Traits::kTileKV, again(Traits::head_dim_v(params)));
    };

    // ---- shared → registers → MMA ----
    typename Traits::TiledMma tiled_mma;
    const auto thr_mma = tiled_mma.get_slice(tid);
    Tensor tSrQ = thr_mma.partition_fragment_A(sQ);       // (8, MMA_M, kHeadDim / 16)
    Tensor tSrK = thr_mma.partition_fragment_B(sK(0));    // (4, MMA_N, kHeadDim / 16)
    Tensor tOrVt = thr_mma.partition_fragment_B(sVt(0));  // (4, MMA_K, kBlockN / 16)
    const auto smem_copy_q = make_tiled_copy_A(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto smem_copy_k = make_tiled_copy_B(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto smem_copy_v = make_tiled_copy_B(CopyAtomT{}, tiled_mma).get_slice(tid);
    Tensor tSsQ = smem_copy_q.partition_S(sQ);
    Tensor tSrQ_view = smem_copy_q.retile_D(tSrQ);
    Tensor tSrK_view = smem_copy_k.retile_D(tSrK);
    Tensor tOrVt_view = smem_copy_v.retile_D(tOrVt);
    Tensor tScS_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{})
                                           .compose(_, typename Traits::KeyOrder{}));   // → (row, key)
    Tensor tScS = make_tensor(tScS_.data(), accumulator_rows_cols(tScS_.layout()));     // (rows, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)

    // ---- prologue ----
    if constexpr (kKvGroups == 1 && !Traits::kIsSplit) QLoad<Traits>::load(params, tile, sequence, q_ptr, smem_q);
    if constexpr (Traits::kQInRegs) {
      Arch::cp_async_fence();
      Arch::template cp_async_wait<0>();
      Arch::syncthreads();  // Q is in shared memory
      cute::copy(CopyAtom{}, tSsQ, tSrQ_view);
      Arch::syncthreads();  // Q is in registers everywhere: its room may take V
    }
    const int n_block_min = Traits::kMayHaveWindow ? keys.n_block_min : 0;
    int n_block = keys.n_block_max - 1 - group;
    if constexpr (kStages == 1) {
      if constexpr (Traits::kQByRing) {
        QLoad<Traits>::queue(params, tile, sequence, q_ptr, smem_q, tid);
        Arch::cp_async_fence();
      }
      if (n_block >= n_block_min) load_k(true_type{}, n_block, 0);
      Arch::cp_async_fence();
      if constexpr (Traits::kQDirect) QLoad<Traits>::to_registers(params, tile, sequence, q_ptr, gQ, tSrQ, thr_mma);
      if (n_block >= n_block_min) load_v(true_type{}, n_block, kFirstSlotV);
      Arch::cp_async_fence();
      if constexpr (Traits::kQByRing) {
        Arch::template cp_async_wait<2>();
        sync_group(group);  // Q is in shared memory
        cute::copy(CopyAtom{}, tSsQ, tSrQ_view);
        sync_group(group);  // Q is in registers everywhere: its room may take K
      }
      if constexpr (kRing == 3) {
        if (n_block >= n_block_min + kKvGroups) load_k(false_type{}, n_block - kKvGroups, 2);
        Arch::cp_async_fence();
      }
    } else {
      CUTE_UNROLL
      for (int s = 0; s < kStages - 1; ++s) {
        const int ahead = n_block - s * kKvGroups;
        if (ahead >= n_block_min) {
          load_k(true_type{}, ahead, s);
          load_v(true_type{}, ahead, s);
        }
        Arch::cp_async_fence();
      }
    }

    if constexpr (kKvGroups == 1 && Traits::kIsSplit) QLoad<Traits>::store(params, tile, sequence, q_ptr, smem_q);
    if constexpr (kKvGroups > 1) {
      if (params.negate_q) QLoad<Traits>::negate(tSrQ);
    }

    // ---- what only general kernels have ----
    const int first_row = tile.m_block * kBlockM;
    [[maybe_unused]] auto mask = [&] {
      if constexpr (kHasMask) {
        return DenseMask<Traits>(params.mask, tile);
      } else {
        return nullptr;
      }
    }();
    [[maybe_unused]] const auto dropout = [&] {
      if constexpr (Traits::kHasDropout) {
        return Dropout<Traits>(params, tile);
      } else {
        return nullptr;
      }
    }();

    // ---- one key block ----
    bool first = true;            // kStages == 1: the prologue has filled the whole ring
    int slot_k = 0;               // of block n
    int slot_v = kFirstSlotV;     // of block n
    int free_slot = kStages - 1;  // kStages >= 2: of block n + kKvGroups, read by everyone before the next barrier
    const auto step = [&](auto needs_mask) SDPA_INLINE_LAMBDA {
      if constexpr (kStages == 1) {
        if (first) {
          Arch::template cp_async_wait<kRing - 1>();
          sync_group(group);  // K(n) is visible
        } else {
          Arch::template cp_async_wait<kRing - 2>();
          sync_group(group);  // K(n) is visible; the buffer of V before it was read by everyone
          if constexpr (kRing == 2) {
            load_v(false_type{}, n_block, slot_v);
          } else {
            if (n_block >= n_block_min + kKvGroups) load_k(false_type{}, n_block - kKvGroups, before(slot_k));
          }
          Arch::cp_async_fence();
        }
        first = false;
      } else {
        Arch::template cp_async_wait<kStages - 2>();
        sync_group(group);  // K(n) and V(n) are visible; free_slot was read by everyone
        const int ahead = n_block - (kStages - 1) * kKvGroups;
        if (ahead >= n_block_min) {
          load_k(false_type{}, ahead, free_slot);
          load_v(false_type{}, ahead, free_slot);
        }
        Arch::cp_async_fence();
      }

      constexpr bool kWhole = !decltype(needs_mask)::value;
      const int first_col = n_block * kBlockN;
      if constexpr (Traits::kFindsMaskAgain) mask.find_head(Traits::work_tile(params, Arch::block_idx_again()));
      if constexpr (kHasMask) mask.template fetch<kWhole>(tScS, again(first_row), first_col, sequence);
      if constexpr (Traits::kPrefetchesMask) {
        if (n_block > n_block_min)
          mask.prefetch(Arch::thread_idx_again(), again(first_row), first_col - kBlockN, sequence);
      }

      Tensor tSrS = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // ((2, 2), MMA_M, MMA_N)
      clear(tSrS);
      gemm<!kQFromSmem, CopyAtom, CopyAtom>(tiled_mma, tSrS, tSrQ, tSrK, tSsQ, smem_copy_k.partition_S(sK(slot_k)),
                                            tSrQ_view, tSrK_view);

      if constexpr (kStages == 1) {
        Arch::template cp_async_wait<kRing - 2>();
        sync_group(group);  // V(n) is visible; K(n)'s buffer was read by everyone
        if (n_block >= n_block_min + kKvGroups) {
          if constexpr (kRing == 2) {
            load_k(false_type{}, n_block - kKvGroups, slot_k);
          } else {
            load_v(false_type{}, n_block - kKvGroups, slot_k);
          }
        }
        Arch::cp_async_fence();
      }

      Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
      bool is_seen = true;
      if constexpr (kHasMask)
        is_seen = mask.template apply<kWhole>(scores, tScS, again(first_row), first_col, sequence);
      if (is_seen) {
        if constexpr (!kWhole) {
          const int row = Traits::kFindsRowAgain ? Arch::forget_origin(first_row) : again(first_row);
          apply_mask<Traits>(scores, tScS, row, first_col, params, sequence);
        }
        softmax.template update<Traits::kHasBias>(scores, tOrO_rows, params.softmax_scale_log2);

        Tensor tOrP_ = make_tensor<Element>(tSrS.layout());  // ((2, 2), MMA_M, MMA_N)
        convert(tSrS, tOrP_);
        if constexpr (Traits::kHasDropout) {
          Tensor pairs = recast<uint32_t>(tOrP_);  // ((1, 2), MMA_M, MMA_N)
          constexpr bool kFindsRow = kHasMask || Traits::kQInRegs || Traits::kFindsRowAgain;
          dropout.apply(pairs, tScS, kFindsRow ? again(first_row) : first_row, first_col);
        }
        Tensor tOrP =
            make_tensor(tOrP_.data(), accumulator_as_operand_a(tOrP_.layout()));  // ((2, 2, 2), MMA_M, kBlockN / 16)
        gemm<true, CopyAtom, CopyAtomT>(tiled_mma, tOrO, tOrP, tOrVt, tSsQ, smem_copy_v.partition_S(sVt(slot_v)),
                                        tSrQ_view, tOrVt_view);
      }

      n_block -= kKvGroups;
      if constexpr (kStages > 1) {
        free_slot = slot_k;
        slot_k = slot_v = slot_k + 1 == kStages ? 0 : slot_k + 1;
      } else if constexpr (kRing == 3) {
        slot_v = slot_k;
        slot_k = before(slot_k);
      }
    };
    if constexpr (Traits::kMayHaveWindow) {
      // The right end, the blocks that everyone sees, the left end. Both ends are one piece of code.
      int masked_from = keys.n_block_full;
      do {
        while (n_block >= masked_from) step(true_type{});
        while (n_block >= keys.n_block_full_min) step(false_type{});
        masked_from = n_block_min;
      } while (n_block >= n_block_min);
    } else {
      while (n_block >= keys.n_block_full) step(true_type{});
      while (n_block >= 0) step(false_type{});
    }
    Arch::template cp_async_wait<0>();
  }

 private:
  // The first V lies beside the first K in a ring of three; otherwise K and V have buffers of their own, counted alike.
  static constexpr int kFirstSlotV = kStages == 1 && kRing == 3 ? 1 : 0;

  // Buffers are used in the order 0, 1, 2, 0, ... by K and V in turn, so the K after this one, and the V before it, has
  // the buffer before this one.
  SDPA_DEVICE static int before(int slot) { return slot == 0 ? 2 : slot - 1; }

  // fp32 → Element, two at a time. Same layout on both sides.
  template <class Source, class Destination>
  SDPA_DEVICE static void convert(const Source &source, Destination &destination) {
    auto pairs = recast<uint32_t>(destination);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) = arch::pack<Element>(source(2 * i), source(2 * i + 1));
  }
};

}  // namespace sdpa::fmha_fwd
