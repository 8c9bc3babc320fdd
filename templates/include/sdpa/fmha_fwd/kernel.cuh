// The fused forward kernel: one CTA computes kBlockM query rows of one head.
//
//   O = dropout(softmax(Q Kᵀ · softmax_scale, masked)) V      Q, O [B, Hq, Sq, D]   K, V [B, Hkv, Sk, D]
//   softmax_lse = ln Σ_j exp(softmax_scale · S_ij)             float32 [B, Hq, Sq]
//
// Plain kernels know at compile time whether they are causal, and nothing else can happen. General ones learn that at
// run time, and take a mask, a window, sinks, lengths and head dimensions below kHeadDim; there is a function for each
// kind of mask, so that none has to keep registers for the others. A variant has dropout, and another splits the keys
// of a tile over several CTAs instead of taking masks.
//
// Read next: mainloop.cuh (the loop over key blocks), softmax.cuh, key_range.cuh, mask.cuh, epilogue.cuh;
// kernel_traits.cuh has the layouts, dense_mask.cuh, dropout.cuh and split.cuh what only general kernels do. The logits
// never leave registers; Q, K and V are read once per tile.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_fwd/epilogue.cuh"
#include "sdpa/fmha_fwd/mainloop.cuh"
#include "sdpa/fmha_fwd/split.cuh"

namespace sdpa::fmha_fwd {

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;

  SDPA_DEVICE static void run(const typename Traits::Params &params) {
    if constexpr (Traits::kIsSplit) {
      run_split(params);
    } else {
      run_tile(params);
    }
  }

 private:
  SDPA_DEVICE static void run_tile(const typename Traits::Params &params) {
    char *const smem = Arch::dynamic_smem();
    const WorkTile tile = Traits::work_tile(params, Arch::block_idx());
    const Sequence sequence = Sequence::make(params, tile.bidb);
    const int first_row = tile.m_block * Traits::kBlockM;
    if (Traits::kIsGeneral && first_row >= sequence.num_rows) return;
    const KeyRange keys = KeyRange::make<Traits>(params, sequence, tile.m_block);
    if (keys.n_block_max == 0 || (Traits::kIsGeneral && first_row >= sequence.seqlen_q)) {
      Epilogue<Traits>::store_empty(params, tile, sequence);
      return;
    }

    Tensor tOrO = make_accumulator();
    typename Mainloop<Traits>::SoftmaxState softmax;
    Mainloop<Traits>::run(params, tile, sequence, keys, smem, tOrO, softmax);

    if constexpr (Traits::kIsGeneral) {  // the loop needs the registers
      const WorkTile same_tile = Traits::work_tile(params, Arch::block_idx_again());
      store(params, same_tile, Sequence::make(params, same_tile.bidb), smem, tOrO, softmax);
    } else {
      store(params, tile, sequence, smem, tOrO, softmax);
    }
  }

  SDPA_DEVICE static void run_split(const typename Traits::Params &params) {
    char *const smem = Arch::dynamic_smem();
    int split_index, tile_of_head, head;
    params.scheduler.m_blocks(head, tile_of_head, Arch::block_idx());
    WorkTile tile;
    params.m_blocks(split_index, tile.m_block, tile_of_head);
    params.scheduler.heads_q(tile.bidb, tile.bidh_kv, head);
    const int heads_per_kv = params.heads_per_kv.divisor;
    tile.bidh = tile.bidh_kv * heads_per_kv;

    const Sequence sequence = packed_sequence(params, tile.bidb, heads_per_kv);
    const int first_row = tile.m_block * Traits::kBlockM;
    if (first_row >= sequence.num_rows) return;
    const KeyRange all_keys = key_range(params, sequence, tile.m_block);
    if (all_keys.n_block_max == 0 || first_row >= sequence.seqlen_q) {
      if (split_index == 0) Epilogue<Traits>::store_empty(params, tile, sequence);
      return;
    }
    const KeySplit split =
        params.num_splits == 1 ? KeySplit::whole(all_keys) : KeySplit::make(split_index, params.num_splits, all_keys);
    if (split.index >= split.num_active) return;
    const Sequence part = split.template of<Traits>(sequence);

    Tensor tOrO = make_accumulator();
    typename Mainloop<Traits>::SoftmaxState softmax;
    Mainloop<Traits>::run(params, tile, part, key_range(params, part, tile.m_block), smem, tOrO, softmax);
    const int tile_index = head * params.m_blocks.divisor + tile.m_block;
    // The loop needs the registers.
    const Sequence same_sequence = packed_sequence(params, tile.bidb, Arch::forget_origin(heads_per_kv));
    SplitEpilogue<Traits>::store_tile(params, tile, same_sequence, split, tile_index, smem, tOrO, softmax);
  }

  // The rows of all query heads that share the tile's key head. Where they see all keys, as in most decoding, nothing is
  // computed of it: a CTA with few keys takes hardly longer than what it does before its first load.
  SDPA_DEVICE static Sequence packed_sequence(const typename Traits::Params &params, int bidb, int heads_per_kv) {
    if (Traits::kHasShortPrologue && params.sees_all) {
      const int rows = params.seqlen_q * heads_per_kv;
      return {rows, rows, params.seqlen_k, params.seqlen_k, -rows - Traits::kBlockM, 0, 0};
    }
    Sequence sequence = Sequence::make(params, bidb);
    sequence.seqlen_q *= heads_per_kv;
    sequence.num_rows *= heads_per_kv;
    return sequence;
  }

  SDPA_DEVICE static KeyRange key_range(const typename Traits::Params &params, const Sequence &sequence, int m_block) {
    if (Traits::kHasShortPrologue && params.sees_all) return KeyRange::whole<Traits>(sequence);
    return KeyRange::make<Traits>(params, sequence, m_block);
  }

  SDPA_DEVICE static auto make_accumulator() {  // ((2, 2), MMA_M, MMA_K)
    Tensor tOrO =
        partition_fragment_C(typename Traits::TiledMma{}, Shape<Int<Traits::kBlockM>, Int<Traits::kHeadDim>>{});
    clear(tOrO);
    return tOrO;
  }

  template <class Accumulator, class SoftmaxState>
  SDPA_DEVICE static void store(const typename Traits::Params &params, const WorkTile &tile, const Sequence &sequence,
                                char *smem, Accumulator &tOrO, SoftmaxState &softmax) {
    if constexpr (Traits::kKvGroups == 1) {
      Epilogue<Traits>::store_tile(params, tile, sequence, smem, tOrO, softmax);
    } else {
      Epilogue<Traits>::merge_tile(params, tile, sequence, smem, tOrO, softmax);
    }
  }
};

}  // namespace sdpa::fmha_fwd
