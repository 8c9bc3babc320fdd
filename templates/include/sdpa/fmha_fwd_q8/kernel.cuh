// Quantised attention: 16-bit tensors in and out, products of bytes inside. Opt-in, with errors of its own.
//
//   O = softmax(Q Kᵀ · softmax_scale + bias, masked) V        Q, O [B, Hq, Sq, D]   K, V [B, Hkv, Sk, D]
//   softmax_lse = ln Σ_j exp(softmax_scale · S_ij + bias_ij)   float32 [B, Hq, Sq]
//
// Two launches: `Quantize` turns K, and for int8 V, into bytes in the workspace (quantize.cuh), then `Kernel` computes
// kBlockM query rows of one head a CTA, and quantises its rows of Q on the way (q_prologue.cuh). Every kernel learns at
// run time whether it is causal, and takes windows, sinks, lengths, packed sequences and smaller head dimensions. There is
// a `Kernel` for each kind of mask that is a tensor, as in fmha_fwd. None takes dropout. Split kernels, for few query rows
// and many keys, take no masks: fmha_fwd/split.cuh says how their CTAs share a tile, split_mainloop.cuh how their warps do.
//
// Read next: mainloop.cuh, softmax.cuh (the arithmetic of P), biased_softmax.cuh (the same with biases), quantize.cuh and
// rounding.cuh (that of the bytes), kernel_traits.cuh (layouts and bounds). docs/quantised.md says what the results are worth.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_fwd_q8/epilogue.cuh"
#include "sdpa/fmha_fwd_q8/mainloop.cuh"
#include "sdpa/fmha_fwd_q8/quantize.cuh"
#include "sdpa/fmha_fwd_q8/split_epilogue.cuh"
#include "sdpa/fmha_fwd_q8/split_mainloop.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;

  SDPA_DEVICE static void run(const Params &params) {
    if constexpr (Traits::kIsSplit) {
      run_split(params);
    } else {
      run_tile(params);
    }
  }

 private:
  SDPA_DEVICE static void run_tile(const Params &params) {
    char *const smem = Arch::dynamic_smem();
    const WorkTile tile = Traits::work_tile(params, Arch::block_idx());
    const Sequence sequence = uniform(Sequence::make(params, tile.bidb));
    const int first_row = tile.m_block * Traits::kBlockM;
    if (first_row >= sequence.num_rows) return;
    const KeyRange keys = uniform(KeyRange::make<Traits>(params, sequence, tile.m_block));
    if (keys.n_block_max == 0 || first_row >= sequence.seqlen_q) {
      Epilogue<Traits>::Rows::store_empty(params, tile, sequence);
      return;
    }

    Tensor tOrO = make_accumulator();
    typename Mainloop<Traits>::SoftmaxState softmax;
    Mainloop<Traits>::run(params, tile, sequence, keys, smem, tOrO, softmax);

    // The loop needs the registers: what follows from the CTA's index is found again.
    const WorkTile same_tile = Traits::work_tile(params, Arch::block_idx_again());
    Epilogue<Traits>::store_tile(params, same_tile, Sequence::make(params, same_tile.bidb), smem, tOrO, softmax);
  }

  SDPA_DEVICE static void run_split(const Params &params) {
    char *const smem = Arch::dynamic_smem();
    int split_index, tile_of_head, head;
    params.scheduler.m_blocks(head, tile_of_head, Arch::block_idx());
    WorkTile tile;
    params.m_blocks(split_index, tile.m_block, tile_of_head);
    params.scheduler.heads_q(tile.bidb, tile.bidh_kv, head);
    const int heads_per_kv = params.heads_per_kv.divisor;
    tile.bidh = tile.bidh_kv * heads_per_kv;

    Sequence sequence = Sequence::make(params, tile.bidb);
    sequence.seqlen_q *= heads_per_kv;
    sequence.num_rows *= heads_per_kv;
    sequence = uniform(sequence);
    const int first_row = tile.m_block * Traits::kBlockM;
    if (first_row >= sequence.num_rows) return;
    const KeyRange all_keys = uniform(KeyRange::make<Traits>(params, sequence, tile.m_block));
    if (all_keys.n_block_max == 0 || first_row >= sequence.seqlen_q) {
      if (split_index == 0) Epilogue<Traits>::Rows::store_empty(params, tile, sequence);
      return;
    }
    const KeySplit split = KeySplit::make(split_index, params.num_splits, all_keys);
    if (split.index >= split.num_active) return;
    const int group = Arch::thread_idx() / Traits::kGroupThreads;
    const KeyRange keys = split.within(all_keys);
    const KeyRange keys_of_group = uniform(KeySplit::make(group, Traits::kKvGroups, keys).within(keys));

    Tensor tOrO = make_accumulator();
    typename SplitMainloop<Traits>::SoftmaxState softmax;
    SplitMainloop<Traits>::run(params, tile, sequence, keys_of_group, smem, tOrO, softmax);
    const int tile_index = head * params.m_blocks.divisor + tile.m_block;
    SplitEpilogue<Traits>::store_tile(params, tile, sequence, split, tile_index, smem, tOrO, softmax);
  }

  SDPA_DEVICE static auto make_accumulator() {  // ((2, 2), MMA_M, MMA_K)
    Tensor tOrO = make_tensor<float>(
        partition_shape_C(typename Traits::TiledMmaPv{}, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{}));
    clear(tOrO);
    return tOrO;
  }

  // What all threads of a warp have alike, and the loop needs, in registers of the warp: lengths may come from memory,
  // which the compiler cannot know to be the same for all.
  SDPA_DEVICE static int uniform(int value) { return static_cast<int>(Arch::uniform(static_cast<uint32_t>(value))); }
  SDPA_DEVICE static Sequence uniform(Sequence sequence) {
    sequence.seqlen_q = uniform(sequence.seqlen_q);
    sequence.seqlen_k = uniform(sequence.seqlen_k);
    sequence.causal_offset = uniform(sequence.causal_offset);
    sequence.window_offset = uniform(sequence.window_offset);
    return sequence;
  }
  SDPA_DEVICE static KeyRange uniform(const KeyRange &keys) {
    return {uniform(keys.n_block_max), uniform(keys.n_block_full), uniform(keys.n_block_min),
            uniform(keys.n_block_full_min)};
  }
};

}  // namespace sdpa::fmha_fwd_q8
