// What a launch of the sm_90 kernels hands to its CTAs: the tensors as TMA descriptors, sizes, and the scheduler.
// Made from the C ABI's sdpa_params by launch.cuh. Plain kernels take Params, general ones GeneralParams, split ones
// SplitParams.
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
  uint32_t num_ctas;   // or clusters; each takes one of as many tiles, then one of the next; see next_tile
  // Causal: of the heads whose tiles a CTA takes all, one after another; see grid.hpp. Tiles of odd ones go backwards.
  uint32_t num_tiles_of_whole_heads;
};

// A general kernel learns on the device where a sequence ends, so its maps are ragged: rows from the sequence's end on
// are outside of them, wherever it ends. The second dimension steps over rows and has kRaggedRows of them; the fourth one
// goes to where the sequence ends, batch included; the last one goes kRaggedRows rows back, by wrapping around 2^64. Row r
// of a sequence of n rows has the coordinates kRaggedRows - n + r, the sequence's end, and kRaggedRows: together its
// address, and outside of the map from n on. (Triton's ragged descriptors do the same.) The address of the map is its
// tensor's: a copy that is outside in part was seen to touch it.
inline constexpr int32_t kRaggedRows = 1 << 30;
inline constexpr int64_t kRaggedWrap = int64_t{1} << 35;  // bytes; times kRaggedRows a multiple of 2^64

// Rows and batches in steps of the fourth dimension, the largest that divide both.
struct RaggedSteps {
  int32_t row;
  int32_t batch;  // 0: packed, or broadcast
};

// What is known of a boolean mask's blocks before they are read: see mask_blocks.cuh.
struct MaskBlocksRef {
  uint4 *words;             // [masks][tiles_per_mask][groups], or null: nothing is known
  int32_t groups;           // of 32 blocks, in a row of tiles
  int32_t tiles_per_mask;   // rows of tiles
  int32_t tiles_per_batch;  // 0: batches share a mask
};

template <class TensorMap>
struct GeneralParams : Params<TensorMap, sdpa::GeneralParams> {
  RaggedSteps ragged_q, ragged_k, ragged_v, ragged_out;
  MaskBlocksRef mask_blocks;
};

// Where the CTAs that share a tile's keys leave their parts; see split.cuh.
template <class TensorMap>
struct SplitParams : GeneralParams<TensorMap> {
  cutlass::FastDivmod num_splits;  // those of a tile follow each other in the grid
  float *partial_out;              // [tiles][num_splits][kBlockM][kHeadDim]
  float2 *partial_stats;           // [tiles][num_splits][kBlockM]: row_max in log2 units, row_sum
};

}  // namespace sdpa::fmha_fwd_sm90
