// The mainloop of split kernels, for few query rows and many keys: every warp is a KV group and walks over key blocks of
// its own, with the arithmetic of mainloop.cuh.
//
// A warp has room for one K and one V. The next K is on its way as soon as the sums of Q̂ K̂ᵀ are done, the next V as soon
// as those of P V are, so the loads of one warp lie under the work of the others, and no barrier but that of the warp
// stands in the loop. Memory bounds these kernels: the loop is there once, and asks of each block whether it needs a mask.
#pragma once

#include "sdpa/fmha_fwd_q8/mainloop.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct SplitMainloop : Mainloop<Traits> {
  using Base = Mainloop<Traits>;
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = SoftmaxOf<Traits>;
  using Base::kBlockM;
  using Base::kBlockN;
  using Base::kHeadDim;
  using Base::kRows;

  // tOrO ((2, 2), MMA_M, MMA_K) must be zero. `keys`: the group's own, which may be none. All threads of the CTA call.
  template <class Accumulator>
  SDPA_DEVICE static void run(const Params &params, const WorkTile &tile, const Sequence &sequence,
                              const KeyRange &keys, char *smem, Accumulator &tOrO, SoftmaxState &softmax) {
    const int group = Arch::thread_idx() / Traits::kGroupThreads;
    const int tid = Traits::group_thread();
    char *const room = smem + group * Traits::kGroupBytes;
    Tensor sQ = make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(smem)),
                            typename Traits::SmemLayoutQ{});  // (kBlockM, kHeadDim)
    Tensor sK = make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(room + Traits::kOffsetK)),
                            typename Traits::SmemLayoutK{});  // (kBlockN, kHeadDim)

    typename Traits::TiledMmaQk mma_qk;
    const auto thr_qk = mma_qk.get_slice(tid);
    Tensor tSrQ = thr_qk.partition_fragment_A(sQ);  // (16, MMA_M, kHeadDim / 32)
    Tensor tSrK = thr_qk.partition_fragment_B(sK);  // (8, MMA_N, kHeadDim / 32)
    const auto ldsm_q = make_tiled_copy_A(typename Traits::ByteLdsm{}, mma_qk).get_slice(tid);
    const auto ldsm_k = make_tiled_copy_B(typename Traits::ByteLdsm{}, mma_qk).get_slice(tid);
    Tensor tSsK = ldsm_k.partition_S(sK);
    Tensor tSrK_view = ldsm_k.retile_D(tSrK);
    Tensor tScS_ = thr_qk.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kBlockN>>{})
                                          .compose(_, typename Traits::KeyOrder{}));    // → (row, key)
    Tensor tScS = make_tensor(tScS_.data(), accumulator_rows_cols(tScS_.layout()));     // (rows, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)

    int n_block = keys.n_block_max - 1;
    TileCopy<Traits> copy(params, tile, sequence, n_block, room);
    float next_k_scale = 0.f;
    if (n_block >= keys.n_block_min) {
      copy.load_k(0);
      next_k_scale = copy.next_k_scale();
    }
    Arch::cp_async_fence();
    if (n_block >= keys.n_block_min) copy.template load_v<true>(0);
    Arch::cp_async_fence();
    QPrologue<Traits>::run(params, tile, sequence, reinterpret_cast<int8_t *>(smem), softmax.q_scale);
    Arch::syncthreads();  // Q is in shared memory

    const auto start = Base::make_start();
    for (; n_block >= keys.n_block_min; --n_block) {
      const bool is_last = n_block == keys.n_block_min;
      const float k_scale = next_k_scale;
      Arch::template cp_async_wait<1>();
      Arch::syncwarp();  // K(n) is visible
      Tensor tSrS_ = make_tensor<uint32_t>(
          partition_shape_C(mma_qk, Shape<Int<kBlockM>, Int<kBlockN>>{}));  // ((2, 2), MMA_M, MMA_N), kMagicBits + S
      cute::copy(typename Traits::ByteLdsm{}, ldsm_q.partition_S(sQ), ldsm_q.retile_D(tSrQ));
      Base::multiply_qk(mma_qk, tSrS_, tSrQ, tSrK, tSsK, tSrK_view, start);
      Arch::syncwarp();  // every lane has read K(n)
      if (!is_last) {
        copy.load_k(0);
        next_k_scale = copy.next_k_scale();
      }
      Arch::cp_async_fence();

      Tensor tSrS = make_tensor<float>(tSrS_.layout());  // ((2, 2), MMA_M, MMA_N)
      CUTE_UNROLL
      for (int i = 0; i < size(tSrS); ++i) tSrS(i) = to_float(tSrS_(i));
      Tensor scores = make_tensor(tSrS.data(), accumulator_rows_cols(tSrS.layout()));  // (rows, cols)
      if (n_block >= keys.n_block_full || n_block < keys.n_block_full_min)
        apply_mask<Traits>(scores, tScS, tile.m_block * kBlockM, n_block * kBlockN, params, sequence);

      Arch::template cp_async_wait<1>();
      Arch::syncwarp();  // V(n) and its scales are visible
      if constexpr (Traits::kQuantizesV) {
        // This lane's first token of every 16, whose scale may be that of all its others. Alike in all lanes.
        const float *const v_log2 = reinterpret_cast<const float *>(room + Traits::kOffsetScales) + tid % 4 * 4;
        const float *const v_inverse = v_log2 + kBlockN;
        float weight[kRows];
        if (!Arch::any(*v_inverse < 0.f)) {
          softmax.update(scores, tOrO_rows, k_scale, v_log2, v_inverse, weight);
        } else {
          softmax.update(scores, tOrO_rows, k_scale, *v_log2, -*v_inverse, weight);
        }
        Base::add_bytes(tOrO, tSrS, weight, reinterpret_cast<const int8_t *>(room + Traits::kOffsetV), start);
      } else {
        softmax.update(scores, tOrO_rows, k_scale);
        Base::add_halves(tOrO, tSrS, reinterpret_cast<Element *>(room + Traits::kOffsetV));
      }
      Arch::syncwarp();  // every lane has read V(n)
      if (!is_last) copy.template load_v<false>(0);
      Arch::cp_async_fence();
    }
    Arch::template cp_async_wait<0>();
  }
};

}  // namespace sdpa::fmha_fwd_q8
