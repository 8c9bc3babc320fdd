// The sm_80 instruction family as a policy: mma.sync m16n8k16, ldmatrix and cp.async. It serves sm_80, 86, 87 and 89
// and, through PTX, every later part. The warp-level names are those of arch/host.hpp, which does the same on a CPU.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/registry.hpp"

namespace sdpa::arch {

struct Sm80 {
  static constexpr bool kIsHost = false;

  // D (16x8, fp32) = A (16x16, row) · B (16x8, col) + C
  template <class Element>
  using MmaOp = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, cute::SM80_16x8x16_F32F16F16F32_TN,
                                   cute::SM80_16x8x16_F32BF16BF16F32_TN>;
  // D (16x8, s32) = A (16x32, row) · B (32x8, col) + C, exact; the bytes of A are signed or unsigned, those of B signed.
  using MmaS8S8 = cute::SM80_16x8x32_S32S8S8S32_TN;
  using MmaU8S8 = cute::SM80_16x8x32_S32U8S8S32_TN;
  using LdsmN = cute::SM75_U32x4_LDSM_N;
  using LdsmT = cute::SM75_U16x8_LDSM_T;
  using CpAsync = cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>;

  SDPA_DEVICE static int thread_idx() { return static_cast<int>(threadIdx.x); }
  SDPA_DEVICE static int block_idx() { return static_cast<int>(blockIdx.x); }
  // The same indices, and the compiler forgets what it knew: what follows from them is computed anew, not kept in
  // registers.
  SDPA_DEVICE static int thread_idx_again() {
    int index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
    return index;
  }
  SDPA_DEVICE static int block_idx_again() {
    int index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
    return index;
  }

  // Any other value, likewise.
  SDPA_DEVICE static int forget_origin(int value) {
    asm volatile("" : "+r"(value));
    return value;
  }

  SDPA_DEVICE static char *dynamic_smem() {
    extern __shared__ __align__(128) char smem[];
    return smem;
  }

  SDPA_DEVICE static void syncthreads() { __syncthreads(); }
  // A barrier of the CTA that tells everyone whether `predicate` was true of anyone.
  SDPA_DEVICE static bool syncthreads_or(bool predicate) { return __syncthreads_or(predicate) != 0; }
  SDPA_DEVICE static void sync_group(int barrier, int num_threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
  }
  SDPA_DEVICE static void syncwarp() { __syncwarp(); }

  SDPA_DEVICE static void cp_async_fence() { cute::cp_async_fence(); }
  template <int N>
  SDPA_DEVICE static void cp_async_wait() {
    cute::cp_async_wait<N>();
  }

  template <class T>
  SDPA_DEVICE static T shfl_xor(T value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
  }
  // `value`, which is the same in all lanes of a warp: so the compiler may keep it in a register of the warp.
  SDPA_DEVICE static uint32_t uniform(uint32_t value) { return __shfl_sync(0xffffffffu, value, 0); }
  SDPA_DEVICE static bool any(bool predicate) { return __any_sync(0xffffffffu, predicate); }

  // Between CTAs: what this thread wrote before is seen by whoever sees what it writes after.
  SDPA_DEVICE static void fence_device() { __threadfence(); }
  // Adds 1 and gives the value before.
  SDPA_DEVICE static uint32_t increment(uint32_t *counter) { return atomicAdd(counter, 1u); }
  // Reads what other CTAs of this launch wrote, past this SM's own cache.
  template <class T>
  SDPA_DEVICE static T load_device(const T *address) {
    return __ldcg(address);
  }
  // Writes what they will read; a fence and an arrival have to follow.
  template <class T>
  SDPA_DEVICE static void store_device(T *address, const T &value) {
    *address = value;
  }

  // Waits until `turn` holds `value`; what its writer and whoever it met at a barrier wrote before may then be read, by
  // this thread and whoever it meets at a barrier.
  SDPA_DEVICE static void await(const uint32_t *turn, uint32_t value) {
    uint32_t seen;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(turn) : "memory");
    } while (seen != value);
  }
  // Ends such a wait of another CTA; a fence by itself.
  SDPA_DEVICE static void announce(uint32_t *turn, uint32_t value) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(value) : "memory");
  }

  SDPA_DEVICE static void check_alignment(const void *, int) {}

  // Asks for the cache line of `address`; waits for nothing.
  SDPA_DEVICE static void prefetch(const void *address) { asm volatile("prefetch.global.L1 [%0];" ::"l"(address)); }

  // Bytes 2 * index and 2 * index + 1 of `word`, each in the lower half of 16 bits.
  SDPA_DEVICE static uint32_t byte_pair(uint32_t word, int index) {
    return __byte_perm(word, 0, index == 0 ? 0x4140 : 0x4342);
  }

  // 0xffff for each half of `pair` that is at least that half of `least`; halves are at most 0x3ff: as fp16 they are
  // subnormal numbers, and in the same order.
  SDPA_DEVICE static uint32_t at_least_mask(uint32_t pair, uint32_t least) {
    return __hge2_mask(*reinterpret_cast<__half2 *>(&pair), *reinterpret_cast<__half2 *>(&least));
  }

  // Four floats n · 2^-24, 0 <= n < 256, as bytes, rounded to nearest even: as fp16 they are subnormal numbers, whose bits
  // are the integer. A NaN gives 255; 256 would give 0.
  SDPA_DEVICE static uint32_t pack_subnormals(float x0, float x1, float x2, float x3) {
    uint32_t low, high;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(low) : "f"(x1), "f"(x0));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(high) : "f"(x3), "f"(x2));
    return __byte_perm(low, high, 0x6420);
  }

  // Whether the largest of three integers is one instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static constexpr bool kHasMaxOfThree = true;
#else
  static constexpr bool kHasMaxOfThree = false;
#endif
  SDPA_DEVICE static int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }

  // The rounded product; no compiler makes a multiply-add of it.
  SDPA_DEVICE static float multiply(float a, float b) { return __fmul_rn(a, b); }

  SDPA_DEVICE static float exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  SDPA_DEVICE static float log2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  SDPA_DEVICE static float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }

  // Queues `kernel` on `stream` of the current device.
  template <class Params>
  static Status launch(void (*kernel)(Params), const char *name, int64_t grid, int threads, int smem_bytes,
                       const std::remove_const_t<Params> &params, void *stream) {
    if (grid > INT32_MAX)
      return make_status(SDPA_INVALID_ARGUMENT, "%s needs %lld CTAs; a launch takes at most %d", name,
                         static_cast<long long>(grid), INT32_MAX);
    kernel<<<dim3(static_cast<unsigned>(grid)), threads, smem_bytes, static_cast<cudaStream_t>(stream)>>>(params);
    return status_of_launch(name, cudaGetLastError());
  }
  static Status status_of_launch(const char *name, cudaError_t error) {
    if (error == cudaSuccess) return {};
    return make_status(SDPA_CUDA_ERROR, "launching %s: %s: %s", name, cudaGetErrorName(error),
                       cudaGetErrorString(error));
  }
};

}  // namespace sdpa::arch
