// The producer: one lane that fills the rings with TMA copies, in the order in which consumers read. It runs ahead of
// them as far as the rings are long, over the ends of tiles too.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_fwd_sm90/mask_blocks.cuh"
#include "sdpa/fmha_fwd_sm90/pipeline.cuh"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
struct TileLoad {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using TensorMap = typename Arch::TensorMap;

  typename Traits::SharedStorage &smem;
  Slot<Traits::kStages> slot = {};
  Slot<Traits::kStagesQ> slot_q = {};
  bool is_first_tile = true;

  // Q of every consumer, then K and V of the blocks from the last to the first. Where Q waits for the tile before to be
  // through with its own, the first K, which has had room for longer, goes ahead of it. Blocks that a boolean mask
  // hides from the whole tile are left out.
  SDPA_DEVICE void run(const Params &params, const WorkTile &tile, const Sequence &sequence, const KeyRange &keys) {
    MapRows<Traits> rows_q, rows_k, rows_v;
    if constexpr (Traits::kIsGeneral) {
      rows_q = MapRows<Traits>::make(params.ragged_q, tile.bidb, sequence.first_row_q, sequence.seqlen_q);
      rows_k = MapRows<Traits>::make(params.ragged_k, tile.bidb, sequence.first_row_k, sequence.seqlen_k);
      rows_v = MapRows<Traits>::make(params.ragged_v, tile.bidb, sequence.first_row_k, sequence.seqlen_k);
    }
    const auto load_q = [&] SDPA_INLINE_LAMBDA {
      CUTE_UNROLL
      for (int i = 0; i < Traits::kConsumers; ++i) {
        uint64_t *const full = &smem.q_full[slot_q.index][i];
        Arch::mbarrier_wait(&smem.q_empty[slot_q.index][i], slot_q.phase ^ 1);
        Arch::mbarrier_expect(full, Traits::kTileBytesQ);
        load<kWarpgroupRows>(params.map_q, full, smem.q[slot_q.index][i], rows_q, Traits::first_row(tile.m_block, i),
                             tile.bidh * params.step_q.head, tile.bidb * params.step_q.batch);
      }
      slot_q.advance();
    };
    const auto load_k = [&](int n_block) SDPA_INLINE_LAMBDA {
      Arch::mbarrier_wait(&smem.k_empty[slot.index], slot.phase ^ 1);
      Arch::mbarrier_expect(&smem.k_full[slot.index], Traits::kTileBytesKV);
      load_kv(params.map_k, &smem.k_full[slot.index], smem.k[slot.index], rows_k, n_block * Traits::kBlockN,
              tile.bidh_kv * params.step_k.head, tile.bidb * params.step_k.batch);
    };
    const auto load_v = [&](int n_block) SDPA_INLINE_LAMBDA {
      Arch::mbarrier_wait(&smem.v_empty[slot.index], slot.phase ^ 1);
      Arch::mbarrier_expect(&smem.v_full[slot.index], Traits::kTileBytesKV);
      load_kv(params.map_v, &smem.v_full[slot.index], smem.v[slot.index], rows_v, n_block * Traits::kBlockN,
              tile.bidh_kv * params.step_v.head, tile.bidb * params.step_v.batch);
      slot.advance();
    };
    const auto load_block = [&](int n_block) SDPA_INLINE_LAMBDA {
      load_k(n_block);
      load_v(n_block);
    };
    if constexpr (Traits::kLeavesBlocksOut) {
      load_q();
      VisibleBlocks<Traits> blocks(keys);
      while (blocks.next(params, 0, [&] { return TileRange{tile, keys, keys}; })) load_block(blocks.index);
    } else {
      const int n_block_min = Traits::kMayHaveWindow ? keys.n_block_min : 0;
      int n_block = keys.n_block_max - 1;
      if (Traits::kStagesQ == 1 && !is_first_tile && n_block >= n_block_min) {
        load_k(n_block);
        load_q();
        load_v(n_block--);
      } else {
        load_q();
      }
      if constexpr (Traits::kHasMoreToKeep) {  // several blocks at once would not fit into the warp's registers
        CUTE_NO_UNROLL
        for (; n_block >= n_block_min; --n_block) load_block(n_block);
      } else {
        for (; n_block >= n_block_min; --n_block) load_block(n_block);
      }
      is_first_tile = false;
    }
  }

  // Of a pair, behind the last tile. A CTA may not leave while the other one writes to its shared memory or arrives on
  // its barriers; when the buffers are all released by both, neither will.
  SDPA_DEVICE void finish() {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      Arch::mbarrier_wait(&smem.k_empty[slot.index], slot.phase ^ 1);
      Arch::mbarrier_wait(&smem.v_empty[slot.index], slot.phase ^ 1);
      slot.advance();
    }
  }

 private:
  // A block of K or V, or this CTA's half of it to both CTAs of the pair, whose barriers expect both halves.
  SDPA_DEVICE static void load_kv(const TensorMap &map, uint64_t *full, Element *tile, const MapRows<Traits> &rows,
                                  int row, int head, int batch) {
    if constexpr (!Traits::kIsPair) {
      load<Traits::kBlockN>(map, full, tile, rows, row, head, batch);
    } else {
      const int first = Traits::rank() * Traits::kRowsOfLoad;
      CUTE_UNROLL
      for (int col = 0; col < Traits::kHeadDim; col += Traits::kSmemCols) {
        Element *const chunk = tile + col * Traits::kBlockN + first * Traits::kSmemCols;
        Arch::template tma_load_to_all<Traits::kCluster>(&map, full, chunk, col, row + first, head, batch);
      }
    }
  }

  template <int kRows>
  SDPA_DEVICE static void load(const TensorMap &map, uint64_t *full, Element *tile, const MapRows<Traits> &rows,
                               int row, int head, int batch) {
    CUTE_UNROLL
    for (int col = 0; col < Traits::kHeadDim; col += Traits::kSmemCols) {
      if constexpr (Traits::kIsGeneral) {
        Arch::tma_load(&map, full, tile + col * kRows, col, rows.before + row, head, rows.end, kRaggedRows);
      } else {
        Arch::tma_load(&map, full, tile + col * kRows, col, row, head, batch);
      }
    }
  }
};

}  // namespace sdpa::fmha_fwd_sm90
