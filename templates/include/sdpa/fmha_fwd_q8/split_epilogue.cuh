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

template <class Traits>
struct SplitEpilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = SoftmaxOf<Traits>;
  using Rows = fmha_fwd::Epilogue<Traits>;
  using Merge = fmha_fwd::GroupMerge<Traits>;
  using Parts = fmha_fwd::SplitParts<Traits>;

  static constexpr int kBlockM = Traits::kBlockM;
  static_assert(kBlockM * static_cast<int>(sizeof(float)) <= Traits::kTileQ, "mean logits take the room of Q");

  // tOrO ((2, 2), MMA_M, MMA_K) of the thread's group. `split`: the CTA's.
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                     const KeySplit &split, int tile_index, char *smem, Accumulator &tOrO,
                                     SoftmaxState &softmax) {
    const Merge merged(smem + Traits::kOffsetK, tOrO, softmax);
    const bool needs_mean = params.softmax_lse != nullptr || params.sinks.data != nullptr;
    if (split.num_active == 1) {
      store_merged(params, tile, sequence, needs_mean, merged);
      return;
    }
    const int64_t first_part = int64_t{tile_index} * params.num_splits;
    const int num_rows = cute::min(+kBlockM, sequence.num_rows - tile.m_block * kBlockM);
    Parts::store(params, first_part + split.index, num_rows, merged);
    if (!Parts::is_last(params.arrivals + tile_index, split.num_active)) return;
    float *const means = reinterpret_cast<float *>(smem);  // [kBlockM]
    if (needs_mean) {
      if (merged.group == 0) {
        CUTE_UNROLL
        for (int i = 0; i < Traits::kRowsPerThread; ++i) {
          const float mean = mean_logit(params, tile, sequence, merged.row(i), merged.tid % 4);
          if (merged.tid % 4 == 0) means[merged.row(i)] = mean;
        }
      }
      Arch::syncthreads();  // the mean logits are in shared memory
    }
    Parts::merge(params, first_part, split.num_active, num_rows,
                 [&](int row, int col, float max, float sum, const float4 &out) SDPA_INLINE_LAMBDA {
                   const int out_row = tile.m_block * kBlockM + row;
                   const float inverse =
                       complete(params, tile, sequence, out_row, needs_mean ? means[row] : 0.f, max, sum);
                   if (col < params.head_dim_v)
                     *reinterpret_cast<uint2 *>(Rows::out_at(params, tile, sequence, out_row) + col) =
                         make_uint2(pack(out.x * inverse, out.y * inverse), pack(out.z * inverse, out.w * inverse));
                   if (params.softmax_lse && col == 0)
                     *Rows::lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
                 });
  }

 private:
  // A tile that no other CTA has a part of.
  SDPA_DEVICE static void store_merged(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                       bool needs_mean, const Merge &merged) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const int out_row = tile.m_block * kBlockM + merged.row(i);
      float max = merged.row_max[i], sum = merged.row_sum[i];
      const float mean =
          needs_mean ? mean_logit(params, tile, sequence, merged.row(i), merged.tid % 4) : 0.f;
      const float inverse = complete(params, tile, sequence, out_row, mean, max, sum);
      if (out_row >= sequence.num_rows) continue;
      Element *const out = Rows::out_at(params, tile, sequence, out_row);
      CUTE_UNROLL
      for (int t = 0; t < Merge::kTiles; ++t) {
        const float4 &unit = merged.out[i / 2 * Merge::kTiles + t];
        if (merged.col(t) < params.head_dim_v)
          *reinterpret_cast<uint32_t *>(out + merged.col(t)) =
              i % 2 == 0 ? pack(unit.x * inverse, unit.y * inverse) : pack(unit.z * inverse, unit.w * inverse);
      }
      if (params.softmax_lse && merged.group == 0 && merged.tid % 4 == 0)
        *Rows::lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
    }
  }

  // For row `row` of the tile; all lanes of a quad call.
  SDPA_DEVICE static float mean_logit(const Params &params, const WorkTile &tile, const Sequence &sequence, int row,
                                      int quad_lane) {
    return QPrologue<Traits>::mean_logit(params, tile, sequence, tile.m_block * kBlockM + row, quad_lane);
  }

  // The row's maximum and sum become those of softmax_lse. Returns what its O has to be multiplied with.
  SDPA_DEVICE static float complete(const Params &params, const WorkTile &tile, const Sequence &sequence, int out_row,
                                    float mean, float &max, float &sum) {
    if (out_row >= sequence.seqlen_q) sum = 0.f;
    max += SoftmaxState::kLseShift + mean;
    const float scale = Rows::with_sink(params, tile, sequence, out_row, max, sum);
    return SoftmaxState::inverse(sum) * (scale * SoftmaxState::kOutScale);
  }

  SDPA_DEVICE static uint32_t pack(float x, float y) {
    return arch::pack<Element>(Epilogue<Traits>::cut(x), Epilogue<Traits>::cut(y));
  }
};

}  // namespace sdpa::fmha_fwd_q8
