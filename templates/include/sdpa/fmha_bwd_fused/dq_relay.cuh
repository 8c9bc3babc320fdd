// What a CTA of keys adds to dQ, tile of rows after tile of rows: its own dS K on top of what the CTAs of the keys
// before left, in float32 and in the order of tiles of keys.
//
// A tile's sums lie in the workspace in the order of accumulators: a thread always finds its own ones, 16 bytes at a time.
// The turn of a tile says whose keys come next. CTA n waits for n - 1 alone, and every CTA goes through its tiles from
// the last one down: so it follows a step behind, and waits where it would overtake. The first CTA that a tile has
// stores without loading: nothing is zeroed but turns.
//
// The loop needs the registers: what follows from the thread's index is found again in every step.
//
// In a step of the mainloop: `pass_on` behind the first barrier, what the step before left being written; `keep`, then
// `add`, which has a barrier. `finish` behind the last step.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/fmha_bwd_fused/kernel_traits.cuh"
#include "sdpa/fmha_fwd/mainloop.cuh"

namespace sdpa::fmha_bwd_fused {

template <class Traits>
class DqRelay {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using CopyAtomT = typename Traits::Keys::SmemCopyAtomT;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kVectors = Traits::kDqVectors;
  static constexpr int kAnnouncer = 0;
  static constexpr int kWaiter = Traits::kThreads - 32;  // in another warp: both wait for memory

 public:
  static constexpr bool kIsMade = true;

  // `first`: tiles of rows from there on have no CTA before n_block.
  SDPA_DEVICE DqRelay(const Params &params, int bidb, int n_block, int first, char *smem)
      : params_(params), smem_(smem), first_tile_(bidb * params.num_heads_q), n_block_(n_block), first_(first) {}

  // dS as `packed` makes it, transposed, (kBlockN, kBlockM) → shared memory.
  template <class Pairs>
  SDPA_DEVICE void keep(const Pairs &pairs) const {
    if (!is_asked_for()) return;
    const auto thr_mma = typename Traits::Keys::TiledMma{}.get_slice(Arch::thread_idx_again());
    Tensor coords_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockN>, Int<kBlockM>>{}));
    Tensor coords = make_tensor(coords_.data(), accumulator_rows_cols(coords_.layout()));    // (keys, rows)
    Tensor values = make_tensor(pairs.data(), accumulator_rows_cols(pairs.layout()));        // (keys, rows)
    Tensor sDsT = make_tensor(make_smem_ptr(elements()), typename Traits::SmemLayoutDsT{});  // (kBlockN, kBlockM)
    CUTE_UNROLL
    for (int i = 0; i < size<0>(values); ++i) {
      CUTE_UNROLL
      for (int j = 0; j < size<1>(values); j += 2)  // two neighbours
        *reinterpret_cast<uint32_t *>(&sDsT(coords(i, j))) = *reinterpret_cast<const uint32_t *>(&values(i, j));
    }
  }

  SDPA_DEVICE void add(int bidh, int m_block) {
    if (!is_asked_for()) return;
    const int tid = Arch::thread_idx_again();
    const int index = (first_tile_ + bidh) * params_.num_m_blocks + m_block;
    const bool is_first = m_block >= first_;
    if (!is_first && tid == kWaiter) Arch::await(params_.turns + index, n_block_);
    Arch::syncthreads();  // dS is visible, and what the CTA before left

    float4 *const sums = params_.dq_sums + int64_t{index} * (kVectors * Traits::kThreads) + tid;
    float4 before[kVectors];
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      before[v] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (!is_first) before[v] = Arch::load_device(sums + v * Traits::kThreads);
    }
    Tensor sDs = make_tensor(make_smem_ptr(elements()), typename Traits::SmemLayoutDs{});  // (kBlockM, kBlockN)
    Tensor sKt = make_tensor(make_smem_ptr(reinterpret_cast<Element *>(smem_)),
                             typename Traits::SmemLayoutKt{});  // (kHeadDim, kBlockN)
    typename Traits::TiledMmaDq tiled_mma;
    const auto thr_mma = tiled_mma.get_slice(tid);
    Tensor tQrA = thr_mma.partition_fragment_A(sDs);                                      // (8, MMA_M, kBlockN / 16)
    Tensor tQrB = thr_mma.partition_fragment_B(sKt);                                      // (4, MMA_N, kBlockN / 16)
    Tensor tQrQ = partition_fragment_C(tiled_mma, Shape<Int<kBlockM>, Int<kHeadDim>>{});  // ((2, 2), MMA_M, MMA_N)
    const auto copy_a = make_tiled_copy_A(CopyAtomT{}, tiled_mma).get_slice(tid);
    const auto copy_b = make_tiled_copy_B(CopyAtomT{}, tiled_mma).get_slice(tid);
    static_assert(decltype(size(tQrQ))::value == 4 * kVectors);
    clear(tQrQ);
    fmha_fwd::gemm<false, CopyAtomT, CopyAtomT>(tiled_mma, tQrQ, tQrA, tQrB, copy_a.partition_S(sDs),
                                                copy_b.partition_S(sKt), copy_a.retile_D(tQrA), copy_b.retile_D(tQrB));
    CUTE_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const float4 sum = make_float4(before[v].x + tQrQ(4 * v), before[v].y + tQrQ(4 * v + 1),
                                     before[v].z + tQrQ(4 * v + 2), before[v].w + tQrQ(4 * v + 3));
      Arch::store_device(sums + v * Traits::kThreads, sum);
    }
    written_ = index;
  }

  // Every thread is behind a barrier that follows its `add`.
  SDPA_DEVICE void pass_on() const {
    if (written_ >= 0 && Arch::thread_idx_again() == kAnnouncer) Arch::announce(params_.turns + written_, n_block_ + 1);
  }

  // All warps have read the keys when this returns.
  SDPA_DEVICE void finish() {
    Arch::syncthreads();
    pass_on();
  }

 private:
  SDPA_DEVICE bool is_asked_for() const { return params_.dq.data != nullptr; }
  SDPA_DEVICE Element *elements() const { return reinterpret_cast<Element *>(smem_ + Traits::kOffsetDs); }

  const Params &params_;
  char *const smem_;
  const int first_tile_;  // of the batch, in heads
  const int n_block_;
  const int first_;
  int written_ = -1;  // the tile that the step before added to
};

}  // namespace sdpa::fmha_bwd_fused
