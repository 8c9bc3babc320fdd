// How a warpgroup's finished tile leaves: O is normalised, rounded, staged in shared memory as Q lay there, and stored by
// TMA, 16 rows a warp; softmax_lse is one float a row. A row that lies beyond its sequence becomes 0 and -inf; so does
// one that saw no key, or its softmax_lse is the head's sink. Rows and columns beyond the tensor, or beyond a packed
// sequence, are outside of the map.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/sinks.cuh"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_fwd_sm90/pipeline.cuh"

namespace sdpa::fmha_fwd_sm90 {

template <class Traits>
struct Epilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;
  using SoftmaxState = Softmax<Arch, 2>;

  // tOrO ((2, 2, kHeadDim / 8), 1, 1).
  template <class Accumulator>
  SDPA_DEVICE static void store(const Params &params, typename Traits::SharedStorage &smem, int consumer,
                                const WorkTile &tile, const Sequence &sequence, [[maybe_unused]] float sink,
                                Accumulator &tOrO, SoftmaxState &softmax) {
    const int tid = (Traits::kKeepsNothing ? Arch::thread_idx_again() : Arch::thread_idx()) % kWarpgroup;
    const int warp = tid / 32;
    const int first_row = Traits::first_row(tile.m_block, consumer);
    const int num_rows = Traits::kIsGeneral ? sequence.num_rows : params.seqlen_q;
    Tensor tOrO_rows = make_tensor(tOrO.data(), wgmma_rows_cols(tOrO.layout()));  // (2, cols)
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto row_of = [&] SDPA_INLINE_LAMBDA { return first_row + warp * kWarpRows + tid % 32 / 4 + 8 * i; };
      [[maybe_unused]] float scale = 1.f;
      if constexpr (Traits::kIsGeneral) {
        if (row_of() >= sequence.seqlen_q) {
          softmax.row_sum[i] = 0.f;
          CUTE_UNROLL
          for (int j = 0; j < size<1>(tOrO_rows); ++j) tOrO_rows(i, j) = 0.f;  // it may be NaN
        } else if (params.sinks.data != nullptr) {
          scale = add_sink<Arch>(sink, softmax.row_max[i], softmax.row_sum[i]);
        }
      }
      float inverse = SoftmaxState::inverse(softmax.row_sum[i]);
      if constexpr (Traits::kIsGeneral) inverse *= scale;
      if constexpr (Traits::kHasDropout) inverse *= params.dropout.keep_scale;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); ++j) tOrO_rows(i, j) *= inverse;
    }

    if constexpr (Traits::kOutInQ) {
      sync_consumer(consumer);  // every warp has read its last Q
    } else {
      if (tid % 32 == 0) Arch::template tma_store_wait_read<0>();  // of the tile before
      Arch::syncwarp();                                            // the warp's room of O is free
    }
    Element *const room = Traits::kOutInQ ? smem.q[0][consumer] : smem.out[Traits::kOutInQ ? 0 : consumer];
    Tensor sO = make_tensor(make_smem_ptr(room), typename Traits::SmemLayoutQ{});  // (64, kHeadDim)
    typename Traits::MmaPV mma_pv;
    const auto copy = make_tiled_copy_C(Copy_Atom<typename Arch::StsmN, Element>{}, mma_pv);
    const auto thr_copy = copy.get_slice(tid);
    Tensor tOrO_half = make_tensor<Element>(tOrO.layout());  // ((2, 2, kHeadDim / 8), 1, 1)
    Tensor pairs = recast<uint32_t>(tOrO_half);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) = arch::pack<Element>(tOrO(2 * i), tOrO(2 * i + 1));
    cute::copy(copy, thr_copy.retile_S(tOrO_half), thr_copy.partition_D(as_position_independent_swizzle_tensor(sO)));
    Arch::fence_async_proxy();
    Arch::syncwarp();  // the warp's rows of O are in shared memory

    if (tid % 32 == 0) {
      if (first_row + warp * kWarpRows < num_rows) {
        MapRows<Traits> rows;
        if constexpr (Traits::kIsGeneral)
          rows = MapRows<Traits>::make(params.ragged_out, tile.bidb, sequence.first_row_q, sequence.num_rows);
        CUTE_UNROLL
        for (int col = 0; col < Traits::kHeadDim; col += Traits::kSmemCols) {
          const Element *const chunk = room + col * kWarpgroupRows + warp * kWarpRows * Traits::kSmemCols;
          const int row = first_row + warp * kWarpRows;
          if constexpr (Traits::kIsGeneral) {
            Arch::tma_store(&params.map_out, chunk, col, rows.before + row, tile.bidh, rows.end, kRaggedRows);
          } else {
            Arch::tma_store(&params.map_out, chunk, col, row, tile.bidh, tile.bidb);
          }
        }
      }
      Arch::tma_store_commit();
    }

    // Lane i of a quad stores that of its row i, while TMA stores O.
    const int quad_lane = tid % 4, row = first_row + warp * kWarpRows + tid % 32 / 4 + 8 * quad_lane;
    if (params.softmax_lse && quad_lane < 2 && row < num_rows) {
      float *lse = params.softmax_lse + tile.bidb * params.lse_batch_stride + tile.bidh * params.lse_head_stride;
      if constexpr (Traits::kIsGeneral) lse += sequence.first_row_q;
      const float row_max = quad_lane == 0 ? softmax.row_max[0] : softmax.row_max[1];
      const float row_sum = quad_lane == 0 ? softmax.row_sum[0] : softmax.row_sum[1];
      lse[row] = SoftmaxState::lse(row_max, row_sum);
    }
    if constexpr (Traits::kOutInQ) {
      if (tid % 32 == 0) {
        Arch::template tma_store_wait_read<0>();
        Arch::mbarrier_arrive(&smem.q_empty[0][consumer]);  // the warp's rows may take the next Q
      }
    }
  }

  // Shared memory must stay until the last stores have read it.
  SDPA_DEVICE static void finish() {
    if (Arch::thread_idx() % 32 == 0) Arch::template tma_store_wait_read<0>();
  }

 private:
  SDPA_DEVICE static void sync_consumer(int consumer) {
    if (consumer == 0) {
      Arch::template named_sync<4>(kWarpgroup);
    } else if (consumer == 1) {
      Arch::template named_sync<5>(kWarpgroup);
    } else {
      Arch::template named_sync<6>(kWarpgroup);
    }
  }
};

}  // namespace sdpa::fmha_fwd_sm90
