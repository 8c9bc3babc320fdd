// A sink: one logit of a query head that joins the denominators of its rows and no sum, as if there were a key with
// that score, in natural units, and a value of 0.
//
//   O = Σ_j exp(S_ij) V_j / (Σ_j exp(S_ij) + exp(sink))     softmax_lse = ln(Σ_j exp(S_ij) + exp(sink))
//
// It joins once, when everything else of a row is known. Without keys, O stays 0 and softmax_lse is the sink.
#pragma once

#include <cutlass/numeric_types.h>

#include "sdpa/attention/constants.hpp"
#include "sdpa/attention/params.hpp"

namespace sdpa {

// In natural units. `sinks.data` is not null.
SDPA_DEVICE float sink_of(const SinksRef &sinks, int bidh) {
  if (sinks.type == MaskType::kF32) return static_cast<const float *>(sinks.data)[bidh];
  if (sinks.type == MaskType::kF16) return static_cast<float>(static_cast<const cutlass::half_t *>(sinks.data)[bidh]);
  return static_cast<float>(static_cast<const cutlass::bfloat16_t *>(sinks.data)[bidh]);
}

// row_max (log2 units) and row_sum of a finished row become those with the sink. Returns the factor of its sum O,
// whose reference moved. An infinite sink is a legal one.
template <class Arch>
SDPA_DEVICE float add_sink(float sink, float &row_max, float &row_sum) {
  const float sink_log2 = sink * kLog2e;
  if (row_sum == 0.f || sink_log2 > row_max) {
    const float scale = row_sum == 0.f ? 0.f : Arch::exp2(row_max - sink_log2);
    row_max = sink_log2;
    row_sum = row_sum * scale + 1.f;
    return scale;
  }
  row_sum += Arch::exp2(sink_log2 - row_max);
  return 1.f;
}

}  // namespace sdpa
