// The backward of attention in two launches, without atomics: the same bits in every run.
//
//   S = softmax_scale · Q Kᵀ (+ bias)   P = exp(S - LSE)   dP = (M ∘ (dO Vᵀ)) / k   dS = P ∘ (dP - delta)
//   dV = (M ∘ P)ᵀ dO / k                dQ = softmax_scale · dS K                   dK = softmax_scale · dSᵀ Q
//   delta = rowsum(dO ∘ O) - dLSE       M: dropout's keep mask, k = 1 - p_dropout; 1 without dropout
//
// The first launch makes delta and LSE in log2 units (preprocess.cuh). The second one has CTAs of two roles: those that
// own keys make dK and dV, four multiplications a pair of tiles, those that own query rows make dQ, three. Above head_dim
// 128 registers do not hold dK and dV at once: CTAs of one role make dK, three, of another one dV, two. S and dP are
// computed in both: FlexAttention's split (Dong et al., "Flex Attention", 2024) of FlashAttention's backward (Dao et al.,
// 2022). What one CTA sums it sums in float32 and in an order that the problem decides. The gradient of a bias has a third
// launch (bias_gradient.cuh).
//
// Read next: mainloop.cuh (both roles), turns_mainloop.cuh (the three above head_dim 128), row_range.cuh, epilogue.cuh;
// kernel_traits.cuh has the layouts.
#pragma once

#include "sdpa/attention/key_range.cuh"
#include "sdpa/fmha_bwd/epilogue.cuh"
#include "sdpa/fmha_bwd/mainloop.cuh"
#include "sdpa/fmha_bwd/preprocess.cuh"
#include "sdpa/fmha_bwd/turns_mainloop.cuh"

namespace sdpa::fmha_bwd {

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;

  SDPA_DEVICE static void run(const Params &params) {
    const int block_idx = Arch::block_idx();
    if constexpr (Traits::kSplitsKeys) {
      const int first_dv = params.dk.data != nullptr ? params.num_key_tiles : 0;
      const int first_dq = first_dv + (params.dv.data != nullptr ? params.num_key_tiles : 0);
      if (block_idx < first_dv) {
        run_one<typename Traits::Dk>(params, 0);
      } else if (block_idx < first_dq) {
        run_one<typename Traits::Dv>(params, first_dv);
      } else {
        run_one<typename Traits::Rows>(params, first_dq);
      }
    } else if (block_idx < params.num_key_tiles) {
      run_keys(params, block_idx);
    } else {
      run_rows(params, block_idx - params.num_key_tiles);
    }
  }

 private:
  // Key tile 0 has the most rows under a causal mask: it comes first.
  SDPA_DEVICE static void run_keys(const Params &params, int index) {
    using Role = typename Traits::Keys;
    const TileScheduler &scheduler = params.key_scheduler;
    WorkTile work = params.is_causal ? scheduler.template tile<true, false, CausalOrder::kLongestFirst>(index)
                                     : scheduler.template tile<false, false, CausalOrder::kLongestFirst>(index);
    if (params.is_causal) work.m_block = scheduler.num_m_blocks - 1 - work.m_block;
    const OwnedTile tile = {work.m_block, work.bidb, work.bidh * params.heads_per_kv, work.bidh};
    const Sequence sequence = Sequence::make(params, tile.bidb);
    const int first_key = tile.block * Role::kBlockN;
    const int keys = num_keys(params, tile.bidb);
    if (first_key >= keys) return;

    Tensor dk = make_accumulator<Role>();
    Tensor dv = make_accumulator<Role>();
    char *const smem = Arch::dynamic_smem();
    const Range range = first_key < sequence.seqlen_k ? row_range<Role>(sequence, tile.block) : Range{0, 0, 0, 0};
    if (range.min < range.max) Mainloop<Role>::run(params, tile, sequence, range, smem, dk, dv);
    const auto store = [&](auto &acc, float scale, int which, const TensorRef &tensor,
                           int num_cols) SDPA_INLINE_LAMBDA {
      if (tensor.data == nullptr) return;
      const int64_t offset = tile.bidb * tensor.batch_stride + tile.bidh_kv * tensor.head_stride +
                             sequence.first_row_k * tensor.row_stride;
      Epilogue<Role>::store(acc, scale, smem, which, tensor, offset, first_key, sequence.seqlen_k, keys, num_cols);
    };
    store(dk, params.score_scale, 0, params.dk, params.head_dim);
    store(dv, params.dropout.keep_scale, 1, params.dv, params.head_dim_v);
  }

  SDPA_DEVICE static void run_rows(const Params &params, int index) {
    using Role = typename Traits::Rows;
    const WorkTile work = params.is_causal
                              ? params.scheduler.template tile<true, false, CausalOrder::kLongestFirst>(index)
                              : params.scheduler.template tile<false, false, CausalOrder::kLongestFirst>(index);
    const OwnedTile tile = {work.m_block, work.bidb, work.bidh, work.bidh_kv};
    const Sequence sequence = Sequence::make(params, tile.bidb);
    const int first_row = tile.block * Role::kBlockM;
    if (first_row >= sequence.num_rows) return;

    Tensor dq = make_accumulator<Role>();
    char *const smem = Arch::dynamic_smem();
    Range range = {0, 0, 0, 0};
    if (first_row < sequence.seqlen_q) {
      const KeyRange keys = KeyRange::make<Role>(params, sequence, tile.block);
      range = {keys.n_block_min, keys.n_block_max, keys.n_block_full_min, keys.n_block_full};
    }
    if (range.min < range.max) Mainloop<Role>::run(params, tile, sequence, range, smem, dq, dq);
    const TensorRef &tensor = params.dq;
    const int64_t offset =
        tile.bidb * tensor.batch_stride + tile.bidh * tensor.head_stride + sequence.first_row_q * tensor.row_stride;
    Epilogue<Role>::store(dq, params.score_scale, smem, 0, tensor, offset, first_row, sequence.seqlen_q,
                          sequence.num_rows, params.head_dim);
  }

  // A role with one gradient, whose CTAs are counted from `first_cta`.
  template <class Role>
  SDPA_DEVICE static void run_one(const Params &params, int first_cta) {
    const OwnedTile tile = owned_tile<Role>(params, Arch::block_idx() - first_cta);
    const Sequence sequence = Sequence::make(params, tile.bidb);
    const int first = tile.block * Role::kOwn;
    if (first >= num_owned<Role>(params, tile, sequence)) return;

    Tensor acc = make_accumulator<Role>();
    char *const smem = Arch::dynamic_smem();
    Range range = {0, 0, 0, 0};
    if constexpr (Role::kOwnsKeys) {
      if (first < sequence.seqlen_k) range = row_range<Role>(sequence, tile.block);
    } else if (first < sequence.seqlen_q) {
      const KeyRange keys = KeyRange::make<Role>(params, sequence, tile.block);
      range = {keys.n_block_min, keys.n_block_max, keys.n_block_full_min, keys.n_block_full};
    }
    if (range.min < range.max) TurnsMainloop<Role>::run(params, tile, sequence, range, smem, acc);

    // The loop needs the registers: what follows from the CTA's index is found again.
    const OwnedTile same_tile = owned_tile<Role>(params, Arch::block_idx_again() - first_cta);
    store_one<Role>(params, same_tile, Sequence::make(params, same_tile.bidb), smem, acc);
  }

  template <class Role, class Accumulator>
  SDPA_DEVICE static void store_one(const Params &params, const OwnedTile &tile, const Sequence &sequence, char *smem,
                                    Accumulator &acc) {
    constexpr bool kIsDv = Role::kRole == fmha_bwd::Role::kDv;
    const TensorRef &tensor = !Role::kOwnsKeys ? params.dq : kIsDv ? params.dv : params.dk;
    const int64_t offset = tile.bidb * tensor.batch_stride +
                           (Role::kOwnsKeys ? tile.bidh_kv : tile.bidh) * tensor.head_stride +
                           (Role::kOwnsKeys ? sequence.first_row_k : sequence.first_row_q) * tensor.row_stride;
    Epilogue<Role>::store(acc, kIsDv ? params.dropout.keep_scale : params.score_scale, smem, 0, tensor, offset,
                          tile.block * Role::kOwn, Role::kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q,
                          num_owned<Role>(params, tile, sequence), kIsDv ? params.head_dim_v : params.head_dim);
  }

  // The tile of the role's CTA `index`. Under a causal mask those with most to do come first.
  template <class Role>
  SDPA_DEVICE static OwnedTile owned_tile(const Params &params, int index) {
    const TileScheduler &scheduler = Role::kOwnsKeys ? params.key_scheduler : params.scheduler;
    const WorkTile work = params.is_causal ? scheduler.template tile<true, false, CausalOrder::kLongestFirst>(index)
                                           : scheduler.template tile<false, false, CausalOrder::kLongestFirst>(index);
    if constexpr (!Role::kOwnsKeys) return {work.m_block, work.bidb, work.bidh, work.bidh_kv};
    const int n_block = params.is_causal ? scheduler.num_m_blocks - 1 - work.m_block : work.m_block;
    return {n_block, work.bidb, work.bidh * params.heads_per_kv, work.bidh};
  }

  // Rows of the gradient that its sequence has.
  template <class Role>
  SDPA_DEVICE static int num_owned(const Params &params, const OwnedTile &tile, const Sequence &sequence) {
    return Role::kOwnsKeys ? num_keys(params, tile.bidb) : sequence.num_rows;
  }

  template <class Role>
  SDPA_DEVICE static auto make_accumulator() {  // ((2, 2), MMA_M, MMA_K)
    Tensor acc = partition_fragment_C(typename Role::TiledMma{}, Shape<Int<Role::kOwn>, Int<Role::kHeadDim>>{});
    clear(acc);
    return acc;
  }
};

}  // namespace sdpa::fmha_bwd
