// The arch policy of the host target for sm_90 kernels: the operations of arch/sm90.cuh, executed by the engine.
//
// Tensor maps, descriptors, atoms and layouts are CuTe's and the same as on a GPU; only the instructions differ.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <type_traits>

#include <cute/arch/copy_sm90.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "sdpa/arch/host.hpp"
#include "sdpa/arch/simt/collectives_sm90.hpp"

namespace sdpa::arch::host {

// stmatrix.x4
struct Stmatrix {
  using SRegisters = uint32_t[4];
  using DRegisters = cute::uint128_t[1];

  static void copy(const uint32_t &s0, const uint32_t &s1, const uint32_t &s2, const uint32_t &s3,
                   cute::uint128_t &row) {
    simt::stmatrix({s0, s1, s2, s3}, &row);
  }
};

// How B of a wgmma lies in shared memory.
template <class Op>
struct MajorOfB;
template <template <cute::GMMA::Major, cute::GMMA::Major, cute::GMMA::ScaleIn, cute::GMMA::ScaleIn> class Op,
          cute::GMMA::Major kA, cute::GMMA::Major kB, cute::GMMA::ScaleIn kScaleA, cute::GMMA::ScaleIn kScaleB>
struct MajorOfB<Op<kA, kB, kScaleA, kScaleB>> {
  static constexpr bool kIsMn = kB == cute::GMMA::Major::MN;
};

}  // namespace sdpa::arch::host

namespace cute {

template <>
struct Copy_Traits<sdpa::arch::host::Stmatrix> : Copy_Traits<SM90_U32x4_STSM_N> {};

}  // namespace cute

namespace sdpa::arch {

struct HostSm90 : Host {
  using TensorMap = simt::TensorMap;
  using StsmN = host::Stmatrix;

  static Status make_tensor_map(TensorMap &map, const char *name, int element_bytes, bool /*is_bf16*/,
                                const void *address, int rank, const uint64_t *extent, const uint64_t *stride_bytes,
                                const uint32_t *box, int swizzle_bytes) {
    return simt::make_tensor_map(map, name, element_bytes, address, rank, extent, stride_bytes, box, swizzle_bytes);
  }

  // Few, so that small problems give a CTA several tiles.
  static int num_sms() { return 2; }

  static void mbarrier_init(uint64_t *barrier, int arrivals) {
    simt::current_block->async().init(*simt::current_block, barrier, arrivals);
  }
  static void fence_mbarrier_init() { simt::current_block->async().fence_inits(simt::thread_idx()); }
  static void mbarrier_expect(uint64_t *barrier, int bytes) {
    simt::current_block->async().arrive(*simt::current_block, barrier, bytes);
  }
  static void mbarrier_arrive(uint64_t *barrier) { mbarrier_expect(barrier, 0); }
  static void mbarrier_arrive_at(uint64_t *barrier, int rank) {
    simt::Block &block = *simt::current_block;
    simt::Block &there = block.cta(rank, "mbarrier_arrive_at");
    there.async().arrive(block, there, barrier, 0);
  }
  static void mbarrier_wait(uint64_t *barrier, int parity) {
    simt::current_block->async().wait(*simt::current_block, barrier, parity);
  }

  static void prefetch_tensor_map(const TensorMap *) {}
  static void tma_load(const TensorMap *map, uint64_t *barrier, void *smem, int c0, int c1, int c2, int c3,
                       int c4 = 0) {
    simt::current_block->async().load(*simt::current_block, *map, barrier, smem, {c0, c1, c2, c3, c4});
  }
  static void bulk_load(uint64_t *barrier, void *smem, const void *source, int bytes) {
    simt::Block &block = *simt::current_block;
    block.async().load(block, simt::bytes_as_they_lie(source, bytes), barrier, smem, {0, 0, 0, 0, 0});
  }
  template <int kNumCtas>
  static void tma_load_to_all(const TensorMap *map, uint64_t *barrier, void *smem, int c0, int c1, int c2, int c3) {
    simt::Block &block = *simt::current_block;
    for (int rank = 0; rank < kNumCtas; ++rank) {
      simt::Block &there = block.cta(rank, "tma_load");
      there.async().load(block, there, *map, barrier, smem, {c0, c1, c2, c3, 0});
    }
  }
  static void tma_store(const TensorMap *map, const void *smem, int c0, int c1, int c2, int c3, int c4 = 0) {
    simt::current_block->async().store(*simt::current_block, *map, smem, {c0, c1, c2, c3, c4});
  }
  static void tma_store_commit() { simt::current_block->async().commit_stores(*simt::current_block); }
  template <int N>
  static void tma_store_wait_read() {
    simt::current_block->async().wait_stores(*simt::current_block, N);
  }
  static void fence_async_proxy() { simt::current_block->async().fence(simt::thread_idx()); }

  static void wgmma_fence() { simt::wgmma_fence(); }
  static void wgmma_commit() { simt::wgmma_commit(); }
  template <int N>
  static void wgmma_wait() {
    simt::wgmma_wait<N>();
  }
  template <class TiledMma, class A, class B, class C>
  static void wgmma(const TiledMma &mma, const A &tCrA, const B &tCrB, C &&tCrC) {
    using Op = typename TiledMma::Atom::MMA_Op;
    using Traits = cute::MMA_Traits<Op>;
    constexpr int kN = cute::size<1>(typename Traits::Shape_MNK{});
    static_assert(decltype(cute::size(tCrC))::value == kN / 2, "one instruction");
    const bool is_zeroed = mma.accumulate_ == cute::GMMA::ScaleOut::Zero;
    const uint64_t b = tCrB(cute::_0{}).desc_;
    using ElementA = typename Traits::ValTypeA;
    constexpr bool kAInRegisters = std::is_same_v<cute::remove_cvref_t<decltype(tCrA(cute::_0{}))>, ElementA>;
    if constexpr (sizeof(ElementA) == 1) {
      static_assert(kAInRegisters, "no kernel here has A of bytes in shared memory");
      simt::wgmma_bytes<ElementA, kN>(&tCrC(0), four_registers(tCrA), b, is_zeroed);
    } else {
      constexpr bool kIsMn = host::MajorOfB<Op>::kIsMn;
      using Format =
          std::conditional_t<std::is_same_v<typename Traits::ValTypeB, cutlass::half_t>, simt::Half, simt::Bfloat16>;
      if constexpr (kAInRegisters) {
        simt::wgmma<Format, kIsMn, kN>(&tCrC(0), four_registers(tCrA), b, is_zeroed);
      } else {
        simt::wgmma<Format, kIsMn, kN>(&tCrC(0), uint64_t{tCrA(cute::_0{}).desc_}, b, is_zeroed);
      }
    }
  }
  template <class Tensor>
  static void fence_operand(Tensor &) {}

  static void cluster_sync() { simt::current_block->sync_cluster(); }
  static int highest_bit(uint32_t word) { return 31 - __builtin_clz(word); }

  static bool elect() { return simt::elect(); }
  template <int N>
  static void increase_registers() {
    simt::set_registers<N>();
  }
  template <int N>
  static void decrease_registers() {
    simt::set_registers<N>();
  }
  template <int kId>
  static void named_sync(int num_threads) {
    static_assert(kId >= 1 && kId <= 7);
    simt::sync_group(kId, num_threads);
  }
  template <int kId>
  static void named_arrive(int num_threads) {
    static_assert(kId >= 1 && kId <= 7);
    simt::arrive_group(kId, num_threads);
  }

  template <class Params>
  static Status launch(void (*kernel)(Params), const char *name, int64_t grid, int threads, int smem_bytes,
                       const Params &params, void * /*stream*/) {
    return simt::launch(kernel, name, grid, threads, smem_bytes, params, /*smem_alignment=*/1024);
  }
  template <int kNumCtas, class Params>
  static Status launch_clusters(void (*kernel)(Params), const char *name, int64_t num_clusters, int threads,
                                int smem_bytes, const Params &params, void * /*stream*/) {
    return simt::launch(kernel, name, num_clusters * kNumCtas, threads, smem_bytes, params, /*smem_alignment=*/1024,
                        kNumCtas);
  }
  // Here one launch ends before the next one begins, but that each thread waits is counted, of one launch at a time.
  template <class Params>
  static Status launch_early(void (*kernel)(Params), const char *name, int64_t grid, int threads, const Params &params,
                             void * /*stream*/) {
    const std::lock_guard<std::mutex> lock(early_launch_);
    num_waited_.store(0);
    const Status status = simt::launch(kernel, name, grid, threads, 0, params);
    const int64_t missing = grid * threads - num_waited_.load();
    if (!status.ok() || missing == 0) return status;
    return make_status(SDPA_HOST_CHECK, "kernel %s: %lld threads leave before they have waited for the launch ahead",
                       name, static_cast<long long>(missing));
  }
  static void let_next_launch_begin() {}
  static void wait_for_launch_ahead() { ++num_waited_; }

 private:
  template <class A>
  static const uint32_t *four_registers(const A &tCrA) {
    const auto registers = cute::recast<uint32_t>(tCrA);
    static_assert(decltype(cute::size(registers))::value == 4);
    return cute::raw_pointer_cast(registers.data());
  }

  inline static std::mutex early_launch_;
  inline static std::atomic<int64_t> num_waited_{0};
};

}  // namespace sdpa::arch
