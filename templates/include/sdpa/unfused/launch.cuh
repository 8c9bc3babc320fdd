// Registry rows of the piped baseline: O = softmax(Q Kᵀ · softmax_scale) V as a CUTLASS GEMM, a softmax kernel and a
// second CUTLASS GEMM, with the logits in the caller's workspace. It is what the fused kernels are compared with, so it
// is meant to be as fast as such a pipeline gets. The only header that generated units of this family include.
// One tile serves all head dims; a unit holds all of a tile's rows, which share their GEMMs.
#pragma once

#include <cutlass/numeric_types.h>

#include <type_traits>

#include "sdpa/registry.hpp"
#include "sdpa/unfused/problem.hpp"
#include "sdpa/unfused/tile.hpp"
#if defined(SDPA_TARGET_HOST)
#include "sdpa/unfused/host.hpp"
#else
#include "sdpa/unfused/pipeline.cuh"
#endif

namespace sdpa::unfused {

template <class Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, int kNWarps, int kNumDetails>
constexpr KernelRow make_row(const KernelFacts &facts, const sdpa_detail (&details)[kNumDetails]) {
  static_assert(kHeadDim % kVectorElements == 0 && kHeadDim <= 128,
                "head_dim must be a multiple of 8 of at most 128: the second GEMM's widest tile");
  KernelRow row = sdpa::make_row(facts, details);
  row.info.smem_bytes = smem_bytes(kHeadDim, kBlockM, kBlockN, kStages, kNWarps);
  row.info.ctas_per_sm = 1;
  row.can_implement = can_implement<kBlockM, kBlockN>;
  row.workspace_bytes = workspace_bytes;
#if defined(SDPA_TARGET_HOST)
  row.launch = host::launch<Element>;
#else
  constexpr sdpa_dtype kDtype = std::is_same_v<Element, cutlass::half_t> ? SDPA_DTYPE_F16 : SDPA_DTYPE_BF16;
  row.launch = Pipeline<kDtype, kHeadDim, kBlockM, kBlockN, kStages, kNWarps>::launch;
#endif
  row.threads = 32 * kNWarps;
  return row;
}

}  // namespace sdpa::unfused
