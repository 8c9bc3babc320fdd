// The arch policy of the host target: the operations of arch/sm80.cuh, executed by the engine in arch/simt/.
//
// The CuTe operations below inherit the traits of the SM75/SM80 atoms that they stand for, so a kernel's layouts are
// the same on both targets; only the instruction at the bottom differs. A kernel written against the policy runs here
// unchanged, one fiber per thread, and stricter than the hardware would: see simt/block.hpp for what is checked.
// Compiled as plain C++ with the CUDA headers for their types; nothing of the CUDA runtime is called.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/half.h>

#include "sdpa/arch/simt/collectives.hpp"
#include "sdpa/arch/simt/launch.hpp"
#include "sdpa/registry.hpp"

namespace sdpa::arch::host {

// m16n8k16, A row major, B column major, fp32 accumulation. Element is cutlass::half_t or cutlass::bfloat16_t.
template <class Element>
struct Mma16816 {
  static_assert(std::is_same_v<Element, cutlass::half_t> || std::is_same_v<Element, cutlass::bfloat16_t>);

  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];

  static void fma(float &d0, float &d1, float &d2, float &d3, const uint32_t &a0, const uint32_t &a1,
                  const uint32_t &a2, const uint32_t &a3, const uint32_t &b0, const uint32_t &b1, const float &c0,
                  const float &c1, const float &c2, const float &c3) {
    using Format = std::conditional_t<std::is_same_v<Element, cutlass::half_t>, simt::Half, simt::Bfloat16>;
    float d[4];
    simt::mma<Format>(d, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
    d0 = d[0];
    d1 = d[1];
    d2 = d[2];
    d3 = d[3];
  }
};

// m16n8k32 of bytes with int32 sums. ByteA is int8_t or uint8_t, the type of A.
template <class ByteA>
struct Mma16832 {
  using DRegisters = uint32_t[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = uint32_t[4];

  static void fma(uint32_t &d0, uint32_t &d1, uint32_t &d2, uint32_t &d3, const uint32_t &a0, const uint32_t &a1,
                  const uint32_t &a2, const uint32_t &a3, const uint32_t &b0, const uint32_t &b1, const uint32_t &c0,
                  const uint32_t &c1, const uint32_t &c2, const uint32_t &c3) {
    uint32_t d[4];
    simt::byte_mma<ByteA>(d, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
    d0 = d[0];
    d1 = d[1];
    d2 = d[2];
    d3 = d[3];
  }
};

// ldmatrix.x4
template <bool kTranspose>
struct Ldmatrix {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = uint32_t[4];

  static void copy(const cute::uint128_t &row, uint32_t &d0, uint32_t &d1, uint32_t &d2, uint32_t &d3) {
    uint32_t d[4];
    simt::ldmatrix<kTranspose>(d, &row);
    d0 = d[0];
    d1 = d[1];
    d2 = d[2];
    d3 = d[3];
  }
};

// cp.async.cg of 16 bytes, with zero fill.
struct CpAsync {
  using SRegisters = cute::uint128_t[1];
  using DRegisters = cute::uint128_t[1];

  static void copy(const cute::uint128_t &source, cute::uint128_t &destination, bool load) {
    simt::cp_async(&destination, &source, load);
  }
};

}  // namespace sdpa::arch::host

namespace cute {

template <>
struct MMA_Traits<sdpa::arch::host::Mma16816<cutlass::half_t>> : MMA_Traits<SM80_16x8x16_F32F16F16F32_TN> {};

template <>
struct MMA_Traits<sdpa::arch::host::Mma16816<cutlass::bfloat16_t>> : MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN> {};

template <>
struct MMA_Traits<sdpa::arch::host::Mma16832<int8_t>> : MMA_Traits<SM80_16x8x32_S32S8S8S32_TN> {};

template <>
struct MMA_Traits<sdpa::arch::host::Mma16832<uint8_t>> : MMA_Traits<SM80_16x8x32_S32U8S8S32_TN> {};

template <>
struct Copy_Traits<sdpa::arch::host::Ldmatrix<false>> : Copy_Traits<SM75_U32x4_LDSM_N> {};

template <>
struct Copy_Traits<sdpa::arch::host::Ldmatrix<true>> : Copy_Traits<SM75_U16x8_LDSM_T> {};

// The predicate goes with the traits, as in those that these inherit from.
template <>
struct Copy_Traits<sdpa::arch::host::CpAsync> : Copy_Traits<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>> {
  constexpr Copy_Traits with(bool load) const { return {{load}}; }

  template <class TS, class SLayout, class TD, class DLayout>
  friend constexpr void copy_unpack(const Copy_Traits &traits, const Tensor<TS, SLayout> &source,
                                    Tensor<TD, DLayout> &destination) {
    static_assert(is_gmem<TS>::value && is_smem<TD>::value, "cp.async copies from global to shared memory");
    Tensor rS = recast<uint128_t>(source);
    Tensor rD = recast<uint128_t>(destination);
    CUTE_STATIC_ASSERT_V(size(rS) == Int<1>{}, "the source is not one vector of 16 bytes");
    CUTE_STATIC_ASSERT_V(size(rD) == Int<1>{}, "the destination is not one vector of 16 bytes");
    sdpa::arch::host::CpAsync::copy(rS[0], rD[0], traits.pred);
  }
};

}  // namespace cute

namespace sdpa::arch {

struct Host {
  static constexpr bool kIsHost = true;

  template <class Element>
  using MmaOp = host::Mma16816<Element>;
  using MmaS8S8 = host::Mma16832<int8_t>;
  using MmaU8S8 = host::Mma16832<uint8_t>;
  using LdsmN = host::Ldmatrix<false>;
  using LdsmT = host::Ldmatrix<true>;
  using CpAsync = host::CpAsync;

  static int thread_idx() { return simt::thread_idx(); }
  static int block_idx() { return simt::block_idx(); }
  static int thread_idx_again() { return simt::thread_idx(); }
  static int block_idx_again() { return simt::block_idx(); }
  static int forget_origin(int value) { return value; }
  static uint32_t uniform(uint32_t value) { return value; }
  static char *dynamic_smem() { return simt::dynamic_smem(); }

  // The defaults are the place in the kernel that calls: see simt/shadow.hpp.
  static void syncthreads(SDPA_SIMT_CALLER) { simt::syncthreads(file, line, function); }
  static bool syncthreads_or(bool predicate, SDPA_SIMT_CALLER) {
    return simt::syncthreads_or(predicate, file, line, function);
  }
  static void sync_group(int barrier, int num_threads, SDPA_SIMT_CALLER) {
    simt::sync_group(barrier, num_threads, file, line, function);
  }
  static void syncwarp(SDPA_SIMT_CALLER) { simt::syncwarp(file, line, function); }

  static void cp_async_fence(SDPA_SIMT_CALLER) { simt::cp_async_fence(file, line, function); }
  template <int N>
  static void cp_async_wait(SDPA_SIMT_CALLER) {
    static_assert(N >= 0);
    simt::cp_async_wait(N, file, line, function);
  }

  template <class T>
  static T shfl_xor(T value, int lane_mask) {
    return simt::shfl_xor(value, lane_mask);
  }
  static bool any(bool predicate) { return simt::any(predicate); }

  static void fence_device() { simt::fence_device(); }
  static uint32_t increment(uint32_t *counter) { return simt::increment(counter); }
  template <class T>
  static T load_device(const T *address) {
    return simt::load_device(address);
  }
  template <class T>
  static void store_device(T *address, const T &value) {
    simt::store_device(address, value);
  }

  static void await(const uint32_t *turn, uint32_t value) { simt::await(turn, value); }
  static void announce(uint32_t *turn, uint32_t value) { simt::announce(turn, value); }

  static void check_alignment(const void *address, int bytes) { simt::check_alignment(address, bytes); }

  // Reads the byte, so that an address beyond its tensor is found.
  static void prefetch(const void *address) { static_cast<void>(*static_cast<const volatile char *>(address)); }

  static uint32_t byte_pair(uint32_t word, int index) {
    const uint32_t pair = word >> (16 * index);
    return (pair & 0xffu) | (pair & 0xff00u) << 8;
  }
  static uint32_t at_least_mask(uint32_t pair, uint32_t least) {
    return ((pair & 0xffffu) >= (least & 0xffffu) ? 0xffffu : 0u) | (pair >> 16 >= least >> 16 ? 0xffff0000u : 0u);
  }

  // The low byte of each float's rounding to a half, as the GPU takes it; a NaN gives 255.
  static uint32_t pack_subnormals(float x0, float x1, float x2, float x3) {
    uint32_t word = 0;
    int shift = 0;
    for (const float x : {x0, x1, x2, x3}) {
      const uint32_t byte = x == x ? static_cast<uint32_t>(::nearbyintf(x * 0x1p24f)) & 0xffu : 0xffu;
      word |= byte << shift;
      shift += 8;
    }
    return word;
  }

  static constexpr bool kHasMaxOfThree = true;
  static int max3(int a, int b, int c) { return std::max({a, b, c}); }
  // The rounded product; the compiler may not make a multiply-add of what it cannot see.
  static float multiply(float a, float b) {
    float product = a * b;
    asm("" : "+m"(product));
    return product;
  }

  // ex2.approx.ftz: results below the smallest normal number are zero.
  static float exp2(float x) {
    const float y = ::exp2f(x);
    return y < FLT_MIN ? 0.0f : y;
  }
  static float log2(float x) { return ::log2f(x); }
  static float reciprocal(float x) { return 1.0f / x; }

  template <class Params>
  static Status launch(void (*kernel)(Params), const char *name, int64_t grid, int threads, int smem_bytes,
                       const Params &params, void * /*stream*/) {
    return simt::launch(kernel, name, grid, threads, smem_bytes, params);
  }
};

}  // namespace sdpa::arch
