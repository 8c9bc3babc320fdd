// The mainloop of kernels with one stage, whose CTAs make one gradient each: dQ, dK or dV.
//
//   dk and rows roles, for every streamed tile:   dP = A1 B1ᵀ,  S = A0 B0ᵀ,  mask,  P = exp2(S - lse_log2)
//                                                 dS = P ∘ (M ∘ dP - delta),  acc += dS B0
//   dv role:                                      S = A0 B0ᵀ,  mask,  P = exp2(S - lse_log2)
//                                                 acc += (M ∘ P) B1
//
// Operands and results are those of mainloop.cuh. B0 and B1 have one buffer each and load in turns: what a tile needs
// first loads while the last tile's other operand is multiplied, and that one while the first is. Two barriers a tile.
// Row statistics travel with Q, since they belong to S.
#pragma once

#include "sdpa/fmha_bwd/mainloop.cuh"

namespace sdpa::fmha_bwd {

template <class Traits>
struct TurnsMainloop {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using CopyAtom = typename Traits::SmemCopyAtom;
  using CopyAtomT = typename Traits::SmemCopyAtomT;
  using Shared = Mainloop<Traits>;  // what does not depend on the order of loads
  using Keep = std::conditional_t<Traits::kHasDropout, KeepBits<Traits>, KeepAll>;

  static constexpr bool kOwnsKeys = Traits::kOwnsKeys;
  static constexpr bool kNeedsDp = Traits::kNeedsDp;
  static constexpr int kOwn = Traits::kOwn;
  static constexpr int kStream = Traits::kStream;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static_assert(Traits::kStages == 1);

  // acc ((2, 2), MMA_M, MMA_K) must be zero. The range is not empty.
  template <class Accumulator>
  SDPA_DEVICE static void run(const Params &params, const OwnedTile &tile, const Sequence &sequence, const Range &range,
                              char *smem, Accumulator &acc) {
    const int tid = Arch::thread_idx();
    Element *const smem_elements = reinterpret_cast<Element *>(smem);
    float2 *const statistics = reinterpret_cast<float2 *>(smem + Traits::kOffsetStatistics);

    // ---- tensors ----
    const auto base = [&](const TensorRef &tensor, int bidh, int64_t first_row) SDPA_INLINE_LAMBDA {
      return static_cast<const Element *>(tensor.data) + tile.bidb * tensor.batch_stride + bidh * tensor.head_stride +
             first_row * tensor.row_stride;
    };
    const int own_head = kOwnsKeys ? tile.bidh_kv : tile.bidh, stream_head = kOwnsKeys ? tile.bidh : tile.bidh_kv;
    const int64_t own_row = kOwnsKeys ? sequence.first_row_k : sequence.first_row_q;
    const int64_t stream_row = kOwnsKeys ? sequence.first_row_q : sequence.first_row_k;
    const int own_length = kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q;
    const int stream_length = kOwnsKeys ? sequence.seqlen_q : sequence.seqlen_k;
    const auto b_at = [&](int which)
                          SDPA_INLINE_LAMBDA { return smem_elements + Traits::kOffsetB + which * Traits::kTileB; };
    const auto sA = [&](int which) SDPA_INLINE_LAMBDA {  // (kOwn, kHeadDim)
      return make_tensor(make_smem_ptr(smem_elements + which * Traits::kTileA), typename Traits::SmemLayoutA{});
    };
    const auto sB = [&](int which) SDPA_INLINE_LAMBDA {  // (kStream, kHeadDim)
      return make_tensor(make_smem_ptr(b_at(which)), typename Traits::SmemLayoutB{});
    };
    const auto sBt = [&](int which) SDPA_INLINE_LAMBDA {  // (kHeadDim, kStream)
      return make_tensor(make_smem_ptr(b_at(which)), typename Traits::SmemLayoutBt{});
    };

    // ---- global → shared ----
    const auto load_a = [&](int which) SDPA_INLINE_LAMBDA {
      const TensorRef &tensor = kOwnsKeys ? (which == 0 ? params.k : params.v) : (which == 0 ? params.q : params.dout);
      const fmha_fwd::TileCopy<Traits, kOwn> copy(base(tensor, own_head, own_row), own_length, tensor.row_stride, tid);
      copy.template load<true>(copy.source(), tile.block, smem_elements + which * Traits::kTileA,
                               own_length - tile.block * kOwn, which == 0 ? params.head_dim : params.head_dim_v);
    };
    // B0 and its row statistics, or B1.
    const auto load_b = [&](int which, int head, int block) SDPA_INLINE_LAMBDA {
      const int tid = Arch::thread_idx_again();  // the loop needs the registers: addresses are computed again
      const TensorRef &tensor = kOwnsKeys ? (which == 0 ? params.q : params.dout) : (which == 0 ? params.k : params.v);
      const fmha_fwd::TileCopy<Traits, kStream> copy(base(tensor, stream_head + head, stream_row), stream_length,
                                                     tensor.row_stride, tid);
      copy.template load<true>(copy.source(), block, b_at(which), stream_length - block * kStream,
                               which == 0 ? params.head_dim : params.head_dim_v);
      if (kOwnsKeys && which == 0 && tid < kStream / 2) {
        const float2 *const from =
            Shared::statistics_of(params, tile.bidb, tile.bidh + head) + block * kStream + 2 * tid;
        const Copy_Atom<typename Arch::CpAsync, float> copy_statistics;
        Tensor source = make_tensor(make_gmem_ptr(reinterpret_cast<const float *>(from)), Layout<_4>{});  // (4)
        Tensor destination =
            make_tensor(make_smem_ptr(reinterpret_cast<float *>(statistics + 2 * tid)), Layout<_4>{});  // (4)
        cute::copy(copy_statistics.with(true), source, destination);
      }
      Arch::cp_async_fence();
    };

    // ---- shared → registers → MMA ----
    typename Traits::TiledMma tiled_mma;
    const auto thr_mma = tiled_mma.get_slice(tid);
    Tensor tSrA = thr_mma.partition_fragment_A(sA(0));    // (8, MMA_M, kHeadDim / 16)
    Tensor tSrB = thr_mma.partition_fragment_B(sB(0));    // (4, MMA_N, kHeadDim / 16)
    Tensor tGrBt = thr_mma.partition_fragment_B(sBt(0));  // (4, MMA_K, kStream / 16)
    const auto copy_a = make_tiled_copy_A(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto copy_b = make_tiled_copy_B(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto copy_bt = make_tiled_copy_B(CopyAtomT{}, tiled_mma).get_slice(tid);
    Tensor tSrA_view = copy_a.retile_D(tSrA);
    Tensor tSrB_view = copy_b.retile_D(tSrB);
    Tensor tGrBt_view = copy_bt.retile_D(tGrBt);
    Tensor tScS_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kOwn>, Int<kStream>>{}));  // → (own, streamed)
    Tensor tScS = make_tensor(tScS_.data(), accumulator_rows_cols(tScS_.layout()));              // (rows, cols)

    // A0 B0ᵀ or A1 B1ᵀ.
    const auto product = [&](int which) SDPA_INLINE_LAMBDA {  // ((2, 2), MMA_M, MMA_N)
      Tensor scores = partition_fragment_C(tiled_mma, Shape<Int<kOwn>, Int<kStream>>{});
      clear(scores);
      fmha_fwd::gemm<false, CopyAtom, CopyAtom>(tiled_mma, scores, tSrA, tSrB, copy_a.partition_S(sA(which)),
                                                copy_b.partition_S(sB(which)), tSrA_view, tSrB_view);
      return scores;
    };
    // acc += pairs B, with pairs as `packed` makes them.
    const auto accumulate = [&](auto &pairs, int which) SDPA_INLINE_LAMBDA {
      Tensor operand = make_tensor(pairs.data(), accumulator_as_operand_a(pairs.layout()));  // ((2,2,2), MMA_M, steps)
      fmha_fwd::gemm<true, CopyAtom, CopyAtomT>(tiled_mma, acc, operand, tGrBt, copy_a.partition_S(sA(0)),
                                                copy_bt.partition_S(sBt(which)), tSrA_view, tGrBt_view);
    };

    // ---- prologue ----
    constexpr int kFirst = kNeedsDp ? 1 : 0, kSecond = 1 - kFirst;  // B1 or B0, in the order in which a tile needs them
    const int num_heads = kOwnsKeys ? params.heads_per_kv : 1;
    load_a(0);
    if constexpr (kNeedsDp) load_a(1);
    load_b(kFirst, 0, range.min);

    // Of the rows that are owned; where keys are, they come with each tile of rows.
    [[maybe_unused]] float minus_lse[Traits::kRowsPerThread], delta[Traits::kRowsPerThread];
    if constexpr (!kOwnsKeys) {
      const float2 *const of_tile = Shared::statistics_of(params, tile.bidb, tile.bidh) + tile.block * kOwn;
      CUTE_UNROLL
      for (int i = 0; i < Traits::kRowsPerThread; ++i) {
        const float2 row = of_tile[get<0>(tScS(i, 0))];
        minus_lse[i] = -row.x;
        delta[i] = row.y;
      }
    }

    [[maybe_unused]] auto dropout = [&] {
      if constexpr (Traits::kHasDropout) {
        return Dropout<Traits>(params, WorkTile{0, tile.bidh, tile.bidh_kv, tile.bidb});
      } else {
        return nullptr;
      }
    }();

    // ---- one streamed tile ----
    const int first_own = tile.block * kOwn;
    for (int head = 0; head < num_heads; ++head) {
      if constexpr (Traits::kHasDropout) dropout.head = tile.bidb * params.num_heads_q + tile.bidh + head;
      CUTE_NO_UNROLL
      for (int block = range.min; block < range.max; ++block) {
        const bool needs_mask = block < range.full_min || block >= range.full_max;
        const int first_stream = block * kStream;
        const auto probabilities = [&]() SDPA_INLINE_LAMBDA {  // ((2, 2), MMA_M, MMA_N)
          Tensor tSrS = product(0);
          Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
          const float scale = params.softmax_scale_log2;
          Shared::for_each_pair(scores, [&](int i, int j) SDPA_INLINE_LAMBDA {
            if constexpr (kOwnsKeys) {
              const float4 rows = Shared::pair_of(statistics, tScS, j);
              scores(i, j) = fmaf(scores(i, j), scale, -rows.x);
              scores(i, j + 1) = fmaf(scores(i, j + 1), scale, -rows.z);
            } else {
              scores(i, j) = fmaf(scores(i, j), scale, minus_lse[i]);
              scores(i, j + 1) = fmaf(scores(i, j + 1), scale, minus_lse[i]);
            }
          });
          if constexpr (Traits::kHasMask) {
            if (params.mask.data != nullptr)
              Shared::mask_of_tile(params, tile, first_stream, sequence)
                  .add(scores, tScS, tile.bidb, tile.bidh + head, first_own, first_stream, sequence);
          }
          if (needs_mask) {  // behind the scale, which may be negative or 0, and the bias, which may be NaN
            if constexpr (kOwnsKeys) {
              apply_row_mask(scores, tScS, first_own, first_stream, sequence);
            } else {
              apply_mask<Traits>(scores, tScS, first_own, first_stream, params, sequence);
            }
          }
          CUTE_UNROLL
          for (int i = 0; i < size(tSrS); ++i) tSrS(i) = Arch::exp2(tSrS(i));
          return tSrS;
        };
        // Dropped elements become 0.
        const auto drop = [&](auto &values) SDPA_INLINE_LAMBDA {
          if constexpr (Traits::kHasDropout) {
            Keep keep;
            keep.draw(dropout, tScS, first_own, first_stream);
            CUTE_UNROLL
            for (int i = 0; i < size(values); ++i) values(i) = keep(i) ? values(i) : 0.f;
          }
        };
        const auto load_next_first = [&]() SDPA_INLINE_LAMBDA {
          const bool is_last = block + 1 == range.max;
          if (!is_last || head + 1 < num_heads)
            load_b(kFirst, is_last ? head + 1 : head, is_last ? range.min : block + 1);
        };

        Arch::template cp_async_wait<0>();
        Arch::syncthreads();  // the first operand is visible; the second one of the last tile was read by everyone
        load_b(kSecond, head, block);
        if constexpr (kNeedsDp) {
          Tensor tSrD = product(1);  // dP
          drop(tSrD);
          Arch::template cp_async_wait<0>();
          Arch::syncthreads();  // B0 is visible; B1 was read by everyone
          load_next_first();
          Tensor tSrS = probabilities();
          Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
          Tensor grads = make_tensor(tSrD.data(), accumulator_rows_cols(tSrD.layout()));   // (rows, cols)
          Shared::for_each_pair(scores, [&](int i, int j) SDPA_INLINE_LAMBDA {
            if constexpr (kOwnsKeys) {
              const float4 rows = Shared::pair_of(statistics, tScS, j);
              grads(i, j) = scores(i, j) * (grads(i, j) - rows.y);
              grads(i, j + 1) = scores(i, j + 1) * (grads(i, j + 1) - rows.w);
            } else {
              grads(i, j) = scores(i, j) * (grads(i, j) - delta[i]);
              grads(i, j + 1) = scores(i, j + 1) * (grads(i, j + 1) - delta[i]);
            }
          });
          if (Traits::kHasMask || needs_mask) {  // 0 times what a hidden element has as dP may be NaN
            CUTE_UNROLL
            for (int i = 0; i < size(tSrD); ++i) tSrD(i) = tSrS(i) == 0.f ? 0.f : tSrD(i);
          }
          Tensor pairs = Shared::packed(tSrD, KeepAll{});
          accumulate(pairs, 0);
        } else {
          Tensor tSrS = probabilities();
          drop(tSrS);
          Tensor pairs = Shared::packed(tSrS, KeepAll{});
          Arch::template cp_async_wait<0>();
          Arch::syncthreads();  // B1 is visible; B0 was read by everyone
          load_next_first();
          accumulate(pairs, 1);
        }
      }
    }
  }
};

}  // namespace sdpa::fmha_bwd
