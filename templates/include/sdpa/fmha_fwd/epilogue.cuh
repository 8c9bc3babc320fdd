// How a finished tile leaves: O is normalised, rounded, staged in shared memory and stored 16 bytes a lane
// (staged_rows.cuh); softmax_lse is one float a row. A row that lies beyond its sequence becomes 0 and -inf; so does
// one that saw no key, or its softmax_lse is the head's sink.
//
//   store_tile    one KV group: every warp stages and stores its own rows, no block barrier
//   merge_tile    several KV groups: group_merge.cuh makes one result of theirs; lanes of a quad swap pairs of columns
//   store_empty   a tile whose rows see no key at all
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/sinks.cuh"
#include "sdpa/attention/staged_rows.cuh"
#include "sdpa/fmha_fwd/group_merge.cuh"

namespace sdpa::fmha_fwd {

template <class Traits>
struct Epilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using SoftmaxState = Softmax<Arch, Traits::kRowsPerThread>;
  using Params = typename Traits::Params;
  using Staged = StagedRows<Element, Traits::kBlockM, Traits::kHeadDim, Traits::kSmemCols, Traits::kMmaM>;
  using Vector = uint4;  // 16 bytes, 8 elements

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kVectorsPerRow = kHeadDim / 8;

  // tOrO ((2, 2), MMA_M, MMA_K) of the only KV group.
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(const Params &params, const WorkTile &tile, const Sequence &sequence, char *smem,
                                     Accumulator &tOrO, SoftmaxState &softmax) {
    const int tid = Traits::kIsGeneral ? Arch::thread_idx_again() : Arch::thread_idx();
    const auto thr_mma = typename Traits::TiledMma{}.get_slice(tid);
    Tensor tOcO_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{}));
    Tensor tOcO = make_tensor(tOcO_.data(), accumulator_rows_cols(tOcO_.layout()));     // (rows, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const int row = tile.m_block * kBlockM + get<0>(tOcO(i, 0));
      if (Traits::kIsGeneral && row >= sequence.seqlen_q) {
        softmax.row_sum[i] = 0.f;
        CUTE_UNROLL
        for (int j = 0; j < size<1>(tOrO_rows); ++j) tOrO_rows(i, j) = 0.f;  // it may be NaN
      }
      const float scale = with_sink(params, tile, sequence, row, softmax.row_max[i], softmax.row_sum[i]);
      const float inverse = SoftmaxState::inverse(softmax.row_sum[i]) * scale;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); ++j) tOrO_rows(i, j) *= inverse;
      if (params.softmax_lse && tid % 4 == 0 && row < sequence.num_rows)
        *lse_at(params, tile, sequence, row) = SoftmaxState::lse(softmax.row_max[i], softmax.row_sum[i]);
    }

    // A warp's rows of sO lie where its own rows of Q lay; only with Q in registers does V lie there, read by all.
    if constexpr (Traits::kQInRegs) {
      Arch::syncthreads();  // every warp has read its last V
    } else {
      Arch::syncwarp();  // every lane has read its last Q
    }
    Element *const staged = reinterpret_cast<Element *>(smem);
    const auto word = [&](int i, int j)
                          SDPA_INLINE_LAMBDA { return arch::pack<Element>(tOrO_rows(i, j), tOrO_rows(i, j + 1)); };
    if constexpr (Traits::kStagesByLayout) {
      Tensor sO = make_tensor(make_smem_ptr(staged), typename Traits::SmemLayoutQ{});
      CUTE_UNROLL
      for (int i = 0; i < Traits::kRowsPerThread; ++i) {
        CUTE_UNROLL
        for (int j = 0; j < size<1>(tOrO_rows); j += 2) *reinterpret_cast<uint32_t *>(&sO(tOcO(i, j))) = word(i, j);
      }
    } else {
      Staged::stage(staged, tid, word);
    }
    Arch::syncwarp();  // the warp's rows of O are in shared memory
    store_staged(params, tile, sequence, staged, tid);
  }

  // Once the warp's rows of O are in shared memory.
  SDPA_DEVICE static void store_staged(const Params &params, const WorkTile &tile, const Sequence &sequence,
                                       const Element *staged, int tid) {
    const int first_row = tile.m_block * kBlockM, num_cols = Traits::head_dim_v(params);
    Element *const out = out_of(params, tile, sequence);
    if constexpr (Traits::kIsSplit) {  // rows are those of several heads
      Staged::store_each(staged, tid, first_row, sequence.num_rows, num_cols,
                         [&](int row) SDPA_INLINE_LAMBDA { return out + Traits::row_offset(params, params.out, row); });
    } else {
      Staged::store(staged, tid, out, params.out.row_stride, first_row, sequence.num_rows, num_cols);
    }
  }

  // tOrO ((2, 2), MMA_M, MMA_K) of this thread's KV group.
  template <class Accumulator>
  SDPA_DEVICE static void merge_tile(const Params &params, const WorkTile &tile, const Sequence &sequence, char *smem,
                                     Accumulator &tOrO, SoftmaxState &softmax) {
    using Merge = GroupMerge<Traits>;
    Merge merged(smem, tOrO, softmax);
    const int first_row = tile.m_block * kBlockM;
    uint32_t words[Merge::kUnits][2];  // rows 2m and 2m + 1, two columns each
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m) {
      float inverse[2];
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) {
        float &row_sum = merged.row_sum[2 * m + r];
        const int row = first_row + merged.row(2 * m + r);
        if (Traits::kIsGeneral && row >= sequence.seqlen_q) merged.clear(2 * m + r);
        const float scale = with_sink(params, tile, sequence, row, merged.row_max[2 * m + r], row_sum);
        inverse[r] = SoftmaxState::inverse(row_sum) * scale;
      }
      CUTE_UNROLL
      for (int u = m * Merge::kTiles; u < (m + 1) * Merge::kTiles; ++u) {
        const float4 &unit = merged.out[u];
        words[u][0] = arch::pack<Element>(unit.x * inverse[0], unit.y * inverse[0]);
        words[u][1] = arch::pack<Element>(unit.z * inverse[1], unit.w * inverse[1]);
      }
    }

    // A quad holds 8 columns of two rows in two words a lane: two units make a vector of 8 columns for each lane.
    const int quad_lane = merged.tid % 4;
    Element *const out = out_of(params, tile, sequence);
    CUTE_UNROLL
    for (int first = 0; first < Merge::kUnits; first += 2) {
      const bool is_pair = first + 1 < Merge::kUnits;
      uint32_t vector[4] = {words[first][0], words[first][1], is_pair ? words[first + is_pair][0] : 0,
                            is_pair ? words[first + is_pair][1] : 0};
      transpose_quad(vector, quad_lane);
      const int u = first + quad_lane / 2;
      const int m = Traits::kMmaM == 1 ? 0 : u / Merge::kTiles;
      const int row = first_row + merged.row(2 * m + quad_lane % 2);
      const int col = merged.tile_col(u - m * Merge::kTiles);
      if (u < Merge::kUnits && row < sequence.num_rows && col < Traits::head_dim_v(params))
        *reinterpret_cast<Vector *>(out + Traits::row_offset(params, params.out, row) + col) =
            make_uint4(vector[0], vector[1], vector[2], vector[3]);
    }
    if (merged.group == 0) {
      const int row = first_row + merged.row(quad_lane);
      store_lse(params, tile, sequence, quad_lane, row, merged.row_max, merged.row_sum);
    }
  }

  SDPA_DEVICE static void store_empty(const Params &params, const WorkTile &tile, const Sequence &sequence) {
    for (int index = Arch::thread_idx(); index < kBlockM * kVectorsPerRow; index += Traits::kThreads) {
      const int out_row = tile.m_block * kBlockM + index / kVectorsPerRow;
      const int col = index % kVectorsPerRow * 8;
      if (out_row >= sequence.num_rows) break;
      if (col < Traits::head_dim_v(params))
        *reinterpret_cast<Vector *>(out_at(params, tile, sequence, out_row) + col) = make_uint4(0, 0, 0, 0);
      if (params.softmax_lse && col == 0) {
        float row_max = SoftmaxState::kNoKey, row_sum = 0.f;
        with_sink(params, tile, sequence, out_row, row_max, row_sum);
        *lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(row_max, row_sum);
      }
    }
  }

  // row_max and row_sum of the tile's row `row` become those with its head's sink. Returns what its O has to be
  // multiplied with, next to 1 / row_sum.
  SDPA_DEVICE static float with_sink(const Params &params, const WorkTile &tile, const Sequence &sequence, int row,
                                     float &row_max, float &row_sum) {
    if constexpr (Traits::kIsGeneral) {
      if (params.sinks.data != nullptr && row < sequence.seqlen_q) {
        int bidh = tile.bidh;
        if constexpr (Traits::kIsSplit) bidh += params.heads_per_kv.rem(row);
        return add_sink<Arch>(sink_of(params.sinks, bidh), row_max, row_sum) * keep_scale(params);
      }
    }
    return keep_scale(params);
  }

  // Row 0 of the tile's (first) head.
  SDPA_DEVICE static Element *out_of(const Params &params, const WorkTile &tile, const Sequence &sequence) {
    return static_cast<Element *>(params.out.data) + tile.bidb * params.out.batch_stride +
           tile.bidh * params.out.head_stride + sequence.first_row_q * params.out.row_stride;
  }

  SDPA_DEVICE static Element *out_at(const Params &params, const WorkTile &tile, const Sequence &sequence, int row) {
    return out_of(params, tile, sequence) + Traits::row_offset(params, params.out, row);
  }

  SDPA_DEVICE static float *lse_at(const Params &params, const WorkTile &tile, const Sequence &sequence, int row) {
    float *const lse = params.softmax_lse + tile.bidb * params.lse_batch_stride + tile.bidh * params.lse_head_stride +
                       sequence.first_row_q;
    if constexpr (Traits::kIsSplit) {
      int position, head;
      params.heads_per_kv(position, head, row);
      return lse + head * params.lse_head_stride + position;
    } else {
      return lse + row;
    }
  }

 private:
  // Lane i of a quad stores softmax_lse of row i of those that the quad has, which is the tile's row `row`: one branch.
  template <int kRows>
  SDPA_DEVICE static void store_lse(const Params &params, const WorkTile &tile, const Sequence &sequence, int i,
                                    int row, const float (&row_max)[kRows], const float (&row_sum)[kRows]) {
    static_assert(kRows <= 4);
    if (params.softmax_lse && i < kRows && row < sequence.num_rows) {
      float max = row_max[0], sum = row_sum[0];
      CUTE_UNROLL
      for (int other = 1; other < kRows; ++other) {
        max = i == other ? row_max[other] : max;
        sum = i == other ? row_sum[other] : sum;
      }
      *lse_at(params, tile, sequence, row) = SoftmaxState::lse(max, sum);
    }
  }

  // A 4 x 4 matrix, of which each lane of a quad holds a column: afterwards it holds a row, row `quad_lane`.
  SDPA_DEVICE static void transpose_quad(uint32_t (&words)[4], int quad_lane) {
    const bool is_odd = quad_lane % 2 != 0, is_high = quad_lane >= 2;
    uint32_t pairs[2][2];  // of rows `is_odd` and 2 + is_odd: columns 0 and 1 in the lower lanes, 2 and 3 in the upper
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint32_t other = Arch::shfl_xor(is_odd ? words[2 * i] : words[2 * i + 1], 1);
      pairs[i][0] = is_odd ? other : words[2 * i];
      pairs[i][1] = is_odd ? words[2 * i + 1] : other;
    }
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const uint32_t own = is_high ? pairs[1][j] : pairs[0][j];
      const uint32_t other = Arch::shfl_xor(is_high ? pairs[0][j] : pairs[1][j], 2);
      words[j] = is_high ? other : own;
      words[2 + j] = is_high ? own : other;
    }
  }

  SDPA_DEVICE static float keep_scale(const Params &params) {
    if constexpr (Traits::kHasDropout) return params.dropout.keep_scale;
    return 1.f;
  }
};

}  // namespace sdpa::fmha_fwd
