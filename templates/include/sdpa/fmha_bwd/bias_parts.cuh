// The gradient of a bias that batches share, in parts.
//
// A bias of few tiles would have few CTAs, each of which goes through all batches. So batches are dealt out, in runs of the
// same length: a CTA makes the sums of one tile and one run, in float32 and in the workspace, as if they were the gradient
// (bias_gradient.cuh), and the launch of this file adds them up, run after run, and rounds them once. How many runs there
// are follows from the problem and the tile, and not from the card: neither do the bits. A bias that has batches itself is
// not divided, so that an example has the bits that it has alone.
#pragma once

#include <algorithm>

#include "sdpa/fmha_bwd/bias_gradient.cuh"

namespace sdpa::fmha_bwd {

// As many as run at once on a card with 128 SMs. A part of a tile of 64 x 64 has 16 KiB: all take 4 MiB at most.
inline constexpr int64_t kMaxCtasInParts = 256;

struct BiasParts {
  int64_t count;
  int64_t batches;  // of a part; the last one may have fewer

  BiasParts(int64_t num_tiles, int64_t batch, bool sums_batches) : count(1), batches(1) {
    if (!sums_batches) return;
    const int64_t wanted = std::max(int64_t{1}, std::min(batch, kMaxCtasInParts / num_tiles));
    batches = (batch + wanted - 1) / wanted;
    count = (batch + batches - 1) / batches;
  }
};

// What the launch that adds them up receives.
struct BiasSumParams {
  const float *parts;  // [num_parts, num_elements]
  int32_t num_parts;
  int32_t num_elements;      // of dbias, [heads, rows, keys]
  cutlass::FastDivmod keys;  // of dbias: 1 where they are summed over
  cutlass::FastDivmod rows;
  void *dbias;
  int64_t dbias_stride[4];  // batch, head, row, key; elements
  MaskType dbias_type;
};

template <class Traits>
struct BiasSum {
  using Arch = typename Traits::Arch;

  static constexpr int kLoads = 16;  // in flight

  SDPA_DEVICE static void run(const BiasSumParams &params) {
    const int element = Arch::block_idx() * Traits::kThreads + Arch::thread_idx();
    if (element >= params.num_elements) return;
    const float *const parts = params.parts + element;
    float total = 0.f;
    CUTE_NO_UNROLL
    for (int first = 0; first < params.num_parts; first += kLoads) {
      float loaded[kLoads];
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i)
        loaded[i] = first + i < params.num_parts ? parts[(first + i) * params.num_elements] : 0.f;
      CUTE_UNROLL
      for (int i = 0; i < kLoads; ++i) total += loaded[i];
    }
    int head_row, key, head, row;
    params.keys(head_row, key, element);
    params.rows(head, row, head_row);
    BiasGradient<Traits>::with_type(params.dbias_type, [&](auto zero) SDPA_INLINE_LAMBDA {
      using Out = decltype(zero);
      static_cast<Out *>(
          params.dbias)[head * params.dbias_stride[1] + row * params.dbias_stride[2] + key * params.dbias_stride[3]] =
          Out(total);
    });
  }
};

}  // namespace sdpa::fmha_bwd
