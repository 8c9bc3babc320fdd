// The backward of attention in one go over the scores: a CTA owns a tile of keys and makes dK, dV and its part of dQ,
// five multiplications a pair of tiles where the two roles of fmha_bwd take seven. The same bits in every run: what
// several CTAs add to dQ they add one after the other, in the order of keys (dq_relay.cuh). The formulas are those of
// fmha_bwd/kernel.cuh.
//
//   prepare   row statistics (fmha_bwd/preprocess.cuh), and turns and tickets become 0
//   run       dK, dV, and the sums of dQ in float32
//   convert   dQ of its sums (dq_convert.cuh)
//
// A CTA waits for one that has a lower ticket, and tickets are drawn when CTAs start: whoever is waited for runs.
#pragma once

#include "sdpa/fmha_bwd/epilogue.cuh"
#include "sdpa/fmha_bwd/mainloop.cuh"
#include "sdpa/fmha_bwd/preprocess.cuh"
#include "sdpa/fmha_bwd_fused/dq_relay.cuh"

namespace sdpa::fmha_bwd_fused {

using fmha_bwd::OwnedTile;
using fmha_bwd::Range;

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;
  using Role = typename Traits::Keys;

  SDPA_DEVICE static void run(const Params &params) {
    char *const smem = Arch::dynamic_smem();
    const OwnedTile tile = owned_tile(params, draw_ticket(params, smem));
    const Sequence sequence = Sequence::make(params, tile.bidb);
    const int first_key = tile.block * Role::kBlockN;
    const int keys = fmha_bwd::num_keys(params, tile.bidb);
    if (first_key >= keys) return;

    Tensor dk = partition_fragment_C(typename Role::TiledMma{}, Shape<Int<Role::kBlockN>, Int<Role::kHeadDim>>{});
    Tensor dv = make_fragment_like(dk);  // ((2, 2), MMA_M, MMA_K)
    clear(dk);
    clear(dv);
    const Range range = range_of(sequence, tile.block);
    if (range.min < range.max) {
      const int first = tile.block == 0 ? 0 : range_of(sequence, tile.block - 1).max;
      DqRelay<Traits> dq(params, tile.bidb, tile.block, first, smem);
      fmha_bwd::Mainloop<Role>::run(params, tile, sequence, range, smem, dk, dv, dq);
      dq.finish();
    }
    const auto store = [&](auto &acc, float scale, int which, const TensorRef &tensor,
                           int num_cols) SDPA_INLINE_LAMBDA {
      if (tensor.data == nullptr) return;
      const int64_t offset = tile.bidb * tensor.batch_stride + tile.bidh_kv * tensor.head_stride +
                             sequence.first_row_k * tensor.row_stride;
      fmha_bwd::Epilogue<Role>::store(acc, scale, smem, which, tensor, offset, first_key, sequence.seqlen_k, keys,
                                      num_cols);
    };
    store(dk, params.score_scale, 0, params.dk, params.head_dim);
    store(dv, params.dropout.keep_scale, 1, params.dv, params.head_dim_v);
  }

  SDPA_DEVICE static void prepare(const Params &params) {
    using Statistics = fmha_bwd::Preprocess<Traits>;
    Statistics::run(params);
    int bidbh, part;
    params.statistics_ctas(bidbh, part, Arch::block_idx());
    const int tid = Arch::thread_idx();
    for (int row = tid; row < Statistics::kRowsPerCta; row += Traits::kThreads) {
      const int at = part * Statistics::kRowsPerCta + row;
      if (at % Traits::kBlockM == 0) params.turns[int64_t{bidbh} * params.num_m_blocks + at / Traits::kBlockM] = 0;
    }
    if (Arch::block_idx() == 0 && tid == 0) *params.tickets = 0;
  }

 private:
  // The same number in all threads: how many CTAs started before this one.
  SDPA_DEVICE static int draw_ticket(const Params &params, char *smem) {
    int *const shared = reinterpret_cast<int *>(smem + Traits::kOffsetDs);  // free until the first dS
    if (Arch::thread_idx() == 0) *shared = static_cast<int>(Arch::increment(params.tickets));
    Arch::syncthreads();
    return *shared;
  }

  // Key tile 0 comes first: others wait for it, and it has the most rows under a causal mask. Heads whose CTAs run at the
  // same time take turns, so that a CTA starts a while after the one that it follows.
  SDPA_DEVICE static OwnedTile owned_tile(const Params &params, int ticket) {
    const TileScheduler &scheduler = params.key_scheduler;
    const WorkTile work = scheduler.template tile<true, false, CausalOrder::kLongestFirst>(ticket);
    return {scheduler.num_m_blocks - 1 - work.m_block, work.bidb, work.bidh * params.heads_per_kv, work.bidh};
  }

  SDPA_DEVICE static Range range_of(const Sequence &sequence, int n_block) {
    if (n_block * Role::kBlockN >= sequence.seqlen_k) return {0, 0, 0, 0};
    Range range = fmha_bwd::row_range<Role>(sequence, n_block);
    // Behind the last key scores are 0 and exp2(0 - lse_log2) may overflow: inf times a key of zeros would be dQ's NaN.
    if ((n_block + 1) * Role::kBlockN > sequence.seqlen_k) range.full_min = range.max;
    return range;
  }
};

}  // namespace sdpa::fmha_bwd_fused
