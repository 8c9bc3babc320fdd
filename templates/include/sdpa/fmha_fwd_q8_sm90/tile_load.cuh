// The producer: one lane that fills the ring of blocks with bulk copies, in the order in which consumers read: K, V and
// what both are scaled by.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_fwd_q8_sm90/kernel_traits.cuh"
#include "sdpa/fmha_fwd_sm90/pipeline.cuh"

namespace sdpa::fmha_fwd_q8_sm90 {

template <class Traits>
struct TileLoad {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;
  using Block = typename Traits::Block;

  // The blocks from the last to the first.
  SDPA_DEVICE static void run(const Params &params, typename Traits::SharedStorage &smem, const WorkTile &tile,
                              const Sequence &sequence, const KeyRange &keys) {
    Arch::prefetch_tensor_map(&params.map_k);
    Arch::prefetch_tensor_map(&params.map_v);
    const int first_block =
        static_cast<int>(params.block(params.head(tile.bidb, tile.bidh_kv), params.first_block(sequence, tile.bidb)));
    fmha_fwd_sm90::Slot<Traits::kStages> slot;
    for (int n_block = keys.n_block_max - 1; n_block >= keys.n_block_min; --n_block) {
      const int block = first_block + n_block;
      uint64_t *const full = &smem.full[slot.index];
      auto &scales = smem.scales[slot.index];
      Arch::mbarrier_wait(&smem.empty[slot.index], slot.phase ^ 1);
      Arch::mbarrier_expect(full, 2 * Traits::kTileBytes + Traits::kScaleBytesV + Traits::kScaleBytesK);
      Arch::tma_load(&params.map_k, full, smem.k[slot.index], 0, 0, block, 0);
      Arch::bulk_load(full, scales.k, params.k_scale + int64_t{block} * 4, Traits::kScaleBytesK);
      Arch::bulk_load(full, scales.v_log2, params.blocks + int64_t{block} * Block::kBytes + Block::kLog2,
                      Traits::kScaleBytesV);
      Arch::tma_load(&params.map_v, full, smem.v[slot.index], 0, 0, block, 0);
      slot.advance();
    }
  }
};

}  // namespace sdpa::fmha_fwd_q8_sm90
