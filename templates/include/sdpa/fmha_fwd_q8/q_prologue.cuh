// Q of one tile, from global memory to bytes in shared memory: one scale a row, which stays in registers.
//
// Row i of a thread's accumulators is read by the quad that holds it, a quarter each: so the row's maximum needs two
// shuffles, and its scale is where softmax wants it. softmax_scale · log2(e) goes into the scale, a negative one's sign
// into Q. Rows beyond the sequence and columns beyond head_dim become zeros.
// Every KV group of a split kernel reads all rows, for their scales; the first one writes the bytes.
// `mean_logit` is softmax_scale · log2(e) · q·c, in float32 from the elements: what softmax_lse and sinks need back.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/fmha_fwd_q8/rounding.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
struct QPrologue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  static constexpr int kRows = Traits::kRowsPerThread;
  static constexpr int kVectors = Traits::kHeadDim / 32;  // of 8 columns, a thread's own of a row

  // Row i of this thread in the tile.
  SDPA_DEVICE static int row_of(int tid, int i) {
    return (i / 2 * Traits::kWarpsM + tid / 32) * 16 + tid % 32 / 4 + 8 * (i % 2);
  }

  SDPA_DEVICE static const Element *base(const Params &params, const WorkTile &tile, const Sequence &sequence) {
    return static_cast<const Element *>(params.q.data) + tile.bidb * params.q.batch_stride +
           tile.bidh * params.q.head_stride + sequence.first_row_q * params.q.row_stride;
  }

  // The thread's columns of one row, with the sign of softmax_scale.
  SDPA_DEVICE static void load(float (&x)[kVectors][8], const Params &params, const Element *q,
                               const Sequence &sequence, int row, int quad_lane) {
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int col = (4 * v + quad_lane) * 8;
      uint4 vector = make_uint4(0, 0, 0, 0);
      if (row < sequence.seqlen_q && col < params.head_dim)
        vector = *reinterpret_cast<const uint4 *>(q + Traits::row_offset(params, params.q, row) + col);
      if (params.negate_q) {
        vector.x ^= 0x80008000u;
        vector.y ^= 0x80008000u;
        vector.z ^= 0x80008000u;
        vector.w ^= 0x80008000u;
      }
      widen<Element>(x[v], vector);
    }
  }

  SDPA_DEVICE static void run(const Params &params, const WorkTile &tile, const Sequence &sequence, int8_t *smem_q,
                              float (&q_scale)[kRows]) {
    Tensor sQ = make_tensor(make_smem_ptr(smem_q), typename Traits::SmemLayoutQ{});  // (kBlockM, kHeadDim)
    const int tid = Traits::group_thread(), quad_lane = tid % 4;
    const bool writes = !Traits::kIsSplit || Arch::thread_idx() < Traits::kGroupThreads;
    const Element *const q = base(params, tile, sequence);
    CUTE_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int row = row_of(tid, i);
      float x[kVectors][8];
      load(x, params, q, sequence, tile.m_block * Traits::kBlockM + row, quad_lane);
      uint32_t amax = 0;
      CUTE_UNROLL
      for (int v = 0; v < kVectors * 8; ++v) amax = cute::max(amax, magnitude(x[v / 8][v % 8]));
      amax = cute::max(amax, Arch::shfl_xor(amax, 2));
      amax = cute::max(amax, Arch::shfl_xor(amax, 1));
      const float inverse = inverse_of(amax);
      if (writes) {
        CUTE_UNROLL
        for (int v = 0; v < kVectors; ++v)
          *reinterpret_cast<uint2 *>(&sQ(row, (4 * v + quad_lane) * 8)) =
              make_uint2(to_bytes<Arch>(&x[v][0], inverse), to_bytes<Arch>(&x[v][4], inverse));
      }
      q_scale[i] = scale_of_row(params, amax);
    }
  }

  // The scale of a row of which `amax` is the largest |x|.
  SDPA_DEVICE static float scale_of_row(const Params &params, uint32_t amax) {
    const float scale = scale_of(amax) * params.softmax_scale_log2;
    return scale > kLargestFloat ? kLargestFloat : scale;
  }

  // |softmax_scale| · log2(e) · q·c of row `row` of the sequence, with the sign of softmax_scale in q.
  SDPA_DEVICE static float mean_logit(const Params &params, const WorkTile &tile, const Sequence &sequence, int row,
                                      int quad_lane) {
    const float *const c = params.k_mean + (int64_t{tile.bidb} * params.num_heads_kv + tile.bidh_kv) * Traits::kHeadDim;
    float x[kVectors][8];
    load(x, params, base(params, tile, sequence), sequence, row, quad_lane);
    float sum = 0.f;
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      CUTE_UNROLL
      for (int e = 0; e < 8; ++e) sum = fmaf(x[v][e], c[(4 * v + quad_lane) * 8 + e], sum);
    }
    return Softmax<Arch, kRows>::across_quad(sum) * params.softmax_scale_log2;
  }
};

}  // namespace sdpa::fmha_fwd_q8
