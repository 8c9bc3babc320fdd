// Quantised attention on sm_90: what fmha_fwd_q8 computes, with wgmma of bytes.
//
//   O = softmax(Q Kᵀ · softmax_scale, masked) V        Q, O [B, Hq, Sq, D]   K, V [B, Hkv, Sk, D]
//   softmax_lse = ln Σ_j exp(softmax_scale · S_ij)      float32 [B, Hq, Sq]
//
// `fmha_fwd_q8::Quantize` turns K and V into bytes first, in the same workspace. Then a CTA computes kBlockM query rows of
// one head: one warp loads blocks of K and V (tile_load.cuh), two or three warpgroups quantise 64 rows of Q each
// (q_fragment.cuh) and compute them (mainloop.cuh), with the arithmetic of fmha_fwd_q8/softmax.cuh. Each kernel learns at
// run time whether it is causal, and takes windows, sinks, lengths, packed sequences and smaller head dimensions; no mask
// that is a tensor, and no dropout.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_fwd_q8/epilogue.cuh"
#include "sdpa/fmha_fwd_q8/quantize.cuh"
#include "sdpa/fmha_fwd_q8_sm90/mainloop.cuh"
#include "sdpa/fmha_fwd_q8_sm90/tile_load.cuh"

namespace sdpa::fmha_fwd_q8_sm90 {

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;
  using SharedStorage = typename Traits::SharedStorage;
  using Epilogue = fmha_fwd_q8::Epilogue<Traits>;

  SDPA_DEVICE static void run(const Params &params) {
    SharedStorage &smem = *reinterpret_cast<SharedStorage *>(Arch::dynamic_smem());
    const WorkTile tile = Traits::work_tile(params, Arch::block_idx());
    const Sequence sequence = Sequence::make(params, tile.bidb);
    const int first_row = tile.m_block * Traits::kBlockM;
    if (first_row >= sequence.num_rows) return;
    const KeyRange keys = KeyRange::make<Traits>(params, sequence, tile.m_block);
    if (keys.n_block_max == 0 || first_row >= sequence.seqlen_q) {
      Epilogue::Rows::store_empty(params, tile, sequence);
      return;
    }
    if (Arch::thread_idx() == 0) {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kStages; ++i) {
        Arch::mbarrier_init(&smem.full[i], 1);
        Arch::mbarrier_init(&smem.empty[i], Traits::kNWarps);
      }
      Arch::fence_mbarrier_init();
    }
    Arch::syncthreads();  // the barriers are initialised
    const int warp = static_cast<int>(Arch::uniform(static_cast<uint32_t>(Arch::thread_idx() / 32)));
    if (warp < kWarpgroup / 32) {
      Arch::template decrease_registers<Traits::kProducerRegisters>();
      if (warp == 0 && Arch::elect()) TileLoad<Traits>::run(params, smem, tile, sequence, keys);
    } else {
      Arch::template increase_registers<Traits::kConsumerRegisters>();
      compute(params, smem, warp / (kWarpgroup / 32) - 1, tile, sequence, keys);
    }
  }

 private:
  SDPA_DEVICE static void compute(const Params &params, SharedStorage &smem, int consumer, const WorkTile &tile,
                                  const Sequence &sequence, const KeyRange &keys) {
    const KeyRange own = fmha_fwd_sm90::key_range<fmha_fwd_sm90::WarpgroupTile<Traits>>(
        params, sequence, tile.m_block * Traits::kConsumers + consumer);
    Tensor tOrO = make_tensor<float>(
        partition_shape_C(typename Traits::MmaPV{},
                          Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDim>>{}));  // ((2, 2, kHeadDim / 8), 1, 1)
    clear(tOrO);
    typename Mainloop<Traits>::SoftmaxState softmax;
    Mainloop<Traits>::run(params, smem, consumer, tile, sequence, keys, own, tOrO, softmax);

    // The loop needs the registers: what follows from the CTA's index is found again.
    const WorkTile same_tile = Traits::work_tile(params, Arch::block_idx_again());
    Tensor tOrO_mma = make_tensor(tOrO.data(), Layout<Shape<Shape<_2, _2>, _1, Int<Traits::kHeadDim / 8>>>{});
    Epilogue::store_tile(params, same_tile, Sequence::make(params, same_tile.bidb), reinterpret_cast<char *>(&smem),
                         tOrO_mma, softmax);
  }
};

}  // namespace sdpa::fmha_fwd_q8_sm90
