// What the CTAs that share a tile's keys leave in the workspace, (O, row_max, row_sum) each, and how their parts become
// one, always in the order of the splits:
//
//   row_max = max_s row_max_s     O = Σ_s exp2(row_max_s - row_max) O_s / Σ_s exp2(row_max_s - row_max) row_sum_s
//
// The method is FlashDecoding's (Dao et al., 2023); where parts are small, the first kernel merges them, too.
#pragma once

#include "sdpa/attention/params.hpp"
#include "sdpa/attention/softmax.cuh"

namespace sdpa {

// Traits: Arch, Params with partial_out and partial_stats, kBlockM, kHeadDim.
template <class Traits>
struct SplitParts {
  using Arch = typename Traits::Arch;
  using Params = typename Traits::Params;

  static constexpr int kVectors = Traits::kHeadDim / 4;  // of a row of O

  // Four columns of a row, O not yet divided by the sum.
  struct Merged {
    float max;
    float sum;
    float4 out;
  };

  SDPA_DEVICE static float *out_of(const Params &params, int64_t part, int row) {
    return params.partial_out + (part * Traits::kBlockM + row) * Traits::kHeadDim;
  }
  SDPA_DEVICE static float2 *stats_of(const Params &params, int64_t part, int row) {
    return params.partial_stats + part * Traits::kBlockM + row;
  }

  // Of the row's columns from `col` on. kIsSameLaunch: the parts were written by other CTAs of this launch. kBatch: splits
  // whose loads are in flight together.
  template <bool kIsSameLaunch, int kBatch = 16>
  SDPA_DEVICE static Merged merge(const Params &params, int64_t first_part, int num_active, int row, int col) {
    constexpr float kNoKey = Softmax<Arch, 1>::kNoKey;
    const float4 *const outs = reinterpret_cast<const float4 *>(out_of(params, first_part, row) + col);
    const float2 *const stats = stats_of(params, first_part, row);
    Merged merged = {kNoKey, 0.f, make_float4(0.f, 0.f, 0.f, 0.f)};
    auto &[max, sum, out] = merged;
    for (int first = 0; first < num_active; first += kBatch) {
      float2 stat[kBatch];
      float4 part[kBatch];
      float batch_max = max;
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int s = first + i;
        stat[i] = make_float2(kNoKey, 0.f);
        part[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (s < num_active) {
          stat[i] = load<kIsSameLaunch>(stats + s * Traits::kBlockM);
          part[i] = load<kIsSameLaunch>(outs + s * (Traits::kBlockM * kVectors));
        }
      }
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) batch_max = fmaxf(batch_max, stat[i].x);
      const float scale = Arch::exp2(max - batch_max);
      max = batch_max;
      sum *= scale;
      out = make_float4(scale * out.x, scale * out.y, scale * out.z, scale * out.w);
      CUTE_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const float weight = Arch::exp2(stat[i].x - max);
        sum += weight * stat[i].y;
        out.x += weight * part[i].x;
        out.y += weight * part[i].y;
        out.z += weight * part[i].z;
        out.w += weight * part[i].w;
      }
    }
    return merged;
  }

 private:
  template <bool kIsSameLaunch, class T>
  SDPA_DEVICE static T load(const T *address) {
    if constexpr (kIsSameLaunch) {
      return Arch::load_device(address);
    } else {
      return *address;
    }
  }
};

}  // namespace sdpa
