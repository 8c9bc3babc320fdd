// Split-KV: several CTAs share the keys of one tile, for problems with few query rows and many keys (decoding).
//
// A tile's rows are those of all query heads that read the same key head, so that K and V are read once for all of
// them: row p is position p / heads_per_kv of head p % heads_per_kv. Split s takes the s-th run of neighbouring key
// blocks. Each CTA leaves (O, row_max, row_sum) in the workspace and counts itself in; the last one to arrive merges
// them, always in the order of the splits, so the result does not depend on who was last:
//
//   row_max = max_s row_max_s     O = Σ_s exp2(row_max_s - row_max) O_s / Σ_s exp2(row_max_s - row_max) row_sum_s
//
// The method is FlashDecoding's (Dao et al., 2023), with the second kernel folded into the first.
#pragma once

#include "sdpa/fmha_fwd/epilogue.cuh"

namespace sdpa::fmha_fwd {

// One CTA's share of its tile's keys.
struct KeySplit {
  int index;
  int first_block;
  int num_blocks;
  int num_active;  // splits that have any keys: [0, num_active)

  SDPA_DEVICE static KeySplit make(int index, int num_splits, int num_blocks) {
    int const share = (num_blocks + num_splits - 1) / num_splits;
    KeySplit s;
    s.index = index;
    s.first_block = index * share;
    s.num_blocks = cute::min(share, num_blocks - s.first_block);
    s.num_active = share == 0 ? 0 : (num_blocks + share - 1) / share;
    return s;
  }

  // The sequence as if this split's keys were all there are.
  template <class Traits>
  SDPA_DEVICE Sequence of(Sequence sequence) const {
    int const first_key = first_block * Traits::kBlockN;
    sequence.first_row_k += first_key;
    sequence.causal_offset -= first_key;
    sequence.seqlen_k = cute::min(sequence.seqlen_k - first_key, num_blocks * Traits::kBlockN);
    return sequence;
  }
};

template <class Traits>
struct SplitEpilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using Base = Epilogue<Traits>;
  using SoftmaxState = typename Base::SoftmaxState;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = Traits::kHeadDim;

  // Merges the CTA's KV groups, leaves the result in the workspace and, in the last CTA, merges all and stores.
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(Params const &params, WorkTile const &tile, Sequence const &sequence,
                                     KeySplit const &split, int tile_index, char *smem, Accumulator &tOrO,
                                     SoftmaxState &softmax) {
    if (split.num_active == 1) {
      Base::merge_tile(params, tile, sequence, smem, tOrO, softmax);
      return;
    }
    int64_t const first_part = int64_t{tile_index} * params.num_splits;
    int const num_rows = cute::min(+kBlockM, sequence.num_rows - tile.m_block * kBlockM);
    Base::stage_groups(smem, tOrO, softmax);
    store_part(params, first_part + split.index, num_rows, smem);
    if (is_last(params.arrivals + tile_index, split.num_active, smem))
      merge_parts(params, tile, sequence, first_part, split.num_active, num_rows, smem);
  }

 private:
  SDPA_DEVICE static float *out_of(Params const &params, int64_t part, int row) {
    return params.partial_out + (part * kBlockM + row) * kHeadDim;
  }
  SDPA_DEVICE static float2 *stats_of(Params const &params, int64_t part, int row) {
    return params.partial_stats + part * kBlockM + row;
  }

  SDPA_DEVICE static void store_part(Params const &params, int64_t part, int num_rows, char *smem) {
    for (int index = Arch::thread_idx(); index < num_rows * (kHeadDim / 8); index += Traits::kThreads) {
      int const row = index / (kHeadDim / 8), col = index % (kHeadDim / 8) * 8;
      float max, sum, out[8];
      Base::merge_groups(smem, row, col, max, sum, out, [](float &) SDPA_INLINE_LAMBDA { return 1.f; });
      float4 *const to = reinterpret_cast<float4 *>(out_of(params, part, row) + col);
      to[0] = make_float4(out[0], out[1], out[2], out[3]);
      to[1] = make_float4(out[4], out[5], out[6], out[7]);
      if (col == 0) *stats_of(params, part, row) = make_float2(max, sum);
    }
  }

  // True in all threads of the CTA that arrives last at a tile; it also puts the count back to 0.
  SDPA_DEVICE static bool is_last(uint32_t *arrivals, int num_active, char *smem) {
    int *const flag = reinterpret_cast<int *>(smem);
    Arch::fence_device();
    Arch::syncthreads();  // the CTA has written its part, and read what it staged: its room may take the flag
    if (Arch::thread_idx() == 0) {
      *flag = Arch::increment(arrivals) == static_cast<uint32_t>(num_active - 1);
      if (*flag) *arrivals = 0;
      Arch::fence_device();
    }
    Arch::syncthreads();  // everyone sees the flag, and through it the parts of all splits
    bool const last = *flag != 0;
    Arch::syncthreads();  // everyone has read the flag: its room may take the statistics
    return last;
  }

  SDPA_DEVICE static void merge_parts(Params const &params, WorkTile const &tile, Sequence const &sequence,
                                      int64_t first_part, int num_active, int num_rows, char *smem) {
    float2 *const stats = reinterpret_cast<float2 *>(smem);  // [kBlockM][num_active]
    for (int index = Arch::thread_idx(); index < num_rows * num_active; index += Traits::kThreads) {
      int const row = index / num_active, s = index % num_active;
      stats[index] = Arch::load_device(stats_of(params, first_part + s, row));
    }
    Arch::syncthreads();  // the statistics are in shared memory
    constexpr int kVectors = kHeadDim / 4;
    for (int index = Arch::thread_idx(); index < num_rows * kVectors; index += Traits::kThreads) {
      int const row = index / kVectors, col = index % kVectors * 4;
      int const out_row = tile.m_block * kBlockM + row;
      float max = SoftmaxState::kNoKey;
      for (int s = 0; s < num_active; ++s) max = fmaxf(max, stats[row * num_active + s].x);
      float sum = 0.f;
      float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
      float4 const *from = reinterpret_cast<float4 const *>(out_of(params, first_part, row) + col);
      SDPA_UNROLL_8
      for (int s = 0; s < num_active; ++s) {
        float const weight = Arch::exp2(stats[row * num_active + s].x - max);
        float4 const part = Arch::load_device(from + s * (kBlockM * kVectors));
        sum += weight * stats[row * num_active + s].y;
        out.x += weight * part.x;
        out.y += weight * part.y;
        out.z += weight * part.z;
        out.w += weight * part.w;
      }
      if (out_row >= sequence.seqlen_q) sum = 0.f;
      float const inverse = SoftmaxState::inverse(sum);
      if (col < Traits::head_dim_v(params))
        *reinterpret_cast<uint2 *>(Base::out_at(params, tile, sequence, out_row) + col) =
            make_uint2(arch::pack<Element>(out.x * inverse, out.y * inverse),
                       arch::pack<Element>(out.z * inverse, out.w * inverse));
      if (params.softmax_lse && col == 0) *Base::lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
    }
  }
};

}  // namespace sdpa::fmha_fwd
