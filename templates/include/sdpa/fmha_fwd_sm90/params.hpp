// What a launch of the sm_90 kernels hands to its CTAs: the tensors as TMA descriptors, sizes, and the scheduler.
// Made from the C ABI's sdpa_params by launch.cuh.
#pragma once

#include "sdpa/arch/target_sm90.hpp"
#include "sdpa/attention/params.hpp"

namespace sdpa::fmha_fwd_sm90 {

// What a coordinate is multiplied by: 0 for an axis that is broadcast, which a map has as an axis of extent 1.
struct Steps {
  int32_t head;
  int32_t batch;
};

// Dimensions of a tensor map, innermost first: column, row, head, batch. Columns from head_dim on and rows from
// the sequence's end on are outside: they read as zeros and are not written.
template <class TensorMap>
struct Params : sdpa::Params {
  TensorMap map_q;    // boxes of kSmemCols x 64
  TensorMap map_k;    // boxes of kSmemCols x kBlockN
  TensorMap map_v;    // boxes of kSmemCols x kBlockN
  TensorMap map_out;  // boxes of kSmemCols x 16
  Steps step_q, step_k, step_v;
  uint32_t num_tiles;  // below 2^31
  uint32_t num_ctas;   // CTA i computes tiles i, i + num_ctas, ...
};

}  // namespace sdpa::fmha_fwd_sm90
