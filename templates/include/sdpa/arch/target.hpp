// Chooses the machine that a translation unit is compiled for, and the macros by which one source serves both:
// nvcc and an sm_80-class GPU (`Sm80`), or an ordinary C++ compiler and the fiber engine (`Host`).
// A policy says how one operation is done; it knows nothing about attention.
//
// Both policies provide: MmaOp<Element>, MmaS8S8, MmaU8S8, LdsmN, LdsmT, CpAsync (CuTe atoms of the same traits),
// thread_idx, block_idx, thread_idx_again, block_idx_again, forget_origin, uniform, dynamic_smem, syncthreads,
// sync_group, syncwarp, cp_async_fence, cp_async_wait<N>, shfl_xor, any, fence_device, increment, load_device,
// store_device, await, announce, check_alignment, prefetch, byte_pair, at_least_mask, pack_subnormals, kHasMaxOfThree, max3, multiply, exp2,
// log2, reciprocal, launch.
#pragma once

// After a lambda's parameters: what is called from several places would else become a function that keeps the
// accumulators in local memory.
#define SDPA_INLINE_LAMBDA __attribute__((always_inline))

#if defined(SDPA_TARGET_HOST)

#define SDPA_DEVICE inline
#define SDPA_HOST_DEVICE inline
#define SDPA_KERNEL(Traits)
#define SDPA_CLUSTER(num_ctas)
#define SDPA_GRID_CONSTANT

#include "sdpa/arch/host.hpp"

namespace sdpa::arch {
using Target = Host;
}

#else

#define SDPA_DEVICE __device__ __forceinline__
#define SDPA_HOST_DEVICE __host__ __device__ __forceinline__
#define SDPA_KERNEL(Traits) __global__ __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
#define SDPA_CLUSTER(num_ctas) __cluster_dims__(num_ctas, 1, 1)
#define SDPA_GRID_CONSTANT __grid_constant__

#include "sdpa/arch/sm80.cuh"

namespace sdpa::arch {
using Target = Sm80;
}

#endif
