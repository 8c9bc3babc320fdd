// The gradient of a bias: dS summed over what the bias is broadcast over, in a launch of its own.
//
//   dbias = (1 / k) · Σ P ∘ (M ∘ (dO Vᵀ) - k · delta)      over batches, heads, rows and keys that share an element
//
// A CTA owns one tile of what the bias has itself, kBlockM rows by kBlockN keys, and goes through all pairs of tiles that
// add to it, or through those of some batches (bias_parts.cuh): batch after batch, head after head, block of rows after
// block of rows, block of keys after block of keys.
// S and dP are recomputed as in the rows role, with its layouts. Sums are in float32 registers and in that order, and are
// rounded once, when they are stored: nothing is as large as the scores unless the bias is, and no atomics are needed.
// The bias is the same for every pair of tiles, and is read once.
//
// A launch goes behind the one that makes row statistics (preprocess.cuh). Of a tile that exists whole, elements of 16 bits
// are read and stored by pairs where strides allow it.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/constants.hpp"
#include "sdpa/attention/mask.cuh"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_bwd/bias_visits.cuh"
#include "sdpa/fmha_bwd/dropout.cuh"
#include "sdpa/fmha_bwd/kernel_traits.cuh"
#include "sdpa/fmha_fwd/mainloop.cuh"
#include "sdpa/fmha_fwd/tile_copy.cuh"

namespace sdpa::fmha_bwd {

template <class Kernel>
struct BiasGradient {
  using Traits = typename Kernel::Rows;
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using CopyAtom = typename Traits::SmemCopyAtom;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kNWarps = Traits::kNWarps;
  static constexpr int kRows = Traits::kRowsPerThread;

  // Shared memory: | Q | dO | K | V |, a tile of each. Q and K load while dP is multiplied, dO and V while S is.
  static constexpr int kSmemBytes = static_cast<int>(sizeof(Element)) * (Traits::kOffsetB + 2 * Traits::kTileB);
  static_assert(kSmemBytes <= Kernel::kSmemBytes, "the row promises what its largest function needs");
  static_assert(kNWarps * kBlockN * static_cast<int>(sizeof(float)) <= kSmemBytes,
                "sums of the warps go there at last");

  SDPA_DEVICE static void run(const BiasParams &params) {
    char *const smem = Arch::dynamic_smem();
    const int tid = Arch::thread_idx();
    int own, n_block, head_block, m_block, bidb, bidh;
    params.n_blocks(head_block, n_block, Arch::block_idx());
    params.m_blocks(own, m_block, head_block);
    params.heads(bidb, bidh, own);
    const Place owned = {bidb, bidh, m_block, n_block};

    // ---- tensors ----
    Element *const smem_elements = reinterpret_cast<Element *>(smem);
    const auto a_at = [&](int which) SDPA_INLINE_LAMBDA { return smem_elements + which * Traits::kTileA; };
    const auto b_at = [&](int which)
                          SDPA_INLINE_LAMBDA { return smem_elements + Traits::kOffsetB + which * Traits::kTileB; };
    const auto sA = [&](int which) SDPA_INLINE_LAMBDA {  // (kBlockM, kHeadDim)
      return make_tensor(make_smem_ptr(a_at(which)), typename Traits::SmemLayoutA{});
    };
    const auto sB = [&](int which) SDPA_INLINE_LAMBDA {  // (kBlockN, kHeadDim)
      return make_tensor(make_smem_ptr(b_at(which)), typename Traits::SmemLayoutB{});
    };

    // ---- global → shared ----
    // Q and K of a pair of tiles for `which` 0, dO and V for 1.
    const auto load = [&](const Place &place, int which) SDPA_INLINE_LAMBDA {
      const Sequence sequence = Sequence::make(params, place.bidb);
      const TensorRef &of_rows = which == 0 ? params.q : params.dout, &of_keys = which == 0 ? params.k : params.v;
      const int num_cols = which == 0 ? params.head_dim : params.head_dim_v;
      const int bidh_kv = params.scheduler.heads_q_per_kv.div(place.bidh);
      const auto base = [&](const TensorRef &tensor, int head, int64_t first_row) SDPA_INLINE_LAMBDA {
        return static_cast<const Element *>(tensor.data) + place.bidb * tensor.batch_stride +
               head * tensor.head_stride + first_row * tensor.row_stride;
      };
      const fmha_fwd::TileCopy<Traits, kBlockM> copy_a(base(of_rows, place.bidh, sequence.first_row_q),
                                                       sequence.seqlen_q, of_rows.row_stride, tid);
      copy_a.template load<true>(copy_a.source(), place.m_block, a_at(which),
                                 sequence.seqlen_q - place.m_block * kBlockM, num_cols);
      const fmha_fwd::TileCopy<Traits, kBlockN> copy_b(base(of_keys, bidh_kv, sequence.first_row_k), sequence.seqlen_k,
                                                       of_keys.row_stride, tid);
      copy_b.template load<true>(copy_b.source(), place.n_block, b_at(which),
                                 sequence.seqlen_k - place.n_block * kBlockN, num_cols);
      Arch::cp_async_fence();
    };

    // ---- shared → registers → MMA ----
    typename Traits::TiledMma tiled_mma;
    const auto thr_mma = tiled_mma.get_slice(tid);
    Tensor tSrA = thr_mma.partition_fragment_A(sA(0));  // (8, MMA_M, kHeadDim / 16)
    Tensor tSrB = thr_mma.partition_fragment_B(sB(0));  // (4, MMA_N, kHeadDim / 16)
    const auto copy_a = make_tiled_copy_A(CopyAtom{}, tiled_mma).get_slice(tid);
    const auto copy_b = make_tiled_copy_B(CopyAtom{}, tiled_mma).get_slice(tid);
    Tensor tSrA_view = copy_a.retile_D(tSrA);
    Tensor tSrB_view = copy_b.retile_D(tSrB);
    Tensor tScS_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{}));  // → (row, key)
    Tensor tScS = make_tensor(tScS_.data(), accumulator_rows_cols(tScS_.layout()));                 // (rows, cols)
    const auto product = [&](int which) SDPA_INLINE_LAMBDA {  // ((2, 2), MMA_M, MMA_N)
      Tensor scores = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
      clear(scores);
      fmha_fwd::gemm<false, CopyAtom, CopyAtom>(tiled_mma, scores, tSrA, tSrB, copy_a.partition_S(sA(which)),
                                                copy_b.partition_S(sB(which)), tSrA_view, tSrB_view);
      return scores;
    };

    Visits<Traits> visits(params, owned);
    if (!visits.is_done()) load(visits.place, 0);
    Tensor sum = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});    // ((2, 2), MMA_M, MMA_N)
    Tensor bias_ = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kBlockN>>{});  // ((2, 2), MMA_M, MMA_N)
    Tensor bias = make_tensor(bias_.data(), accumulator_rows_cols(bias_.layout()));       // (rows, cols)
    clear(sum);
    clear(bias_);
    read_bias(bias, tScS, params, owned);

    [[maybe_unused]] auto dropout = [&] {
      if constexpr (Traits::kHasDropout) {
        return Dropout<Traits>(params, WorkTile{0, 0, 0, 0});
      } else {
        return nullptr;
      }
    }();

    // ---- one pair of tiles ----
    while (!visits.is_done()) {
      const Place place = visits.place;
      const Sequence sequence = Sequence::make(params, place.bidb);
      const int first_row = place.m_block * kBlockM, first_key = place.n_block * kBlockN;
      float minus_lse[kRows], delta[kRows];
      const float2 *const statistics =
          params.statistics + (int64_t{place.bidb} * params.num_heads_q + place.bidh) * params.padded_rows + first_row;
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const float2 row = statistics[get<0>(tScS(i, 0))];
        minus_lse[i] = -row.x;
        delta[i] = row.y;
      }

      Arch::template cp_async_wait<0>();
      Arch::syncthreads();  // Q and K are visible; dO and V of the last pair were read by everyone
      load(place, 1);
      Tensor tSrS = product(0);
      Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(scores); ++j)
          scores(i, j) = fmaf(bias(i, j), kLog2e, fmaf(scores(i, j), params.softmax_scale_log2, minus_lse[i]));
      }
      if (visits.needs_mask(place, sequence)) {  // behind the bias, which may be NaN where a key is hidden
        apply_mask<Traits>(scores, tScS, first_row, first_key, params, sequence);
        hide_rows(scores, tScS, sequence.seqlen_q - first_row);
      }
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) = Arch::exp2(tSrS(i));
      std::conditional_t<Traits::kHasDropout, KeepBits<Traits>, KeepAll> keep;
      if constexpr (Traits::kHasDropout) {
        dropout.head = place.bidb * params.num_heads_q + place.bidh;
        keep.draw(dropout, tScS, first_row, first_key);
      }

      visits.next();
      Arch::template cp_async_wait<0>();
      Arch::syncthreads();  // dO and V are visible; Q and K were read by everyone
      if (!visits.is_done()) load(visits.place, 0);
      Tensor tSrD = product(1);                                                       // dP
      Tensor grads = make_tensor(tSrD.data(), accumulator_rows_cols(tSrD.layout()));  // (rows, cols)
      if constexpr (Traits::kHasDropout) {
        CUTE_UNROLL
        for (int i = 0; i < size(tSrD); ++i) tSrD(i) = keep(i) ? tSrD(i) : 0.f;
      }
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(scores); ++j) grads(i, j) = scores(i, j) * (grads(i, j) - delta[i]);
      }
      CUTE_UNROLL
      for (int i = 0; i < size(sum); ++i)
        sum(i) += tSrS(i) == 0.f ? 0.f : tSrD(i);  // 0 times what a hidden element has as dP may be NaN
    }

    Tensor sums = make_tensor(sum.data(), accumulator_rows_cols(sum.layout()));  // (rows, cols)
    store(sums, tScS, params, owned, reinterpret_cast<float *>(smem));
  }

  // Calls `body` with a 0 of an element's type.
  template <class Body>
  SDPA_DEVICE static void with_type(MaskType type, Body body) {
    if (type == MaskType::kF32) {
      body(float{});
    } else if (type == MaskType::kF16) {
      body(cutlass::half_t{});
    } else {
      body(cutlass::bfloat16_t{});
    }
  }

 private:
  // bias, coords: (rows, cols). Elements that the bias does not have stay as they are.
  template <class Bias, class Coords>
  SDPA_DEVICE static void read_bias(Bias &bias, const Coords &coords, const BiasParams &params, const Place &owned) {
    const MaskRef &mask = params.mask;
    const char *const head = mask.data + owned.bidb * mask.batch_stride + owned.bidh * mask.head_stride;
    with_type(mask.type, [&](auto zero) SDPA_INLINE_LAMBDA {
      using Given = decltype(zero);
      if constexpr (sizeof(Given) == 2) {
        if (mask.is_vectorised && is_whole(params, owned)) {
          CUTE_UNROLL
          for (int i = 0; i < size<0>(bias); ++i) {
            const int row = owned.m_block * kBlockM + get<0>(coords(i, 0));
            CUTE_UNROLL
            for (int j = 0; j < size<1>(bias); j += 2) {
              const int key = owned.n_block * kBlockN + get<1>(coords(i, j));
              const char *const at = head + row * mask.row_stride + key * int{sizeof(Given)};
              Arch::check_alignment(at, 4);
              const uint32_t pair = *reinterpret_cast<const uint32_t *>(at);
              bias(i, j) = static_cast<float>(Given::bitcast(static_cast<uint16_t>(pair)));
              bias(i, j + 1) = static_cast<float>(Given::bitcast(static_cast<uint16_t>(pair >> 16)));
            }
          }
          return;
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < size<0>(bias); ++i) {
        const int row = owned.m_block * kBlockM + get<0>(coords(i, 0));
        CUTE_UNROLL
        for (int j = 0; j < size<1>(bias); ++j) {
          const int key = owned.n_block * kBlockN + get<1>(coords(i, j));
          if (row < params.seqlen_q && key < params.seqlen_k)
            bias(i, j) = static_cast<float>(
                *reinterpret_cast<const Given *>(head + row * mask.row_stride + key * mask.column_stride));
        }
      }
    });
  }

  // Whether all rows and keys of the tile exist.
  SDPA_DEVICE static bool is_whole(const BiasParams &params, const Place &owned) {
    return (owned.m_block + 1) * kBlockM <= params.seqlen_q && (owned.n_block + 1) * kBlockN <= params.seqlen_k;
  }

  // Rows of the tile from `length` on.
  template <class Scores, class Coords>
  SDPA_DEVICE static void hide_rows(Scores &scores, const Coords &coords, int length) {
    CUTE_UNROLL
    for (int i = 0; i < size<0>(scores); ++i) {
      const bool attends = get<0>(coords(i, 0)) < length;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(scores); ++j) scores(i, j) = attends ? scores(i, j) : -INFINITY;
    }
  }

  // sums, coords: (rows, cols). What rows or keys share is added up across the CTA first, in an order that is fixed.
  template <class Sums, class Coords>
  SDPA_DEVICE static void store(const Sums &sums, const Coords &coords, const BiasParams &params, const Place &owned,
                                float *partial) {
    constexpr int kCols = decltype(size<1>(Sums{}))::value;
    const int tid = Arch::thread_idx(), warp = tid / 32, lane = tid % 32;
    const int first_row = owned.m_block * kBlockM, first_key = owned.n_block * kBlockN;
    const auto put_as = [&](auto zero, int row, int key, float value) SDPA_INLINE_LAMBDA {
      using Out = decltype(zero);
      if (row >= params.seqlen_q || key >= params.seqlen_k) return;
      Out *const head =
          static_cast<Out *>(params.dbias) + owned.bidb * params.dbias_stride[0] + owned.bidh * params.dbias_stride[1];
      head[row * params.dbias_stride[2] + key * params.dbias_stride[3]] = Out(value * params.dropout.keep_scale);
    };
    const auto put = [&](int row, int key, float value) SDPA_INLINE_LAMBDA {
      with_type(params.dbias_type, [&](auto zero) SDPA_INLINE_LAMBDA { put_as(zero, row, key, value); });
    };
    if (!params.sums_rows && !params.sums_keys) {
      with_type(params.dbias_type, [&](auto zero) SDPA_INLINE_LAMBDA {
        using Out = decltype(zero);
        if constexpr (sizeof(Out) == 2) {
          if (params.has_dbias_pairs && is_whole(params, owned)) {
            Out *const head = static_cast<Out *>(params.dbias) + owned.bidb * params.dbias_stride[0] +
                              owned.bidh * params.dbias_stride[1];
            CUTE_UNROLL
            for (int i = 0; i < kRows; ++i) {
              CUTE_UNROLL
              for (int j = 0; j < kCols; j += 2) {
                Out *const at = head + (first_row + get<0>(coords(i, 0))) * params.dbias_stride[2] + first_key +
                                get<1>(coords(i, j));
                Arch::check_alignment(at, 4);
                *reinterpret_cast<uint32_t *>(at) =
                    arch::pack<Out>(sums(i, j) * params.dropout.keep_scale, sums(i, j + 1) * params.dropout.keep_scale);
              }
            }
            return;
          }
        }
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) {
          CUTE_UNROLL
          for (int j = 0; j < kCols; ++j)
            put_as(zero, first_row + get<0>(coords(i, 0)), first_key + get<1>(coords(i, j)), sums(i, j));
        }
      });
    } else if (!params.sums_rows) {  // a quad of lanes has a row
      CUTE_UNROLL
      for (int i = 0; i < kRows; ++i) {
        float total = 0.f;
        CUTE_UNROLL
        for (int j = 0; j < kCols; ++j) total += sums(i, j);
        total = Softmax<Arch, kRows>::across_quad(total);
        if (lane % 4 == 0) put(first_row + get<0>(coords(i, 0)), 0, total);
      }
    } else {                // every warp has all keys: (kNWarps, kBlockN)
      Arch::syncthreads();  // dO and V, where the partial sums go, were read by everyone
      CUTE_UNROLL
      for (int j = 0; j < kCols; ++j) {
        float total = 0.f;
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) total += sums(i, j);
        CUTE_UNROLL
        for (int step = 4; step < 32; step *= 2) total += Arch::shfl_xor(total, step);
        if (lane < 4) partial[warp * kBlockN + get<1>(coords(0, j))] = total;
      }
      Arch::syncthreads();  // the partial sums of all warps are visible
      const auto of_key = [&](int key) SDPA_INLINE_LAMBDA {
        float total = 0.f;
        CUTE_UNROLL
        for (int w = 0; w < kNWarps; ++w) total += partial[w * kBlockN + key];
        return total;
      };
      if (!params.sums_keys) {
        for (int key = tid; key < kBlockN; key += Traits::kThreads) put(0, first_key + key, of_key(key));
      } else if (tid == 0) {
        float total = 0.f;
        CUTE_NO_UNROLL
        for (int key = 0; key < kBlockN; ++key) total += of_key(key);
        put(0, 0, total);
      }
    }
  }
};

}  // namespace sdpa::fmha_bwd
