// The fused forward kernel of sm_90: a CTA computes tiles of kBlockM query rows of one head, one after another.
//
//   O = dropout(softmax(Q Kᵀ · softmax_scale, masked)) V      Q, O [B, Hq, Sq, D]   K, V [B, Hkv, Sk, D]
//   softmax_lse = ln Σ_j exp(softmax_scale · S_ij)             float32 [B, Hq, Sq]
//
// Plain kernels know at compile time whether they are causal, and nothing else can happen. General ones learn that at
// run time, and take lengths, packed sequences, a window and sinks. Where sequences have lengths, some tiles lie beyond
// theirs, and each has a CTA of its own (grid.hpp). Those with two consumers have a function for each kind of mask, so
// that none has to keep registers for the others, and a variant with dropout. What a boolean mask hides is found ahead
// (mask_blocks.cuh). CTAs of split kernels share the keys of a tile (split.cuh).
//
// One warp loads tiles by TMA (tile_load.cuh); two or three warpgroups compute 64 rows each with wgmma (mainloop.cuh) and
// store them (epilogue.cuh). They meet at the barriers of pipeline.cuh, never at one of the whole CTA. kernel_traits.cuh
// has the layouts.
#pragma once

#include "sdpa/fmha_fwd_sm90/epilogue.cuh"
#include "sdpa/fmha_fwd_sm90/mainloop.cuh"
#include "sdpa/fmha_fwd_sm90/mask_blocks.cuh"
#include "sdpa/fmha_fwd_sm90/split.cuh"
#include "sdpa/fmha_fwd_sm90/tile_load.cuh"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;
  using SharedStorage = typename Traits::SharedStorage;

  SDPA_DEVICE static void run(const Params &params) {
    SharedStorage &smem = *reinterpret_cast<SharedStorage *>(Arch::dynamic_smem());
    if constexpr (Traits::kIsGeneral) {
      const WorkTile tile = Traits::work_tile(params, static_cast<uint32_t>(Arch::block_idx()));
      const Sequence sequence = Sequence::make(params, tile.bidb);
      if (tile.m_block * Traits::kBlockM >= sequence.num_rows) return;
      if constexpr (Traits::kIsSplit) {  // the first split of a tile without keys writes zeros
        Arch::let_next_launch_begin();
        const KeySplit split = key_split<Traits>(params, sequence, tile.m_block);
        if (split.index > 0 && split.index >= split.num_active) return;
      }
    }
    const int warp = static_cast<int>(Arch::uniform(static_cast<uint32_t>(Arch::thread_idx() / 32)));
    if (Arch::thread_idx() == 0) init_barriers<Traits>(smem);
    if constexpr (Traits::kIsPair) {
      Arch::cluster_sync();  // the barriers of both are initialised
    } else {
      Arch::syncthreads();  // the barriers are initialised
    }
    if (warp < kWarpgroup / 32) {
      Arch::template decrease_registers<Traits::kProducerRegisters>();
      if (warp == 0 && Arch::elect()) load(params, smem);
    } else {
      Arch::template increase_registers<Traits::kConsumerRegisters>();
      compute(params, smem, warp / (kWarpgroup / 32) - 1);
    }
  }

 private:
  // Whether the next tile is a CTA's second, fourth, ...
  SDPA_DEVICE static bool is_odd(const Slot<Traits::kStagesQ> &slot_q) {
    return Traits::kStagesQ == 2 ? slot_q.index : slot_q.phase;
  }

  // A round hands one tile to every CTA. Causal tiles become shorter from first to last: odd rounds go backwards, so that
  // no CTA always gets the longer one. There is no need to where each takes whole heads.
  SDPA_DEVICE static uint32_t next_tile(const Params &params, uint32_t index, bool was_odd) {
    if (!Traits::is_causal(params) || params.num_tiles_of_whole_heads > 0) return index + params.num_ctas;
    const auto cta = static_cast<uint32_t>(Arch::block_idx_again()) / Traits::kCluster;
    return index + (was_odd ? 2 * cta + 1 : 2 * (params.num_ctas - cta) - 1);
  }

  SDPA_DEVICE static void load(const Params &params, SharedStorage &smem) {
    Arch::prefetch_tensor_map(&params.map_q);
    Arch::prefetch_tensor_map(&params.map_k);
    Arch::prefetch_tensor_map(&params.map_v);
    TileLoad<Traits> producer{smem};
    for (uint32_t index = static_cast<uint32_t>(Traits::cluster_idx()); index < params.num_tiles;
         index = next_tile(params, index, !is_odd(producer.slot_q))) {
      const WorkTile tile = Traits::work_tile(params, index);
      const Sequence sequence = sequence_of<Traits>(params, tile);
      producer.run(params, tile, sequence, key_range<ClusterTile<Traits>>(params, sequence, tile.m_block));
      if constexpr (!Traits::kTakesTurns) break;
    }
    if constexpr (Traits::kIsPair) producer.finish();
  }

  SDPA_DEVICE static void compute(const Params &params, SharedStorage &smem, int consumer) {
    Turn<Traits>::start(consumer);
    Slot<Traits::kStages> slot;
    Slot<Traits::kStagesQ> slot_q;
    for (uint32_t index = static_cast<uint32_t>(Traits::cluster_idx()); index < params.num_tiles;
         index = next_tile(params, index, !is_odd(slot_q))) {
      if constexpr (Traits::kKeepsNothing) {  // so that a warp has what follows from these once
        index = Arch::uniform(index);
        slot_q.phase = static_cast<int>(Arch::uniform(static_cast<uint32_t>(slot_q.phase)));
        slot.phase = static_cast<int>(Arch::uniform(static_cast<uint32_t>(slot.phase)));
        slot.index = static_cast<int>(Arch::uniform(static_cast<uint32_t>(slot.index)));
      }
      const WorkTile tile = Traits::work_tile(params, index);
      const Sequence sequence = sequence_of<Traits>(params, tile);
      const KeyRange keys = key_range<ClusterTile<Traits>>(params, sequence, tile.m_block);
      const KeyRange own =
          key_range<WarpgroupTile<Traits>>(params, sequence, Traits::warpgroup_idx(tile.m_block, consumer));
      Tensor tOrO =
          partition_fragment_C(typename Traits::MmaPV{},
                               Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDim>>{});  // ((2, 2, kHeadDim / 8), 1, 1)
      clear(tOrO);
      typename Mainloop<Traits>::SoftmaxState softmax;
      if constexpr (Traits::kIsGeneral) {  // the loop needs the registers
        WorkTile same_tile;
        Sequence same_sequence;
        float sink = 0.f;
        Mainloop<Traits>::run(params, smem, consumer, index, tile, sequence, keys, own, slot_q, slot, tOrO, softmax,
                              [&] SDPA_INLINE_LAMBDA {
                                same_tile = Traits::work_tile_again(params, index);
                                same_sequence = Sequence::make(params, same_tile.bidb);
                                if (params.sinks.data != nullptr) sink = sink_of(params.sinks, same_tile.bidh);
                              });
        if constexpr (Traits::kIsSplit) {
          if (SplitPart<Traits>::store(params, consumer, same_tile, same_sequence, tOrO, softmax)) break;
        }
        Epilogue<Traits>::store(params, smem, consumer, same_tile, same_sequence, sink, tOrO, softmax);
      } else {
        Mainloop<Traits>::run(params, smem, consumer, index, tile, sequence, keys, own, slot_q, slot, tOrO, softmax,
                              [] {});
        Epilogue<Traits>::store(params, smem, consumer, tile, sequence, 0.f, tOrO, softmax);
      }
      if constexpr (!Traits::kTakesTurns) break;
      slot_q.advance();
    }
    Turn<Traits>::end(consumer);
    Epilogue<Traits>::finish();
  }
};

}  // namespace sdpa::fmha_fwd_sm90
