// Chooses the machine of the sm_90 kernels: nvcc and a Hopper GPU (`Sm90`), or an ordinary C++ compiler and the engine
// (`HostSm90`). Both provide what target.hpp lists, and: TensorMap, make_tensor_map, num_sms, StsmN, mbarrier_init,
// fence_mbarrier_init, mbarrier_expect, mbarrier_arrive, mbarrier_wait, prefetch_tensor_map, tma_load, bulk_load, tma_store,
// tma_store_commit, tma_store_wait_read<N>, fence_async_proxy, wgmma, wgmma_fence, wgmma_commit, wgmma_wait<N>,
// fence_operand, highest_bit, elect, increase_registers<N>, decrease_registers<N>, named_sync<Id>, named_arrive<Id>; in
// clusters cluster_sync, mbarrier_arrive_at, tma_load_to_all<CTAs>, launch_clusters<CTAs>; launch_early,
// let_next_launch_begin, wait_for_launch_ahead.
#pragma once

// Without this CuTe's selector builds n = 80 and 112 from many small instructions.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#if defined(SDPA_TARGET_HOST)
#include "sdpa/arch/simt/shared_address.hpp"
#endif

#include "sdpa/arch/target.hpp"

#if defined(SDPA_TARGET_HOST)

#include "sdpa/arch/host_sm90.hpp"

namespace sdpa::arch {
using TargetSm90 = HostSm90;
}

#else

#include "sdpa/arch/sm90.cuh"

namespace sdpa::arch {
using TargetSm90 = Sm90;
}

#endif
