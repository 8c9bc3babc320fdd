// Q of one warpgroup, from global memory to bytes in registers: the A operand of wgmma, with one scale a row.
//
// Byte for byte and scale for scale what fmha_fwd_q8/q_prologue.cuh makes: softmax_scale · log2(e) goes into the scale, a
// negative one's sign into Q, and rows beyond the sequence and columns beyond head_dim are zeros. Of a row a thread has
// the columns 16 j + 4 l + {0, 1, 2, 3}, l being its lane in the quad: four elements are a load of 8 bytes.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/fmha_fwd_q8/q_prologue.cuh"

namespace sdpa::fmha_fwd_q8_sm90 {

template <class Traits>
struct QFragment {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Params = typename Traits::Params;

  static constexpr int kSteps = Traits::kHeadDim / 32;  // of the MMA

  // tSrQ ((4, 2, 2), 1, kSteps), bytes. `tid`: among those that compute.
  template <class Fragment>
  SDPA_DEVICE static void load(const Params &params, const WorkTile &tile, const Sequence &sequence, int tid,
                               Fragment &tSrQ, float (&q_scale)[2]) {
    using Prologue = fmha_fwd_q8::QPrologue<Traits>;
    const Element *const q = Prologue::base(params, tile, sequence);
    const int quad_lane = tid % 4;
    uint2 vectors[2][2 * kSteps];
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = tile.m_block * Traits::kBlockM + Prologue::row_of(tid, i);
      CUTE_UNROLL
      for (int j = 0; j < 2 * kSteps; ++j) {
        const int col = 16 * j + 4 * quad_lane;
        vectors[i][j] = make_uint2(0, 0);
        if (row < sequence.seqlen_q && col < params.head_dim)
          vectors[i][j] = *reinterpret_cast<const uint2 *>(q + Traits::row_offset(params, params.q, row) + col);
      }
    }
    const uint32_t sign = params.negate_q ? 0x80008000u : 0u;
    Tensor words = recast<uint32_t>(tSrQ);  // ((1, 2, 2), 1, kSteps)
    CUTE_UNROLL
    for (int i = 0; i < 2; ++i) {
      float x[kSteps][8];
      uint32_t amax = 0;
      CUTE_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        const uint2 a = vectors[i][2 * k], b = vectors[i][2 * k + 1];
        fmha_fwd_q8::widen<Element>(x[k], make_uint4(a.x ^ sign, a.y ^ sign, b.x ^ sign, b.y ^ sign));
        CUTE_UNROLL
        for (int e = 0; e < 8; ++e) amax = cute::max(amax, fmha_fwd_q8::magnitude(x[k][e]));
      }
      amax = cute::max(amax, Arch::shfl_xor(amax, 2));
      amax = cute::max(amax, Arch::shfl_xor(amax, 1));
      const float inverse = fmha_fwd_q8::inverse_of(amax);
      CUTE_UNROLL
      for (int k = 0; k < kSteps; ++k) {
        CUTE_UNROLL
        for (int h = 0; h < 2; ++h)
          words(make_coord(0, i, h), 0, k) = fmha_fwd_q8::to_bytes<Arch>(&x[k][4 * h], inverse);
      }
      q_scale[i] = Prologue::scale_of_row(params, amax);
    }
  }
};

}  // namespace sdpa::fmha_fwd_q8_sm90
