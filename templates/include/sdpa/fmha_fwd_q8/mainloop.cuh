// The mainloop: O (kBlockM x kHeadDim) and the softmax statistics of one query tile over its key blocks.
//
//   for every key block:  S = Q̂ K̂ᵀ in integers,  mask,  P = streaming softmax (S),  O += P V
//
// Blocks are visited from the last to the first, as in fmha_fwd/mainloop.cuh, kStages - 1 of them ahead: one barrier a
// block. The sums of Q̂ K̂ᵀ start at kMagicBits instead of 0, so that they are floats when they are done. With V of bytes,
// the sums of P̂ V̂ are integers of one block: they are made for a few columns of O at a time, and each is added to O
// with its row's weight, so no second O is needed. With kShiftsO they start at kMagicBits too, and the softmax takes
// kMagic from O again. A boolean mask selects among the sums, a bias turns them into logits.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/arch/static_for.hpp"
#include "sdpa/attention/dense_mask.cuh"
#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/mask.cuh"
#include "sdpa/fmha_fwd_q8/biased_softmax.cuh"
#include "sdpa/fmha_fwd_q8/q_prologue.cuh"
#include "sdpa/fmha_fwd_q8/tile_copy.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct Mainloop {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = SoftmaxOf<Traits>;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kStages = Traits::kStages;
  static constexpr int kRows = Traits::kRowsPerThread;

  // tOrO ((2, 2), MMA_M, MMA_K) must be zero. keys.n_block_max > 0.
  template <class Accumulator>
  SDPA_DEVICE static void run(const Params &params, const WorkTile &tile, const Sequence &sequence,
                              const KeyRange &keys, char *smem, Accumulator &tOrO, SoftmaxState &softmax) {
    const int tid = Arch::thread_idx();
    int8_t *const smem_q = reinterpret_cast<int8_t *>(smem);
    Tensor sQ = make_tensor(make_smem_ptr(smem_q), typename Traits::SmemLayoutQ{});  // (kBlockM, kHeadDim)
    const auto sK = [&](int stage) SDPA_INLINE_LAMBDA {                              // (kBlockN, kHeadDim)
      return make_tensor(make_smem_ptr(smem_q + Traits::kOffsetK + stage), typename Traits::SmemLayoutK{});
    };

    typename Traits::TiledMmaQk mma_qk;
    const auto thr_qk = mma_qk.get_slice(tid);
    Tensor tSrQ = thr_qk.partition_fragment_A(sQ);     // (16, MMA_M, kHeadDim / 32)
    Tensor tSrK = thr_qk.partition_fragment_B(sK(0));  // (8, MMA_N, kHeadDim / 32)
    const auto ldsm_q = make_tiled_copy_A(typename Traits::ByteLdsm{}, mma_qk).get_slice(tid);
    const auto ldsm_k = make_tiled_copy_B(typename Traits::ByteLdsm{}, mma_qk).get_slice(tid);
    Tensor tSrK_view = ldsm_k.retile_D(tSrK);
    Tensor tScS_ = thr_qk.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{})
                                          .compose(_, typename Traits::KeyOrder{}));    // → (row, key)
    Tensor tScS = make_tensor(tScS_.data(), accumulator_rows_cols(tScS_.layout()));     // (rows, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)

    // ---- prologue ----
    int n_block = keys.n_block_max - 1;
    TileCopy<Traits> copy(params, tile, sequence, n_block, smem);
    if (n_block >= keys.n_block_min) copy.template load<true>(0);
    Arch::cp_async_fence();
    CUTE_UNROLL
    for (int s = 1; s < kStages - 1; ++s) {
      if (n_block - s >= keys.n_block_min) copy.template load<false>(s * Traits::kStageBytes);
      Arch::cp_async_fence();
    }
    QPrologue<Traits>::run(params, tile, sequence, smem_q, softmax.q_scale);
    const auto load_q = [&] SDPA_INLINE_LAMBDA {
      cute::copy(typename Traits::ByteLdsm{}, ldsm_q.partition_S(sQ), ldsm_q.retile_D(tSrQ));
    };
    if constexpr (Traits::kKeepsQ) {
      Arch::syncwarp();  // the warp's own rows of Q are in shared memory
      load_q();
    }

    const auto start = make_start();

    // ---- one key block ----
    int stage = 0;                                         // where block n_block lies, from the first stage on
    int free_stage = (kStages - 1) * Traits::kStageBytes;  // of block n_block - kStages + 1
    const int first_row = static_cast<int>(Arch::uniform(static_cast<uint32_t>(tile.m_block * kBlockM)));
    [[maybe_unused]] auto mask = [&] {
      if constexpr (Traits::kHasMask) {
        return DenseMask<Traits>(params.mask, tile);
      } else {
        return nullptr;
      }
    }();
    const auto step = [&](auto needs_mask) SDPA_INLINE_LAMBDA {
      const float k_scale = copy.next_k_scale();
      Arch::template cp_async_wait<kStages - 2>();
      Arch::syncthreads();  // Q, K(n), V(n) and scales are visible; free_stage was read by everyone
      const int ahead = n_block - (kStages - 1);
      if (ahead >= keys.n_block_min) copy.template load<false>(free_stage);
      Arch::cp_async_fence();

      constexpr bool kWhole = !decltype(needs_mask)::value;
      const int first_col = n_block * kBlockN;
      if constexpr (Traits::kShiftsO) softmax.is_due |= n_block % SoftmaxState::kTerms == 0;
      if constexpr (Traits::kHasMask) mask.template fetch<kWhole>(tScS, first_row, first_col, sequence);

      Tensor tSrS_ = make_tensor<uint32_t>(
          partition_shape_C(mma_qk, Shape<Int<kBlockM>, Int<kBlockN>>{}));  // ((2, 2), MMA_M, MMA_N), kMagicBits + S
      if constexpr (!Traits::kKeepsQ) load_q();
      multiply_qk(mma_qk, tSrS_, tSrQ, tSrK, ldsm_k.partition_S(sK(stage)), tSrK_view, start);
      Tensor tSrS = make_tensor<float>(tSrS_.layout());  // ((2, 2), MMA_M, MMA_N)
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) = to_float(tSrS_(i));
      Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
      bool is_seen = true;
      if constexpr (Traits::kHasMask) {
        float c[kRows];  // for biases
        CUTE_UNROLL
        for (int i = 0; i < kRows; ++i) c[i] = softmax.factor(i, k_scale);
        const auto add = [&](int i, float &score, float bias) SDPA_INLINE_LAMBDA {
          if constexpr (Traits::kHasBias) SoftmaxState::add_bias(score, bias, c[i]);
        };
        is_seen = mask.template apply<kWhole>(scores, tScS, first_row, first_col, sequence, add);
      }
      if (is_seen) {
        if constexpr (!kWhole) apply_mask<Traits>(scores, tScS, first_row, first_col, params, sequence);

        if constexpr (Traits::kQuantizesV) {
          const int8_t *const smem_v = smem_q + Traits::kOffsetV + stage;
          // This lane's first token of every 16, whose scale may be that of all its others. Alike in all lanes.
          const float *const v_log2 =
              reinterpret_cast<const float *>(smem + Traits::kOffsetScales + stage) + tid % 4 * 4;
          const float *const v_inverse = v_log2 + kBlockN;
          float weight[kRows];
          if (!Arch::any(*v_inverse < 0.f)) {
            softmax.update(scores, tOrO_rows, k_scale, v_log2, v_inverse, weight);
            add_bytes(tOrO, tSrS, weight, smem_v, start);
          } else {
            softmax.update(scores, tOrO_rows, k_scale, *v_log2, -*v_inverse, weight);
            add_bytes(tOrO, tSrS, weight, smem_v, start);
          }
        } else {
          softmax.update(scores, tOrO_rows, k_scale);
          add_halves(tOrO, tSrS, reinterpret_cast<Element *>(smem + Traits::kOffsetV + stage));
        }
      }
      n_block -= 1;
      free_stage = stage;
      stage = stage + Traits::kStageBytes == kStages * Traits::kStageBytes ? 0 : stage + Traits::kStageBytes;
    };
    // The right end, the blocks that everyone sees, the left end. Both ends are one piece of code.
    int masked_from = keys.n_block_full;
    do {
      while (n_block >= masked_from) step(true_type{});
      while (n_block >= keys.n_block_full_min) step(false_type{});
      masked_from = keys.n_block_min;
    } while (n_block >= keys.n_block_min);
    Arch::template cp_async_wait<0>();
    if constexpr (Traits::kShiftsO) softmax.settle(tOrO_rows);
  }

 protected:
  // tSrS = kMagicBits + Q̂ K̂ᵀ. K for the next MMAs is fetched under these, for 16 keys at a time, since there are no
  // registers for a whole k-step twice.
  template <class Mma, class Acc, class FragA, class FragB, class SmemB, class ViewB, class Start>
  SDPA_DEVICE static void multiply_qk(const Mma &mma, Acc &tSrS, const FragA &tSrQ, const FragB &tSrK,
                                      const SmemB &tSsK, ViewB &&tSrK_view, const Start &start) {
    constexpr int kPairs = kBlockN / 16;
    Tensor first = broadcast(start, tSrS.layout().shape());
    in_pairs<kHeadDim / 32, kPairs>(
        [&](auto k, auto pair)
            SDPA_INLINE_LAMBDA { cute::copy(typename Traits::ByteLdsm{}, tSsK(_, pair, k), tSrK_view(_, pair, k)); },
        [&](auto k, auto pair) SDPA_INLINE_LAMBDA {
          if constexpr (decltype(k)::value == 0) {
            multiply_pair(mma, tSrS, tSrQ(_, _, k), tSrK(_, _, k), first, pair);
          } else {
            multiply_pair(mma, tSrS, tSrQ(_, _, k), tSrK(_, _, k), tSrS, pair);
          }
        });
  }

  // For every k-step and pair of n-tiles: fetch(k, pair) one pair ahead, multiply(k, pair).
  template <int kSteps, int kPairs, class Fetch, class Multiply>
  SDPA_DEVICE static void in_pairs(Fetch &&fetch, Multiply &&multiply) {
    fetch(_0{}, _0{});
    arch::static_for<kSteps * kPairs>([&](auto index) SDPA_INLINE_LAMBDA {
      constexpr int kIndex = decltype(index)::value, kNext = kIndex + 1;
      if constexpr (kNext < kSteps * kPairs) fetch(Int<kNext / kPairs>{}, Int<kNext % kPairs>{});
      multiply(Int<kIndex / kPairs>{}, Int<kIndex % kPairs>{});
    });
  }

  // What integer sums start with. With kShiftsO kMagicBits + 0 · 0 by an MMA: a result that the compiler does not know,
  // else it would make the constants anew for each tile of P̂ V̂.
  SDPA_DEVICE static auto make_start() {
    Tensor start = make_tensor<uint32_t>(Shape<Shape<_2, _2>>{});
    CUTE_UNROLL
    for (int i = 0; i < size(start); ++i) start(i) = kMagicBits;
    if constexpr (Traits::kShiftsO) {
      typename Traits::TiledMmaQk mma;
      Tensor zeros_a = make_tensor<int8_t>(Shape<Shape<_4, _2, _2>>{});
      Tensor zeros_b = make_tensor<int8_t>(Shape<Shape<_4, _2>>{});
      clear(zeros_a);
      clear(zeros_b);
      cute::gemm(mma, zeros_a, zeros_b, start);
    }
    return start;
  }
  // The same for each MMA tile of a shape ((2, 2), M, N).
  template <class Start, class Shape>
  SDPA_DEVICE static auto broadcast(const Start &start, const Shape &shape) {
    return make_tensor(start.data(), make_layout(shape, make_stride(Stride<_1, _2>{}, _0{}, _0{})));
  }

  // The columns of two n-tiles: sums = before + a b.
  template <class Mma, class Acc, class FragA, class FragB, class Before, class Pair>
  SDPA_DEVICE static void multiply_pair(const Mma &mma, Acc &acc, const FragA &a, const FragB &b, const Before &before,
                                        Pair) {
    arch::static_for<2>([&](auto n) SDPA_INLINE_LAMBDA {
      constexpr int kTile = 2 * Pair::value + decltype(n)::value;
      arch::static_for<Traits::kMmaM>([&](auto m) SDPA_INLINE_LAMBDA {
        auto sums = acc(_, m, Int<kTile>{});
        cute::gemm(mma, sums, a(_, m), b(_, Int<kTile>{}), before(_, m, Int<kTile>{}));
      });
    });
  }

  // O += weight · P̂ V̂, or with kShiftsO weight · (kMagic + P̂ V̂), kColumnTiles MMA tiles of columns at a time.
  // tSrS: 252 P · 2^-24.
  template <class Acc, class Scores, class Start>
  SDPA_DEVICE static void add_bytes(Acc &tOrO, const Scores &tSrS, const float (&weight)[kRows], const int8_t *smem_v,
                                    const Start &start) {
    constexpr int kTiles = Traits::kColumnTiles, kSteps = kBlockN / 32;
    typename Traits::TiledMmaPv mma;
    // Tiles 2i and 2i + 1 of S are the keys 16i + 4l + {0, 1, 2, 3} of a row: a register of operand A.
    Tensor tOrP = make_tensor<uint8_t>(
        make_layout(make_shape(Shape<_4, _2, _2>{}, Int<Traits::kMmaM>{}, Int<kSteps>{})));  // ((4, 2, 2), MMA_M, 2)
    Tensor words = recast<uint32_t>(tOrP);                                                   // ((1, 2, 2), MMA_M, 2)
    CUTE_UNROLL
    for (int k = 0; k < kSteps; ++k) {
      CUTE_UNROLL
      for (int m = 0; m < Traits::kMmaM; ++m) {
        CUTE_UNROLL
        for (int h = 0; h < 4; ++h) {
          const int half = h % 2, tile = 2 * (2 * k + h / 2);
          words(make_coord(0, half, h / 2), m, k) =
              Arch::pack_subnormals(tSrS(make_coord(0, half), m, tile), tSrS(make_coord(1, half), m, tile),
                                    tSrS(make_coord(0, half), m, tile + 1), tSrS(make_coord(1, half), m, tile + 1));
        }
      }
    }

    Tensor first = broadcast(start, make_shape(Shape<_2, _2>{}, Int<Traits::kMmaM>{}, Int<kTiles>{}));
    Tensor sVt = make_tensor(make_smem_ptr(smem_v), typename Traits::SmemLayoutVt{});  // (kHeadDim, kBlockN)
    const auto ldsm = make_tiled_copy_B(typename Traits::ByteLdsm{}, mma).get_slice(Traits::group_thread());
    Tensor tOsVt = ldsm.partition_S(sVt);  // (16, kHeadDim / 16, kSteps)
    arch::static_for<kHeadDim / 8 / kTiles>([&](auto chunk) SDPA_INLINE_LAMBDA {
      constexpr int kChunk = decltype(chunk)::value;
      Tensor tOrVt = make_tensor<int8_t>(
          make_layout(make_shape(Shape<_4, _2>{}, Int<kTiles>{}, Int<kSteps>{})));  // ((4, 2), kTiles, kSteps)
      Tensor tOrVt_view = ldsm.retile_D(tOrVt);                                     // (16, kTiles / 2, kSteps)
      Tensor sums = make_tensor<uint32_t>(
          make_layout(make_shape(Shape<_2, _2>{}, Int<Traits::kMmaM>{}, Int<kTiles>{})));  // ((2, 2), MMA_M, kTiles)
      if constexpr (!Traits::kShiftsO) clear(sums);
      arch::static_for<kSteps>([&](auto k) SDPA_INLINE_LAMBDA {
        arch::static_for<kTiles / 2>([&](auto pair) SDPA_INLINE_LAMBDA {
          cute::copy(typename Traits::ByteLdsm{}, tOsVt(_, Int<kChunk * kTiles / 2 + decltype(pair)::value>{}, k),
                     tOrVt_view(_, pair, k));
        });
        if constexpr (Traits::kShiftsO && decltype(k)::value == 0) {
          cute::gemm(mma, sums, tOrP(_, _, k), tOrVt(_, _, k), first);
        } else {
          cute::gemm(mma, tOrP(_, _, k), tOrVt(_, _, k), sums);
        }
      });
      CUTE_UNROLL
      for (int m = 0; m < Traits::kMmaM; ++m) {
        CUTE_UNROLL
        for (int n = 0; n < kTiles; ++n) {
          CUTE_UNROLL
          for (int e = 0; e < 4; ++e) {
            float &o = tOrO(make_coord(e % 2, e / 2), m, kChunk * kTiles + n);
            const uint32_t sum = sums(make_coord(e % 2, e / 2), m, n);
            o = fmaf(Traits::kShiftsO ? to_float(sum) : static_cast<float>(static_cast<int32_t>(sum)),
                     weight[2 * m + e / 2], o);
          }
        }
      }
    });
  }

  // O += P V of 16 bits. tSrS: P.
  template <class Acc, class Scores>
  SDPA_DEVICE static void add_halves(Acc &tOrO, const Scores &tSrS, Element *smem_v) {
    typename Traits::TiledMmaPv mma;
    const int tid = Traits::group_thread();
    const auto thr_mma = mma.get_slice(tid);
    Tensor tOrP_ = make_tensor<Element>(tSrS.layout());  // ((2, 2), MMA_M, MMA_N)
    Tensor pairs = recast<uint32_t>(tOrP_);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) = arch::pack<Element>(tSrS(2 * i), tSrS(2 * i + 1));
    Tensor tOrP =
        make_tensor(tOrP_.data(), accumulator_as_operand_a(tOrP_.layout()));  // ((2, 2, 2), MMA_M, kBlockN / 16)
    Tensor sVt = make_tensor(make_smem_ptr(smem_v), typename Traits::SmemLayoutV16t{});  // (kHeadDim, kBlockN)
    Tensor tOrVt = thr_mma.partition_fragment_B(sVt);                                    // (4, MMA_K, kBlockN / 16)
    const auto ldsm = make_tiled_copy_B(typename Traits::LdsmT{}, mma).get_slice(tid);
    Tensor tOsVt = ldsm.partition_S(sVt);
    Tensor tOrVt_view = ldsm.retile_D(tOrVt);
    in_pairs<kBlockN / 16, kHeadDim / 16>(
        [&](auto k, auto pair)
            SDPA_INLINE_LAMBDA { cute::copy(typename Traits::LdsmT{}, tOsVt(_, pair, k), tOrVt_view(_, pair, k)); },
        [&](auto k, auto pair)
            SDPA_INLINE_LAMBDA { multiply_pair(mma, tOrO, tOrP(_, _, k), tOrVt(_, _, k), tOrO, pair); });
  }
};

}  // namespace sdpa::fmha_fwd_q8
