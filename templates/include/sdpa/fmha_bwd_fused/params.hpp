// What one launch of the fused backward receives: what the one with two roles does, and what dQ is added up in.
// Made from the C ABI's sdpa_bwd_params by launch.cuh; holds no compile-time fact of any kernel.
#pragma once

#include <cstdint>

#include <vector_types.h>

#include "sdpa/fmha_bwd/params.hpp"

namespace sdpa::fmha_bwd_fused {

// A tile of dQ is kBlockM query rows of one head: tile m_block of (bidb, bidh) has the index
// (bidb * num_heads_q + bidh) * num_m_blocks + m_block.
struct Params : fmha_bwd::Params {
  float4 *dq_sums;       // [tiles, vectors of a thread, threads]: a tile in the order of its accumulators
  uint32_t *turns;       // [tiles]: 1 + the last tile of keys that was added; 0 before the first one
  uint32_t *tickets;     // how many CTAs have started
  int32_t num_m_blocks;  // of padded_rows
  cutlass::FastDivmod m_blocks;
};

}  // namespace sdpa::fmha_bwd_fused
