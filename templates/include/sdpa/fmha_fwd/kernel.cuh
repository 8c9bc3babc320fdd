// The fused forward kernel: one CTA computes kBlockM query rows of one head.
//
//   O = softmax(Q Kᵀ · softmax_scale, masked) V      Q, O [B, Hq, Sq, D]   K, V [B, Hkv, Sk, D]
//   softmax_lse = ln Σ_j exp(softmax_scale · S_ij)   float32 [B, Hq, Sq]
//
// Read next: mainloop.cuh (the loop over key blocks), softmax.cuh, mask.cuh, epilogue.cuh; kernel_traits.cuh has the
// layouts. The logits never leave registers; Q, K and V are read once per tile.
#pragma once

#include "sdpa/fmha_fwd/epilogue.cuh"
#include "sdpa/fmha_fwd/mainloop.cuh"

namespace sdpa::fmha_fwd {

template <class Traits>
struct Kernel {
  SDPA_DEVICE static void run(Params const &params) {
    using Arch = typename Traits::Arch;
    char *const smem = Arch::dynamic_smem();
    WorkTile const tile = params.scheduler.template tile<Traits::kIsCausal>(Arch::block_idx());
    KeyRange const keys = KeyRange::make<Traits>(params, tile.m_block);
    if (keys.n_block_max == 0) {
      Epilogue<Traits>::store_empty(params, tile);
      return;
    }

    Tensor tOrO = partition_fragment_C(typename Traits::TiledMma{},
                                       Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});  // ((2, 2), MMA_M, MMA_K)
    clear(tOrO);
    typename Mainloop<Traits>::SoftmaxState softmax;
    Mainloop<Traits>::run(params, tile, keys, smem, tOrO, softmax);

    if constexpr (Traits::kKvGroups == 1) {
      Epilogue<Traits>::store_tile(params, tile, smem, tOrO, softmax);
    } else {
      Epilogue<Traits>::merge_tile(params, tile, smem, tOrO, softmax);
    }
  }
};

}  // namespace sdpa::fmha_fwd
