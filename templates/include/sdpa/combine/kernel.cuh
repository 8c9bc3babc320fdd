// Merges attention over disjoint sets of keys into attention over all of them, a row of one query and head at a time:
//
//   m = max(sink, max_i lse_i)     lse = m + ln(exp(sink - m) + Σ_i exp(lse_i - m))
//   out = Σ_i exp(lse_i - m) out_i / (exp(sink - m) + Σ_i exp(lse_i - m))
//
// A thread has eight columns of a row, 16 bytes of a 16-bit type, and meets no other thread: each finds the weights of
// its row by itself, which costs less than to share them. The bound is memory, and every part is read once. Sums are in
// float32 and go by the order of the parts, so the bits do not depend on anything else.
//
//   no key in any part   lse = -inf (or the sink), out = 0; what the parts hold there is not read
//   NaN in any lse       both NaN
//   +inf in any lse_i    lse = +inf, out = NaN: exp(inf - inf)
//   a sink of +inf       lse = +inf, out = 0
//
// How launches are checked and made is in launch.cuh.
#pragma once

#include <cmath>
#include <cstring>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/pack.hpp"
#include "sdpa/arch/target.hpp"
#include "sdpa/attention/constants.hpp"
#include "sdpa/combine/params.hpp"

namespace sdpa::combine {

// Config: Arch, Element, kHeadDim (the largest), kStages (parts whose loads are in flight), kNWarps, kCtasPerSm.
template <class Config>
struct KernelTraits : Config {
  using Config::kHeadDim;

  static constexpr int kThreads = 32 * Config::kNWarps;
  static constexpr int kSmemBytes = 0;
  static_assert(kHeadDim % kVector == 0 && kHeadDim / kVector <= kThreads, "a CTA must hold a row");
};

template <class Traits>
struct Kernel {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;

  static constexpr int kStages = Traits::kStages;
  static constexpr int kWords = kVector * static_cast<int>(sizeof(Element)) / 16;
  static constexpr float kNoKey = -INFINITY;

  struct Vector {
    uint4 words[kWords];
  };

  SDPA_DEVICE static void run(const Params &params) {
    int row_of_cta, vector, bidbh, row, bidb, bidh;
    params.vectors(row_of_cta, vector, Arch::thread_idx());
    const int index = Arch::block_idx() * params.rows_per_cta + row_of_cta;
    if (row_of_cta >= params.rows_per_cta || index >= params.num_rows) return;
    params.seqlen_q(bidbh, row, index);
    params.num_heads(bidb, bidh, bidbh);
    const auto offset = [&](const int64_t (&stride)[3])
                            SDPA_INLINE_LAMBDA { return bidb * stride[0] + bidh * stride[1] + row * stride[2]; };
    const auto lse_of = [&](int i) SDPA_INLINE_LAMBDA {
      const Part &part = params.parts[i * params.step];
      return *reinterpret_cast<const float *>(part.lse + i * params.lse_part_stride + offset(part.lse_stride));
    };
    const auto load = [&](int i) SDPA_INLINE_LAMBDA {
      const Part &part = params.parts[i * params.step];
      const char *const from =
          part.out + i * params.out_part_stride + offset(part.out_stride) + vector * int64_t{kVector * sizeof(Element)};
      Arch::check_alignment(from, 16);
      return *reinterpret_cast<const Vector *>(from);
    };

    const float sink = params.sinks ? params.sinks[bidh * params.sink_stride] : kNoKey;
    float max = sink;
    for (int i = 0; i < params.num_parts; ++i) max = larger(max, lse_of(i));

    float sum = weight(sink, max);
    float out[kVector] = {};
    for (int first = 0; first < params.num_parts; first += kStages) {
      Vector part[kStages];
      float lse[kStages];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStages; ++i) {
        lse[i] = first + i < params.num_parts ? lse_of(first + i) : kNoKey;
        part[i] = {};
        if (lse[i] != kNoKey) part[i] = load(first + i);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kStages; ++i) {
        const float part_weight = weight(lse[i], max);
        sum += part_weight;
        add(out, part_weight, part[i]);
      }
    }

    // Under a maximum of +inf the weights are what they are divided by already, and sum may be NaN.
    const float scale = max == INFINITY ? 1.f : sum == 0.f ? 0.f : Arch::reciprocal(sum);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) out[i] *= scale;
    store(params.out + offset(params.out_stride), vector, params.out_dtype, out);
    if (params.lse != nullptr && vector == 0)
      params.lse[index] = max == INFINITY || sum == 0.f ? max : max + kLn2 * Arch::log2(sum);
  }

 private:
  // NaN wins.
  SDPA_DEVICE static float larger(float a, float b) { return b > a || b != b ? b : a; }

  SDPA_DEVICE static float weight(float lse, float max) {
    return lse == kNoKey ? 0.f : Arch::exp2((lse - max) * kLog2e);
  }

  SDPA_DEVICE static void add(float (&out)[kVector], float part_weight, const Vector &part) {
    Element elements[kVector];
    memcpy(elements, &part, sizeof(part));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kVector; ++i) out[i] += part_weight * static_cast<float>(elements[i]);
  }

  SDPA_DEVICE static void store(char *row, int vector, int out_dtype, const float (&out)[kVector]) {
    if (out_dtype == SDPA_DTYPE_F32) {
      float4 *const to = reinterpret_cast<float4 *>(row) + 2 * vector;
      Arch::check_alignment(to, 16);
      to[0] = make_float4(out[0], out[1], out[2], out[3]);
      to[1] = make_float4(out[4], out[5], out[6], out[7]);
    } else {
      uint4 *const to = reinterpret_cast<uint4 *>(row) + vector;
      Arch::check_alignment(to, 16);
      *to = out_dtype == SDPA_DTYPE_F16 ? packed<cutlass::half_t>(out) : packed<cutlass::bfloat16_t>(out);
    }
  }

  template <class Out>
  SDPA_DEVICE static uint4 packed(const float (&out)[kVector]) {
    return make_uint4(arch::pack<Out>(out[0], out[1]), arch::pack<Out>(out[2], out[3]), arch::pack<Out>(out[4], out[5]),
                      arch::pack<Out>(out[6], out[7]));
  }
};

}  // namespace sdpa::combine
