// The sm_90a instruction set as a policy, on top of what sm_80 has: TMA copies of boxes of a tensor, mbarriers that count
// their bytes, wgmma, setmaxnreg. The names are those of arch/host_sm90.hpp, which does the same on a CPU.
//
// A TensorMap describes a tensor of up to five dimensions, of which the innermost has stride 1; a copy moves one box of
// it, names the box by the coordinates of its first element, innermost first, and fills with zeros what lies outside the
// tensor. Boxes are swizzled in shared memory, so a tile starts at a multiple of 8 times the bytes of a box's row.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "sdpa/arch/sm80.cuh"

// compute_90 without the `a` would compile all of this to nothing.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "the units of sm_90 kernels are compiled for 90a"
#endif

namespace sdpa::arch {

struct Sm90 : Sm80 {
  using TensorMap = CUtensorMap;
  using StsmN = cute::SM90_U32x4_STSM_N;

  // stride_bytes are those of dimensions 1 to rank - 1; swizzle_bytes is that of a box's row, 32, 64 or 128.
  static Status make_tensor_map(TensorMap &map, const char *name, int element_bytes, bool is_bf16, const void *address,
                                int rank, const uint64_t *extent, const uint64_t *stride_bytes, const uint32_t *box,
                                int swizzle_bytes) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {  // the library is not linked to the driver's
      void *function = nullptr;
      cudaDriverEntryPointQueryResult result;
      const cudaError_t error =
          cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
      return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function)
                                                                           : nullptr;
    }();
    if (encode == nullptr)
      return make_status(SDPA_CUDA_ERROR, "the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12.0 or later");
    if (element_bytes != 1 && element_bytes != 2)
      return make_status(SDPA_NOT_SUPPORTED, "%s: elements of %d bytes", name, element_bytes);
    const CUtensorMapDataType type = element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                     : is_bf16          ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    static constexpr cuuint32_t kOnes[5] = {1, 1, 1, 1, 1};
    const CUtensorMapSwizzle swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                             : CU_TENSOR_MAP_SWIZZLE_32B;
    const CUresult result = encode(&map, type, static_cast<cuuint32_t>(rank), const_cast<void *>(address), extent,
                                   stride_bytes, box, kOnes, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
      return make_status(SDPA_CUDA_ERROR, "%s: cuTensorMapEncodeTiled fails with CUresult %d", name,
                         static_cast<int>(result));
    return {};
  }

  // SMs of the current device; 1 if that cannot be asked.
  static int num_sms() {
    int device = 0, count = 1;
    if (cudaGetDevice(&device) == cudaSuccess)
      (void)cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }

  SDPA_DEVICE static char *dynamic_smem() {
    extern __shared__ __align__(1024) char smem_1024[];
    return smem_1024;
  }

  // ---- mbarriers: addresses in shared memory ----
  SDPA_DEVICE static uint32_t shared_address(const void *pointer) { return cute::cast_smem_ptr_to_uint(pointer); }

  SDPA_DEVICE static void mbarrier_init(uint64_t *barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
  }
  // After all inits, before a barrier of the CTA.
  SDPA_DEVICE static void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
  // One arrival, and so many bytes that copies are going to complete.
  SDPA_DEVICE static void mbarrier_expect(uint64_t *barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
  }
  SDPA_DEVICE static void mbarrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
  }
  // At the same barrier of the CTA that has this rank in the cluster.
  SDPA_DEVICE static void mbarrier_arrive_at(uint64_t *barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
  }
  // Returns when the phase of that parity is complete.
  SDPA_DEVICE static void mbarrier_wait(uint64_t *barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra complete;\n"
        "bra again;\n"
        "complete:\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
  }

  // ---- TMA ----
  SDPA_DEVICE static void prefetch_tensor_map(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
  }
  SDPA_DEVICE static void tma_load(const TensorMap *map, uint64_t *barrier, void *smem, int c0, int c1, int c2,
                                   int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(shared_address(smem)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
  }
  SDPA_DEVICE static void tma_load(const TensorMap *map, uint64_t *barrier, void *smem, int c0, int c1, int c2, int c3,
                                   int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(shared_address(smem)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
  }
  // `bytes` as they lie. These and both addresses are multiples of 16.
  SDPA_DEVICE static void bulk_load(uint64_t *barrier, void *smem, const void *source, int bytes) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(smem)),
                 "l"(source), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
  }
  // To the same address of all kNumCtas CTAs of the cluster; the barrier of each gets the bytes.
  template <int kNumCtas>
  SDPA_DEVICE static void tma_load_to_all(const TensorMap *map, uint64_t *barrier, void *smem, int c0, int c1, int c2,
                                          int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared_address(smem)),
        "l"(map), "r"(shared_address(barrier)), "h"(static_cast<uint16_t>((1 << kNumCtas) - 1)), "r"(c0), "r"(c1),
        "r"(c2), "r"(c3)
        : "memory");
  }
  SDPA_DEVICE static void tma_store(const TensorMap *map, const void *smem, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(shared_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
  }
  SDPA_DEVICE static void tma_store(const TensorMap *map, const void *smem, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
  }
  SDPA_DEVICE static void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;"); }
  // Of this thread's groups of stores, all but the last N have read their shared memory.
  template <int N>
  SDPA_DEVICE static void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
  }
  // What this thread wrote to shared memory is seen by copies and wgmma that are issued afterwards.
  SDPA_DEVICE static void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

  // ---- wgmma ----
  SDPA_DEVICE static void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  SDPA_DEVICE static void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  template <int N>
  SDPA_DEVICE static void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
  }
  // One step of 16 elements, or 32 bytes, along the inner dimension: C = A B, or C += A B, as mma.accumulate_ says.
  template <class TiledMma, class A, class B, class C>
  SDPA_DEVICE static void wgmma(const TiledMma &mma, const A &tCrA, const B &tCrB, C &tCrC) {
    cute::gemm(mma, tCrA, tCrB, tCrC);
  }
  // No access to these registers moves across.
  template <class Tensor>
  SDPA_DEVICE static void fence_operand(Tensor &tensor) {
    cute::warpgroup_fence_operand(tensor);
  }

  // ---- warps and warpgroups ----
  // A barrier of all threads of the cluster.
  SDPA_DEVICE static void cluster_sync() {
    cute::cluster_arrive_relaxed();  // fence_mbarrier_init releases
    cute::cluster_wait();
  }
  // Of a word that is not 0.
  SDPA_DEVICE static int highest_bit(uint32_t word) { return 31 - __clz(static_cast<int>(word)); }

  // True for one lane of the warp.
  SDPA_DEVICE static bool elect() { return cute::elect_one_sync() != 0; }
  template <int N>
  SDPA_DEVICE static void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
  }
  template <int N>
  SDPA_DEVICE static void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
  }
  template <int kId>
  SDPA_DEVICE static void named_sync(int num_threads) {
    static_assert(kId >= 1 && kId <= 7);
    asm volatile("bar.sync %0, %1;" ::"n"(kId), "r"(num_threads) : "memory");
  }
  template <int kId>
  SDPA_DEVICE static void named_arrive(int num_threads) {
    static_assert(kId >= 1 && kId <= 7);
    asm volatile("bar.arrive %0, %1;" ::"n"(kId), "r"(num_threads) : "memory");
  }

  // Queues a kernel whose CTAs come in clusters of kNumCtas, as its SDPA_CLUSTER says.
  template <int kNumCtas, class Params>
  static Status launch_clusters(void (*kernel)(Params), const char *name, int64_t num_clusters, int threads,
                                int smem_bytes, const std::remove_const_t<Params> &params, void *stream) {
    return launch(kernel, name, num_clusters * kNumCtas, threads, smem_bytes, params, stream);
  }

  // ---- a launch that begins before the one ahead of it in its stream has ended ----
  // Queues one whose CTAs may start once all CTAs of the launch ahead have called let_next_launch_begin. Each of its threads
  // has to wait for that launch: if all had left, whatever the stream has next could begin before that one has ended.
  template <class Params>
  static Status launch_early(void (*kernel)(Params), const char *name, int64_t grid, int threads,
                             const std::remove_const_t<Params> &params, void *stream) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    return status_of_launch(name, cudaLaunchKernelEx(&config, kernel, params));
  }
  SDPA_DEVICE static void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
  // Until the launch ahead has ended and what it wrote is seen.
  SDPA_DEVICE static void wait_for_launch_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
};

}  // namespace sdpa::arch
