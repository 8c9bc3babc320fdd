// What the attention of a quantised problem receives on sm_90: what fmha_fwd_q8 gives its own, and maps of the bytes.
#pragma once

#include "sdpa/fmha_fwd_q8/params.hpp"

namespace sdpa::fmha_fwd_q8_sm90 {

// Both maps count the blocks of all heads of the workspace in their third dimension; the fourth has one element.
template <class TensorMap>
struct Params : fmha_fwd_q8::QuantizedParams {
  TensorMap map_k;  // rows of BlockLayout::kCols bytes
  TensorMap map_v;  // rows of 64 keys
};

}  // namespace sdpa::fmha_fwd_q8_sm90
