// How a split kernel's results leave: the warps of a CTA merge theirs (fmha_fwd/group_merge.cuh), the CTAs of a tile
// meet in global memory (fmha_fwd/split.cuh), and what is complete is normalised and stored as in epilogue.cuh.
//
// All parts of a row had the same mean c subtracted from their keys, so they merge as they are, and softmax_scale · q·c
// comes back to the sum of all.
#pragma once

#include "sdpa/arch/pack.hpp"
#include "sdpa/fmha_fwd/split.cuh"
#include "sdpa/fmha_fwd_q8/epilogue.cuh"

namespace sdpa::fmha_fwd_q8 {

// What becomes of a row once its parts are one: shared memory begins with the mean logits of the tile's rows, unless
// nobody asks.
template <class Traits>
struct SplitEnds {
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = SoftmaxOf<Traits>;
  using Rows = fmha_fwd::Epilogue<Traits>;

  SDPA_DEVICE static bool needs_mean(const Params &params) {
    return params.softmax_lse != nullptr || params.sinks.data != nullptr;
  }

  // Row `row` of the tile, of O four columns from `col` on.
  SDPA_DEVICE static void store(const Params &params, const WorkTile &tile, const Sequence &sequence, int row, int col,
                                float max, float sum, const float4 &out) {
    const int out_row = tile.m_block * Traits::kBlockM + row;
    const float mean = needs_mean(params) ? reinterpret_cast<const float *>(Traits::Arch::dynamic_smem())[row] : 0.f;
    const float inverse = complete(params, tile, sequence, out_row, mean, max, sum);
    if (col < params.head_dim_v)
      *reinterpret_cast<uint2 *>(Rows::out_at(params, tile, sequence, out_row) + col) =
          make_uint2(pack(out.x * inverse, out.y * inverse), pack(out.z * inverse, out.w * inverse));
    if (params.softmax_lse && col == 0) *Rows::lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
  }

  // The row's maximum and sum become those of softmax_lse. Returns what its O has to be multiplied with.
  SDPA_DEVICE static float complete(const Params &params, const WorkTile &tile, const Sequence &sequence, int out_row,
                                    float mean, float &max, float &sum) {
    max += SoftmaxState::kLseShift + mean;
    const float scale = Rows::with_sink(params, tile, sequence, out_row, max, sum);
    return SoftmaxState::inverse(sum) * (scale * SoftmaxState::kOutScale);
  }

  SDPA_DEVICE static uint32_t pack(float x, float y) {
    return arch::pack<Element>(Epilogue<Traits>::cut(x), Epilogue<Traits>::cut(y));
  }
};

template <class Traits>
struct SplitEpilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = SoftmaxOf<Traits>;
  using Rows = fmha_fwd::Epilogue<Traits>;
  using Merge = fmha_fwd::GroupMerge<Traits>;
  using Ends = SplitEnds<Traits>;
  using Parts = fmha_fwd::SplitEpilogue<Traits, Ends>;

  static constexpr int kBlockM = Traits::kBlockM;
  static_assert(kBlockM * static_cast<int>(sizeof(float)) <= Traits::kTileQ, "mean logits take the room of Q");

  // tOrO ((2, 2), MMA_M, MMA_K) of the thread's group. `split`: the CTA's.
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                     const KeySplit &split, int tile_index, char *smem, Accumulator &tOrO,
                                     SoftmaxState &softmax) {
    Merge merged(smem + Traits::kOffsetK, tOrO, softmax);
    if (split.num_active == 1) {
      store_merged(params, tile, sequence, merged);
      return;
    }
    const int64_t first_part = int64_t{tile_index} * params.num_splits;
    const int num_rows = cute::min(+kBlockM, sequence.num_rows - tile.m_block * kBlockM);
    Parts::store_part(params, first_part + split.index, num_rows, merged);
    if (!Parts::is_last(params.arrivals + tile_index, split.num_active)) return;
    if (Ends::needs_mean(params)) {
      if (merged.group == 0) store_means(params, tile, sequence, merged, reinterpret_cast<float *>(smem));
      Arch::syncthreads();  // the mean logits are in shared memory
    }
    Parts::merge_parts(params, tile, sequence, first_part, split.num_active, num_rows);
  }

 private:
  // A tile that no other CTA has a part of.
  SDPA_DEVICE static void store_merged(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                       Merge &merged) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const int out_row = tile.m_block * kBlockM + merged.row(i);
      if (out_row >= sequence.seqlen_q) merged.clear(i);  // it may be NaN
      float max = merged.row_max[i], sum = merged.row_sum[i];
      const float mean = Ends::needs_mean(params) ? mean_logit(params, tile, sequence, merged, i) : 0.f;
      const float inverse = Ends::complete(params, tile, sequence, out_row, mean, max, sum);
      if (out_row >= sequence.num_rows) continue;
      Element *const out = Rows::out_at(params, tile, sequence, out_row);
      CUTE_UNROLL
      for (int t = 0; t < Merge::kTiles; ++t) {
        const float4 &unit = merged.out[i / 2 * Merge::kTiles + t];
        if (merged.col(t) < params.head_dim_v)
          *reinterpret_cast<uint32_t *>(out + merged.col(t)) = i % 2 == 0
                                                                   ? Ends::pack(unit.x * inverse, unit.y * inverse)
                                                                   : Ends::pack(unit.z * inverse, unit.w * inverse);
      }
      if (params.softmax_lse && merged.group == 0 && merged.tid % 4 == 0)
        *Rows::lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
    }
  }

  // means [kBlockM], by one group.
  SDPA_DEVICE static void store_means(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                      const Merge &merged, float *means) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const float mean = mean_logit(params, tile, sequence, merged, i);
      if (merged.tid % 4 == 0) means[merged.row(i)] = mean;
    }
  }

  // Of row i of this thread; all lanes of a quad call.
  SDPA_DEVICE static float mean_logit(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                      const Merge &merged, int i) {
    return QPrologue<Traits>::mean_logit(params, tile, sequence, tile.m_block * kBlockM + merged.row(i),
                                         merged.tid % 4);
  }
};

}  // namespace sdpa::fmha_fwd_q8
