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

template <class Element, int kHeadDim, int kBlockM, int kBlockN, int kStages, int kNWarps, bool kIsCausal>
constexpr KernelRow make_row(const char *name) {
  static_assert(kHeadDim % kVectorElements == 0 && kHeadDim <= 128,
                "head_dim must be a multiple of 8 of at most 128: the second GEMM's widest tile");
  constexpr sdpa_dtype kDtype = std::is_same_v<Element, cutlass::half_t> ? SDPA_DTYPE_F16 : SDPA_DTYPE_BF16;
  KernelRow row = {};
  row.info.struct_size = sizeof(sdpa_kernel_info);
  row.info.dtype = kDtype;
  row.info.name = name;
  row.info.family = "unfused";
  row.info.arch = 89;
  row.info.head_dim = kHeadDim;
  row.info.block_m = kBlockM;
  row.info.block_n = kBlockN;
  row.info.stages = kStages;
  row.info.warps = kNWarps;
  row.info.kv_groups = 1;
  row.info.is_causal = kIsCausal;
  row.info.smem_bytes = smem_bytes(kHeadDim, kBlockM, kBlockN, kStages, kNWarps);
  row.info.ctas_per_sm = 1;
  row.can_implement = can_implement<kBlockM, kBlockN>;
  row.workspace_bytes = workspace_bytes;
#if defined(SDPA_TARGET_HOST)
  row.launch = host::launch<Element>;
#else
  row.launch = Pipeline<kDtype, kHeadDim, kBlockM, kBlockN, kStages, kNWarps>::launch;
#endif
  row.threads = 32 * kNWarps;
  return row;
}

}  // namespace sdpa::unfused
