// How a finished tile leaves: O is normalised, rounded, staged in shared memory and stored 16 bytes a lane; softmax_lse
// is one float a row. A row that saw no key, or lies beyond its sequence, becomes 0 and -inf.
//
//   store_tile    one KV group: every warp stages and stores its own rows, no block barrier
//   merge_tile    several KV groups: (O, row_max, row_sum) of each go through shared memory and are reduced there;
//                 a split kernel does so within split.cuh
//   store_empty   a tile whose rows see no key at all
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/fmha_fwd/mainloop.cuh"

namespace sdpa::fmha_fwd {

template <class Traits>
struct Epilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using SoftmaxState = Softmax<Arch, Traits::kRowsPerThread>;
  using Params = typename Traits::Params;
  using Vector = uint4;  // 16 bytes, 8 elements

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kVectorsPerRow = kHeadDim / 8;

  // tOrO ((2, 2), MMA_M, MMA_K) of the only KV group.
  template <class Accumulator>
  SDPA_DEVICE static void store_tile(Params const &params, WorkTile const &tile, Sequence const &sequence, char *smem,
                                     Accumulator &tOrO, SoftmaxState &softmax) {
    int const tid = Arch::thread_idx();
    auto const thr_mma = typename Traits::TiledMma{}.get_slice(tid);
    Tensor tOcO_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{}));
    Tensor tOcO = make_tensor(tOcO_.data(), accumulator_rows_cols(tOcO_.layout()));     // (rows, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)
    softmax.finish();
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      int const row = tile.m_block * kBlockM + get<0>(tOcO(i, 0));
      if (Traits::kIsGeneral && row >= sequence.seqlen_q) softmax.row_sum[i] = 0.f;
      float const inverse = SoftmaxState::inverse(softmax.row_sum[i]) * keep_scale(params);
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
    Tensor sO = make_tensor(make_smem_ptr(reinterpret_cast<Element *>(smem)), typename Traits::SmemLayoutQ{});
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); j += 2)
        *reinterpret_cast<uint32_t *>(&sO(tOcO(i, j))) = arch::pack<Element>(tOrO_rows(i, j), tOrO_rows(i, j + 1));
    }
    Arch::syncwarp();  // the warp's rows of O are in shared memory

    int const warp = tid / 32, lane = tid % 32;
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m) {
      int const first_row = (m * Traits::kWarpsM + warp) * 16;
      CUTE_UNROLL
      for (int it = 0; it < 16 * kVectorsPerRow / 32; ++it) {
        int const index = it * 32 + lane;
        int const row = first_row + index / kVectorsPerRow;
        int const col = index % kVectorsPerRow * 8;
        int const out_row = tile.m_block * kBlockM + row;
        if (out_row < sequence.num_rows && col < Traits::head_dim_v(params))
          *reinterpret_cast<Vector *>(out_at(params, tile, sequence, out_row) + col) =
              *reinterpret_cast<Vector const *>(&sO(row, col));
      }
    }
  }

  // tOrO ((2, 2), MMA_M, MMA_K) of this thread's KV group.
  template <class Accumulator>
  SDPA_DEVICE static void merge_tile(Params const &params, WorkTile const &tile, Sequence const &sequence, char *smem,
                                     Accumulator &tOrO, SoftmaxState &softmax) {
    stage_groups(smem, tOrO, softmax);
    for (int index = Arch::thread_idx(); index < kBlockM * kVectorsPerRow; index += Traits::kThreads) {
      int const row = index / kVectorsPerRow, col = index % kVectorsPerRow * 8;
      int const out_row = tile.m_block * kBlockM + row;
      if (out_row >= sequence.num_rows) break;
      float max, sum, out[8];
      merge_groups(smem, row, col, max, sum, out, [&](float &row_sum) SDPA_INLINE_LAMBDA {
        if (Traits::kIsGeneral && out_row >= sequence.seqlen_q) row_sum = 0.f;
        return SoftmaxState::inverse(row_sum) * keep_scale(params);
      });
      store_vector(params, tile, sequence, out_row, col, out);
      if (params.softmax_lse && col == 0) *lse_at(params, tile, sequence, out_row) = SoftmaxState::lse(max, sum);
    }
  }

  // Brings (O, row_max, row_sum) of every KV group to shared memory.
  template <class Accumulator>
  SDPA_DEVICE static void stage_groups(char *smem, Accumulator &tOrO, SoftmaxState &softmax) {
    int const group = Arch::thread_idx() / Traits::kGroupThreads;
    int const tid = Arch::thread_idx() % Traits::kGroupThreads;
    auto const thr_mma = typename Traits::TiledMma{}.get_slice(tid);
    Tensor tOcO_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{}));
    Tensor tOcO = make_tensor(tOcO_.data(), accumulator_rows_cols(tOcO_.layout()));     // (rows, cols)
    Tensor tOrO_rows = make_tensor(tOrO.data(), accumulator_rows_cols(tOrO.layout()));  // (rows, cols)
    softmax.finish();

    float *const part = part_of(smem, group);
    Mainloop<Traits>::sync_group(group);  // the group has read its last V: its room may take the partial result
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      int const row = get<0>(tOcO(i, 0));
      if (tid % 4 == 0) {
        part[kMax + row] = softmax.row_max[i];
        part[kSum + row] = softmax.row_sum[i];
      }
      CUTE_UNROLL
      for (int j = 0; j < size<1>(tOrO_rows); j += 2)
        *reinterpret_cast<float2 *>(&part[row * Traits::kMergeStride + get<1>(tOcO(i, j))]) =
            make_float2(tOrO_rows(i, j), tOrO_rows(i, j + 1));
    }
    Arch::syncthreads();  // all partial results are in shared memory
  }

  // Row `row` of the tile, columns col to col + 7, over the KV groups:
  //   row_max = max_g row_max_g     weight_g = exp2(row_max_g - row_max)     row_sum = Σ_g weight_g row_sum_g
  //   out = factor(row_sum) Σ_g weight_g O_g
  template <class Factor>
  SDPA_DEVICE static void merge_groups(char *smem, int row, int col, float &max, float &sum, float (&out)[8],
                                       Factor const &factor) {
    constexpr int kGroups = Traits::kKvGroups;
    max = SoftmaxState::kNoKey;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) max = fmaxf(max, part_of(smem, g)[kMax + row]);
    float weight[kGroups];
    sum = 0.f;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      weight[g] = Arch::exp2(part_of(smem, g)[kMax + row] - max);
      sum += weight[g] * part_of(smem, g)[kSum + row];
    }
    float const common = factor(sum);
    CUTE_UNROLL
    for (int j = 0; j < 8; ++j) out[j] = 0.f;
    CUTE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      float4 const *const from =
          reinterpret_cast<float4 const *>(&part_of(smem, g)[row * Traits::kMergeStride + col]);
      float const scale = weight[g] * common;
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {
        float4 const four = from[half];
        out[4 * half] += scale * four.x;
        out[4 * half + 1] += scale * four.y;
        out[4 * half + 2] += scale * four.z;
        out[4 * half + 3] += scale * four.w;
      }
    }
  }

  SDPA_DEVICE static void store_empty(Params const &params, WorkTile const &tile, Sequence const &sequence) {
    for (int index = Arch::thread_idx(); index < kBlockM * kVectorsPerRow; index += Traits::kThreads) {
      int const out_row = tile.m_block * kBlockM + index / kVectorsPerRow;
      int const col = index % kVectorsPerRow * 8;
      if (out_row >= sequence.num_rows) break;
      if (col < Traits::head_dim_v(params))
        *reinterpret_cast<Vector *>(out_at(params, tile, sequence, out_row) + col) = make_uint4(0, 0, 0, 0);
      if (params.softmax_lse && col == 0) *lse_at(params, tile, sequence, out_row) = -INFINITY;
    }
  }

  SDPA_DEVICE static void store_vector(Params const &params, WorkTile const &tile, Sequence const &sequence, int row,
                                       int col, float const (&out)[8]) {
    if (col < Traits::head_dim_v(params))
      *reinterpret_cast<Vector *>(out_at(params, tile, sequence, row) + col) =
          make_uint4(arch::pack<Element>(out[0], out[1]), arch::pack<Element>(out[2], out[3]),
                     arch::pack<Element>(out[4], out[5]), arch::pack<Element>(out[6], out[7]));
  }

  SDPA_DEVICE static Element *out_at(Params const &params, WorkTile const &tile, Sequence const &sequence, int row) {
    return static_cast<Element *>(params.out.data) + tile.bidb * params.out.batch_stride +
           tile.bidh * params.out.head_stride + sequence.first_row_q * params.out.row_stride +
           Traits::row_offset(params, params.out, row);
  }

  SDPA_DEVICE static float *lse_at(Params const &params, WorkTile const &tile, Sequence const &sequence, int row) {
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
  // A group's part of shared memory: O [kBlockM][kMergeStride], row_max [kBlockM], row_sum [kBlockM].
  static constexpr int kMax = kBlockM * Traits::kMergeStride, kSum = kMax + kBlockM;
  SDPA_DEVICE static float *part_of(char *smem, int group) {
    return reinterpret_cast<float *>(smem + group * Traits::kGroupBytes);
  }

  SDPA_DEVICE static float keep_scale(Params const &params) {
    if constexpr (Traits::kHasDropout) return params.dropout.keep_scale;
    return 1.f;
  }
};

}  // namespace sdpa::fmha_fwd
