// What a launch of the sm_90 kernels hands to its CTAs: the tensors as TMA descriptors, sizes, and the scheduler.
// Made from the C ABI's sdpa_params by launch.cuh. Plain kernels take Params, general ones GeneralParams.
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
template <class TensorMap, class Base = sdpa::Params>
struct Params : Base {
  TensorMap map_q;    // boxes of kSmemCols x 64
  TensorMap map_k;    // boxes of kSmemCols x kBlockN
  TensorMap map_v;    // boxes of kSmemCols x kBlockN
  TensorMap map_out;  // boxes of kSmemCols x 16
  Steps step_q, step_k, step_v;
  uint32_t num_tiles;  // below 2^31
  uint32_t num_ctas;   // each takes one of as many tiles, then one of the next; see next_tile
};

// A general kernel learns on the device where a sequence ends, so its maps are ragged: they have a fifth dimension,
// which steps over rows as well, and start `rows` rows before their tensor. Row r of a sequence of n rows, whose first
// is row f of the tensor, has the coordinates rows - n + r and f + n: together r + f, and outside of the map from n on.
template <class TensorMap>
struct GeneralParams : Params<TensorMap, sdpa::GeneralParams> {
  int32_t rows_q;  // extents of the maps: no sequence has more rows
  int32_t rows_k;
  Steps step_out;  // a packed tensor has no batches
};

}  // namespace sdpa::fmha_fwd_sm90
