// The mainloop of both roles: one tile of what is owned over the tiles of the other side. Kernels with one stage, whose
// roles are three, take turns_mainloop.cuh.
//
//   for every streamed tile:   S = A0 B0ᵀ,  mask,  P = exp2(S - lse_log2)
//                              dP = A1 B1ᵀ,  dS = P ∘ (M ∘ dP - delta)          M: dropout's keep mask, or 1
//                              acc0 += dS B0,  and where keys are owned  acc1 += (M ∘ P) B1
//
//   keys role   A0 = K, A1 = V, B0 = Q, B1 = dO: S, P, dP and dS are transposed, acc0 = dK, acc1 = dV. Tiles of all query
//               heads of the key head stream by, head after head, and are summed in float32 in that order.
//   rows role   A0 = Q, A1 = dO, B0 = K, B1 = V: acc0 = dQ.
//
// A dense mask is added to the exponent (dense_mask.cuh), M comes from dropout.cuh. Scales are the epilogue's. B0 and B1
// travel together, kStages - 1 tiles ahead, one barrier a tile.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/mask.cuh"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_bwd/dense_mask.cuh"
#include "sdpa/fmha_bwd/dropout.cuh"
#include "sdpa/fmha_bwd/kernel_traits.cuh"
#include "sdpa/fmha_bwd/row_range.cuh"
#include "sdpa/fmha_fwd/mainloop.cuh"
#include "sdpa/fmha_fwd/tile_copy.cuh"

namespace sdpa::fmha_bwd {

// The owned tile of a CTA.
struct OwnedTile {
  int block;  // n_block or m_block
  int bidb;
  int bidh;  // query head; where keys are owned, the first of its key head
  int bidh_kv;
};

// What fmha_bwd's own roles do about dQ in the loop of those that own keys: nothing. fmha_bwd_fused makes it there, of
// the same dS: see its dq_relay.cuh.
struct NoDq {
  static constexpr bool kIsMade = false;
};

template <class Traits>
struct Mainloop {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using CopyAtom = typename Traits::SmemCopyAtom;
  using CopyAtomT = typename Traits::SmemCopyAtomT;

  static constexpr bool kOwnsKeys = Traits::kOwnsKeys;
  static constexpr int kOwn = Traits::kOwn;
  static constexpr int kStream = Traits::kStream;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kStages = Traits::kStages;

  // dkq and dv ((2, 2), MMA_M, MMA_K) must be zero; dv is not touched in the rows role. The range is not empty.
  template <class Accumulator, class Dq = NoDq>
  SDPA_DEVICE static void run(const Params &params, const OwnedTile &tile, const Sequence &sequence, const Range &range,
                              char *smem, Accumulator &acc0, Accumulator &acc1, [[maybe_unused]] Dq &&dq = Dq{}) {
    constexpr bool kMakesDq = std::remove_reference_t<Dq>::kIsMade;
    const int tid = Arch::thread_idx();
    Element *const smem_elements = reinterpret_cast<Element *>(smem);
    float2 *const smem_statistics = reinterpret_cast<float2 *>(smem + Traits::kOffsetStatistics);

    // ---- tensors ----
    // Where dQ is made too, the loop needs the registers: addresses are found again for every tile.
    const auto bidb = [&]() SDPA_INLINE_LAMBDA { return kMakesDq ? Arch::forget_origin(tile.bidb) : tile.bidb; };
    const auto base = [&](const TensorRef &tensor, int bidh, int64_t first_row) SDPA_INLINE_LAMBDA {
      return static_cast<const Element *>(tensor.data) + bidb() * tensor.batch_stride + bidh * tensor.head_stride +
             first_row * tensor.row_stride;
    };
    const TensorRef &own0 = kOwnsKeys ? params.k : params.q, &own1 = kOwnsKeys ? params.v : params.dout;
    const TensorRef &stream0 = kOwnsKeys ? params.q : params.k, &stream1 = kOwnsKeys ? params.dout : params.v;
    const int own_head = kOwnsKeys ? tile.bidh_kv : tile.bidh, stream_head = kOwnsKeys ? tile.bidh : tile.bidh_kv;
    const int64_t own_row = kOwnsKeys ? sequence.first_row_k : sequence.first_row_q;
    const int64_t stream_row = kOwnsKeys ? sequence.first_row_q : sequence.first_row_k;
    const int own_length = kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q;
    const int stream_length = kOwnsKeys ? sequence.seqlen_q : sequence.seqlen_k;
    const auto sA = [&](int which) SDPA_INLINE_LAMBDA {  // (kOwn, kHeadDim)
      return make_tensor(make_smem_ptr(smem_elements + which * Traits::kTileA), typename Traits::SmemLayoutA{});
    };
    const auto b_at = [&](int slot, int which) SDPA_INLINE_LAMBDA {
      return smem_elements + Traits::kOffsetB + (2 * slot + which) * Traits::kTileB;
    };
    const auto sB = [&](int slot, int which) SDPA_INLINE_LAMBDA {  // (kStream, kHeadDim)
      return make_tensor(make_smem_ptr(b_at(slot, which)), typename Traits::SmemLayoutB{});
    };
    const auto sBt = [&](int slot, int which) SDPA_INLINE_LAMBDA {  // (kHeadDim, kStream)
      return make_tensor(make_smem_ptr(b_at(slot, which)), typename Traits::SmemLayoutBt{});
    };

    // ---- global → shared ----
    using CopyA = fmha_fwd::TileCopy<Traits, kOwn>;
    using CopyB = fmha_fwd::TileCopy<Traits, kStream>;
    const auto load_b = [&](int head, int block, int slot) SDPA_INLINE_LAMBDA {
      const int loader = kMakesDq ? Arch::thread_idx_again() : tid;
      const int rows_left = stream_length - block * kStream;
      const CopyB copy0(base(stream0, stream_head + head, stream_row), stream_length, stream0.row_stride, loader);
      copy0.template load<true>(copy0.source(), block, b_at(slot, 0), rows_left, params.head_dim);
      const CopyB copy1(base(stream1, stream_head + head, stream_row), stream_length, stream1.row_stride, loader);
      copy1.template load<true>(copy1.source(), block, b_at(slot, 1), rows_left, params.head_dim_v);
      if constexpr (kOwnsKeys) {
        if (loader < kStream / 2) {
          const float2 *const from = statistics_of(params, bidb(), tile.bidh + head) + block * kStream + 2 * loader;
          const Copy_Atom<typename Arch::CpAsync, float> copy;
          Tensor source = make_tensor(make_gmem_ptr(reinterpret_cast<const float *>(from)), Layout<_4>{});  // (4)
          Tensor destination = make_tensor(
              make_smem_ptr(reinterpret_cast<float *>(smem_statistics + slot * kStream + 2 * loader)), Layout<_4>{});
          cute::copy(copy.with(true), source, destination);
        }
      }
    };

    // ---- shared → registers → MMA ----
    typename Traits::TiledMma tiled_mma;
    const auto thr_mma = tiled_mma.get_slice(tid);
    Tensor tSrA = thr_mma.partition_fragment_A(sA(0));       // (8, MMA_M, kHeadDim / 16)
    Tensor tSrB = thr_mma.partition_fragment_B(sB(0, 0));    // (4, MMA_N, kHeadDim / 16)
    Tensor tGrBt = thr_mma.partition_fragment_B(sBt(0, 0));  // (4, MMA_K, kStream / 16)
    const auto copy_a = make_tiled_copy_A(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto copy_b = make_tiled_copy_B(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto copy_bt = make_tiled_copy_B(CopyAtomT{}, tiled_mma).get_slice(tid);
    Tensor tSrA_view = copy_a.retile_D(tSrA);
    Tensor tSrB_view = copy_b.retile_D(tSrB);
    Tensor tGrBt_view = copy_bt.retile_D(tGrBt);
    Tensor tScS_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kOwn>, Int<kStream>>{}));  // → (own, streamed)
    Tensor tScS = make_tensor(tScS_.data(), accumulator_rows_cols(tScS_.layout()));              // (rows, cols)

    // A0 or A1 times B0ᵀ or B1ᵀ.
    const auto product = [&](int slot, int which) SDPA_INLINE_LAMBDA {  // ((2, 2), MMA_M, MMA_N)
      Tensor scores = partition_fragment_C(tiled_mma, Shape<Int<kOwn>, Int<kStream>>{});
      clear(scores);
      fmha_fwd::gemm<false, CopyAtom, CopyAtom>(tiled_mma, scores, tSrA, tSrB, copy_a.partition_S(sA(which)),
                                                copy_b.partition_S(sB(slot, which)), tSrA_view, tSrB_view);
      return scores;
    };
    // acc += pairs B, with pairs as `packed` makes them.
    const auto accumulate = [&](Accumulator &acc, auto &pairs, int slot, int which) SDPA_INLINE_LAMBDA {
      Tensor operand = make_tensor(pairs.data(), accumulator_as_operand_a(pairs.layout()));  // ((2,2,2), MMA_M, steps)
      fmha_fwd::gemm<true, CopyAtom, CopyAtomT>(tiled_mma, acc, operand, tGrBt, copy_a.partition_S(sA(0)),
                                                copy_bt.partition_S(sBt(slot, which)), tSrA_view, tGrBt_view);
    };

    // ---- prologue ----
    const int own_left = own_length - tile.block * kOwn;
    const CopyA copy_own0(base(own0, own_head, own_row), own_length, own0.row_stride, tid);
    copy_own0.template load<true>(copy_own0.source(), tile.block, smem_elements, own_left, params.head_dim);
    const CopyA copy_own1(base(own1, own_head, own_row), own_length, own1.row_stride, tid);
    copy_own1.template load<true>(copy_own1.source(), tile.block, smem_elements + Traits::kTileA, own_left,
                                  params.head_dim_v);
    const int num_heads = kOwnsKeys ? params.heads_per_kv : 1;
    const auto block_of = [&](int step) SDPA_INLINE_LAMBDA {  // the last one comes first where dQ is made
      return kMakesDq ? range.min + range.max - 1 - step : step;
    };
    int ahead_head = 0, ahead = range.min;
    const auto load_ahead = [&](int slot) SDPA_INLINE_LAMBDA {
      if (ahead_head < num_heads) {
        load_b(ahead_head, block_of(ahead), slot);
        if (++ahead == range.max) {
          ahead = range.min;
          ++ahead_head;
        }
      }
      Arch::cp_async_fence();
    };
    CUTE_UNROLL
    for (int s = 0; s < kStages - 1; ++s) load_ahead(s);

    // Of the rows that are owned; where keys are, they come with each tile of rows.
    float minus_lse[Traits::kRowsPerThread], delta[Traits::kRowsPerThread];
    if constexpr (!kOwnsKeys) {
      const float2 *const of_tile = statistics_of(params, tile.bidb, tile.bidh) + tile.block * kOwn;
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
    int slot = 0;                 // of this tile
    int free_slot = kStages - 1;  // read by everyone before the next barrier
    for (int head = 0; head < num_heads; ++head) {
      if constexpr (Traits::kHasDropout) dropout.head = tile.bidb * params.num_heads_q + tile.bidh + head;
      CUTE_NO_UNROLL
      for (int step = range.min; step < range.max; ++step) {
        const int block = block_of(step);
        Arch::template cp_async_wait<kStages - 2>();
        Arch::syncthreads();  // B0 and B1 of this tile are visible; free_slot was read by everyone
        load_ahead(free_slot);
        if constexpr (kMakesDq) dq.pass_on();

        const bool needs_mask = block < range.full_min || block >= range.full_max;
        const int first_stream = block * kStream;
        const float2 *const statistics = smem_statistics + slot * kStream;

        [[maybe_unused]] auto mask = mask_of_tile(params, tile, first_stream, sequence);
        if constexpr (Traits::kHasMask) {
          if (params.mask.data != nullptr) mask.fetch(tScS, tile.bidb, tile.bidh + head, first_own, first_stream);
        }

        Tensor tSrS = product(slot, 0);                                                  // ((2, 2), MMA_M, MMA_N)
        Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
        const float scale = params.softmax_scale_log2;
        for_each_pair(scores, [&](int i, int j) SDPA_INLINE_LAMBDA {
          if constexpr (kOwnsKeys) {
            const float4 rows = pair_of(statistics, tScS, j);
            scores(i, j) = fmaf(scores(i, j), scale, -rows.x);
            scores(i, j + 1) = fmaf(scores(i, j + 1), scale, -rows.z);
          } else {
            scores(i, j) = fmaf(scores(i, j), scale, minus_lse[i]);
            scores(i, j + 1) = fmaf(scores(i, j + 1), scale, minus_lse[i]);
          }
        });
        if constexpr (Traits::kHasMask) {
          if (params.mask.data != nullptr)
            mask.add(scores, tScS, tile.bidb, tile.bidh + head, first_own, first_stream, sequence);
        }
        if (needs_mask) {  // behind the scale, which may be negative or 0, and the bias, which may be NaN
          if constexpr (kOwnsKeys) {
            const int first_key = kMakesDq ? Arch::forget_origin(first_own) : first_own;
            apply_row_mask(scores, tScS, first_key, first_stream, sequence);
          } else {
            apply_mask<Traits>(scores, tScS, first_own, first_stream, params, sequence);
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < size(tSrS); ++i) tSrS(i) = Arch::exp2(tSrS(i));
        std::conditional_t<Traits::kHasDropout, KeepBits<Traits>, KeepAll> keep;
        if constexpr (Traits::kHasDropout) keep.draw(dropout, tScS, first_own, first_stream);
        if constexpr (kOwnsKeys) {
          Tensor pairs = packed(tSrS, keep);
          accumulate(acc1, pairs, slot, 1);
        }

        Tensor tSrD = product(slot, 1);                                                 // dP
        Tensor grads = make_tensor(tSrD.data(), accumulator_rows_cols(tSrD.layout()));  // (rows, cols)
        if constexpr (Traits::kHasDropout) {
          CUTE_UNROLL
          for (int i = 0; i < size(tSrD); ++i) tSrD(i) = keep(i) ? tSrD(i) : 0.f;
        }
        for_each_pair(scores, [&](int i, int j) SDPA_INLINE_LAMBDA {
          if constexpr (kOwnsKeys) {
            const float4 rows = pair_of(statistics, tScS, j);
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
        Tensor pairs = packed(tSrD, KeepAll{});
        if constexpr (kMakesDq) dq.keep(pairs);
        accumulate(acc0, pairs, slot, 0);
        if constexpr (kMakesDq) dq.add(tile.bidh + head, block);

        free_slot = slot;
        slot = slot + 1 == kStages ? 0 : slot + 1;
      }
    }
    Arch::template cp_async_wait<0>();
  }

  // Of the tile with the streamed rows from `first_stream` on.
  SDPA_DEVICE static auto mask_of_tile(const Params &params, const OwnedTile &tile, int first_stream,
                                       const Sequence &sequence) {
    if constexpr (Traits::kHasMask) {
      return TileMask<Traits>(params.mask, tile.block * kOwn, first_stream, sequence);
    } else {
      return nullptr;
    }
  }

  // Row 0 of a head.
  SDPA_DEVICE static const float2 *statistics_of(const Params &params, int bidb, int bidh) {
    return params.statistics + (int64_t{bidb} * params.num_heads_q + bidh) * params.padded_rows;
  }

  // lse_log2 and delta of the rows of columns j and j + 1.
  template <class Coords>
  SDPA_DEVICE static float4 pair_of(const float2 *statistics, const Coords &coords, int j) {
    return *reinterpret_cast<const float4 *>(statistics + get<1>(coords(0, j)));
  }

  // Columns j and j + 1 of a row are neighbours. Rows in the inner loop, since columns may have to read something.
  template <class Scores, class Body>
  SDPA_DEVICE static void for_each_pair(const Scores &, Body &&body) {
    constexpr int kRows = decltype(size<0>(Scores{}))::value, kCols = decltype(size<1>(Scores{}))::value;
    CUTE_UNROLL
    for (int j = 0; j < kCols; j += 2) {
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) body(i, j);
    }
  }

  // fp32 → Element, in the same layout; 0 for what is not kept.
  template <class Source, class Keep>
  SDPA_DEVICE static auto packed(const Source &source, const Keep &keep) {
    Tensor elements = make_tensor<Element>(source.layout());
    Tensor pairs = recast<uint32_t>(elements);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i)
      pairs(i) = arch::pack<Element>(keep(2 * i) ? source(2 * i) : 0.f, keep(2 * i + 1) ? source(2 * i + 1) : 0.f);
    return elements;
  }
};

}  // namespace sdpa::fmha_bwd
