// Split-KV for rows that are too many for the tiles of fmha_fwd's split kernels, and too few for the card: a chunk of a
// long prompt in the few heads of one GPU. Tiles are those of general kernels. `num_splits` CTAs share the keys of each
// (key_split.cuh), as if a CTA's share were all keys that there are, and leave their parts in the workspace
// (split_parts.cuh). A second launch, which begins while the first one ends, has a thread for every four columns of a row
// and makes one result of them. A tile whose keys are too few for a second split is stored by its only CTA.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/key_split.cuh"
#include "sdpa/attention/sinks.cuh"
#include "sdpa/attention/split_parts.cuh"
#include "sdpa/fmha_fwd_sm90/kernel_traits.cuh"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
struct SplitPart {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;
  using Parts = SplitParts<Traits>;

  // tOrO ((2, 2, kHeadDim / 8), 1, 1) of a consumer, and its statistics; `sequence` has all keys. False where the CTA has
  // the only part, which is nothing to leave for others.
  template <class Accumulator>
  SDPA_DEVICE static bool store(const Params &params, int consumer, const WorkTile &tile, const Sequence &sequence,
                                Accumulator &tOrO, Softmax<Arch, 2> &softmax) {
    if (key_split<Traits>(params, sequence, tile.m_block).num_active <= 1) return false;
    const int tid = Arch::thread_idx_again() % kWarpgroup;
    Tensor tOcO_ = typename Traits::MmaPV{}.get_slice(tid).partition_C(
        make_identity_tensor(Shape<Int<kWarpgroupRows>, Int<Traits::kHeadDim>>{}));
    Tensor tOcO = make_tensor(tOcO_.data(), wgmma_rows_cols(tOcO_.layout()));     // (2, cols) → (row, column)
    Tensor tOrO_rows = make_tensor(tOrO.data(), wgmma_rows_cols(tOrO.layout()));  // (2, cols)
    const int64_t part = Arch::block_idx_again();
    const int num_rows = sequence.num_rows - tile.m_block * Traits::kBlockM;
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = consumer * kWarpgroupRows + get<0>(tOcO(i, 0));
      if (row >= num_rows) continue;
      float *const out = Parts::out_of(params, part, row);
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); j += 2)
        *reinterpret_cast<float2 *>(out + get<1>(tOcO(i, j))) = make_float2(tOrO_rows(i, j), tOrO_rows(i, j + 1));
      if (tid % 4 == 0) *Parts::stats_of(params, part, row) = make_float2(softmax.row_max[i], softmax.row_sum[i]);
    }
    return true;
  }
};

// The second launch, of kCtasPerTile CTAs for each tile.
template <class Traits>
struct SplitMerge {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Parts = SplitParts<Traits>;
  using SoftmaxState = Softmax<Arch, 1>;

  static constexpr int kBatch = 4;  // splits are seldom many, and several CTAs share an SM
  static constexpr int kCtasPerTile = (Traits::kBlockM * Parts::kVectors + Traits::kThreads - 1) / Traits::kThreads;

  SDPA_DEVICE static void run(const typename Traits::Params &params) {
    const int num_splits = params.num_splits.divisor;
    const int first_part = Arch::block_idx() / kCtasPerTile * num_splits;
    const WorkTile tile = Traits::work_tile(params, static_cast<uint32_t>(first_part));
    const Sequence sequence = Sequence::make(params, tile.bidb);

    const int first_row = tile.m_block * Traits::kBlockM;
    const int index = Arch::block_idx() % kCtasPerTile * Traits::kThreads + Arch::thread_idx();
    const int row = index / Parts::kVectors, col = index % Parts::kVectors * 4;
    Arch::wait_for_launch_ahead();
    if (row >= Traits::kBlockM || first_row + row >= sequence.num_rows) return;
    const KeySplit split = KeySplit::make(0, num_splits, key_range<Traits>(params, sequence, tile.m_block));
    if (split.num_active <= 1) return;  // its CTA stored it

    auto [max, sum, out] =
        Parts::template merge</*kIsSameLaunch=*/false, kBatch>(params, first_part, split.num_active, row, col);
    float scale = 1.f;
    if (first_row + row >= sequence.seqlen_q) {
      sum = 0.f;
      out = make_float4(0.f, 0.f, 0.f, 0.f);  // it may be NaN
    } else if (params.sinks.data != nullptr) {
      scale = add_sink<Arch>(sink_of(params.sinks, tile.bidh), max, sum);
    }
    const float inverse = SoftmaxState::inverse(sum) * scale;
    const int64_t out_row = sequence.first_row_q + first_row + row;
    if (col < params.head_dim_v)
      *reinterpret_cast<uint2 *>(static_cast<Element *>(params.out.data) + tile.bidb * params.out.batch_stride +
                                 tile.bidh * params.out.head_stride + out_row * params.out.row_stride + col) =
          make_uint2(arch::pack<Element>(out.x * inverse, out.y * inverse),
                     arch::pack<Element>(out.z * inverse, out.w * inverse));
    if (params.softmax_lse && col == 0)
      params.softmax_lse[tile.bidb * params.lse_batch_stride + tile.bidh * params.lse_head_stride + out_row] =
          SoftmaxState::lse(max, sum);
  }
};

}  // namespace sdpa::fmha_fwd_sm90
