// Split-KV: several CTAs share the keys of one tile, for problems with few query rows and many keys (decoding).
//
// A tile's rows are those of all query heads that read the same key head, so that K and V are read once for all of
// them: row p is position p / heads_per_kv of head p % heads_per_kv. Split s takes the s-th run of neighbouring key
// blocks (key_split.cuh), and leaves its part in the workspace (split_parts.cuh). Small parts are merged by the CTA of
// their tile that arrives last; for large ones it would be long alone, and a second launch has a thread for every four
// columns of a row (SplitMerge). The results are the same.
#pragma once

#include <type_traits>

#include "sdpa/attention/key_split.cuh"
#include "sdpa/attention/split_parts.cuh"
#include "sdpa/fmha_fwd/epilogue.cuh"

namespace sdpa::fmha_fwd {

// `Ends`: what becomes of a row once its parts are one, where a family does otherwise.
template <class Traits, class Ends = void>
struct SplitEpilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using Base = Epilogue<Traits>;
  using Merge = GroupMerge<Traits>;
  using Parts = SplitParts<Traits>;
  using SoftmaxState = typename Base::SoftmaxState;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kVectors = Parts::kVectors;

  // Merges the CTA's KV groups and leaves the result in the workspace. Unless that is the next launch's business, the last
  // CTA merges all and stores.
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                     const KeySplit &split, int tile_index, char *smem, Accumulator &tOrO,
                                     SoftmaxState &softmax) {
    if (split.num_active == 1) {
      if constexpr (Traits::kKvGroups == 1) {
        Base::store_tile(params, tile, sequence, smem, tOrO, softmax);
      } else {
        Base::merge_tile(params, tile, sequence, smem, tOrO, softmax);
      }
      return;
    }
    const int64_t first_part = int64_t{tile_index} * params.num_splits;
    const int num_rows = cute::min(+kBlockM, sequence.num_rows - tile.m_block * kBlockM);
    store_part(params, first_part + split.index, num_rows, Merge(smem, tOrO, softmax));
    if (params.arrivals != nullptr && is_last(params.arrivals + tile_index, split.num_active))
      merge_parts(params, tile, sequence, first_part, split.num_active, num_rows);
  }

  SDPA_DEVICE static void store_part(const Params &params, int64_t part, int num_rows, const Merge &merged) {
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const int row = merged.row(i);
      if (row >= num_rows) continue;
      CUTE_UNROLL
      for (int t = 0; t < Merge::kTiles; ++t) {
        const float4 &unit = merged.out[i / 2 * Merge::kTiles + t];
        leave(params, reinterpret_cast<float2 *>(Parts::out_of(params, part, row) + merged.col(t)),
              i % 2 == 0 ? make_float2(unit.x, unit.y) : make_float2(unit.z, unit.w));
      }
      if (merged.group == 0 && merged.tid % 4 == 0)
        leave(params, Parts::stats_of(params, part, row), make_float2(merged.row_max[i], merged.row_sum[i]));
    }
  }

  // For another CTA of this launch, or for the next launch.
  SDPA_DEVICE static void leave(const Params &params, float2 *address, const float2 &value) {
    if (params.arrivals != nullptr) {
      Arch::store_device(address, value);
    } else {
      *address = value;
    }
  }

  // True in all threads of the CTA that arrives last at a tile; it also puts the count back to 0.
  SDPA_DEVICE static bool is_last(uint32_t *arrivals, int num_active) {
    bool last = false;
    Arch::syncthreads();  // the CTA has written its part
    if (Arch::thread_idx() == 0) {
      Arch::fence_device();
      last = Arch::increment(arrivals) == static_cast<uint32_t>(num_active - 1);
      if (last) *arrivals = 0;
      Arch::fence_device();
    }
    return Arch::syncthreads_or(last);  // whoever hears of the last arrival sees the parts of all splits
  }

  SDPA_DEVICE static void merge_parts(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                      int64_t first_part, int num_active, int num_rows) {
    for (int index = Arch::thread_idx(); index < num_rows * kVectors; index += Traits::kThreads)
      merge_vector</*kIsSameLaunch=*/true>(params, tile, sequence, first_part, num_active, index);
  }

  // Four columns of a row: the `index`-th of the tile.
  template <bool kIsSameLaunch>
  SDPA_DEVICE static void merge_vector(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                       int64_t first_part, int num_active, int index) {
    const int row = index / kVectors, col = index % kVectors * 4;
    const int out_row = tile.m_block * kBlockM + row;
    auto [max, sum, out] = Parts::template merge<kIsSameLaunch>(params, first_part, num_active, row, col);
    if (out_row >= sequence.seqlen_q) {
      sum = 0.f;
      out = make_float4(0.f, 0.f, 0.f, 0.f);  // it may be NaN
    }
    if constexpr (!std::is_void_v<Ends>) {
      Ends::store(params, tile, sequence, row, col, max, sum, out);
      return;
    }
    const float scale = Base::with_sink(params, tile, sequence, out_row, max, sum);
    const float inverse = SoftmaxState::inverse(sum) * scale;
    if (col < Traits::head_dim_v(params))
      *reinterpret_cast<uint2 *>(Base::out_at(params, tile, sequence, out_row) + col) = make_uint2(
          arch::pack<Element>(out.x * inverse, out.y * inverse), arch::pack<Element>(out.z * inverse, out.w * inverse));
    if (params.softmax_lse && col == 0) *Base::lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
  }
};

// The second launch, of kCtasPerTile CTAs for each tile.
template <class Traits>
struct SplitMerge {
  using Arch = typename Traits::Arch;
  using Parts = SplitEpilogue<Traits>;

  static constexpr int kCtasPerTile = (Traits::kBlockM * Parts::kVectors + Traits::kThreads - 1) / Traits::kThreads;

  SDPA_DEVICE static void run(const typename Traits::Params &params) {
    const int tile_index = Arch::block_idx() / kCtasPerTile;
    WorkTile tile;
    int head;
    params.m_blocks(head, tile.m_block, tile_index);
    params.scheduler.heads_q(tile.bidb, tile.bidh_kv, head);
    const int heads_per_kv = params.heads_per_kv.divisor;
    tile.bidh = tile.bidh_kv * heads_per_kv;
    Sequence sequence = Sequence::make(params, tile.bidb);
    sequence.seqlen_q *= heads_per_kv;
    sequence.num_rows *= heads_per_kv;

    const int first_row = tile.m_block * Traits::kBlockM;
    const int index = Arch::block_idx() % kCtasPerTile * Traits::kThreads + Arch::thread_idx();
    const int row = index / Parts::kVectors;
    if (row >= Traits::kBlockM || first_row + row >= sequence.num_rows || first_row >= sequence.seqlen_q) return;
    const KeyRange keys = KeyRange::make<Traits>(params, sequence, tile.m_block);
    if (keys.n_block_max == 0) return;
    const KeySplit split = KeySplit::make(0, params.num_splits, keys);
    if (split.num_active == 1) return;  // its CTA stored it
    const int64_t first_part = int64_t{tile_index} * params.num_splits;
    Parts::template merge_vector</*kIsSameLaunch=*/false>(params, tile, sequence, first_part, split.num_active, index);
  }
};

}  // namespace sdpa::fmha_fwd
