// The sums of dQ → scaled, rounded, global memory: a CTA a tile of kBlockM rows. Rows go through shared memory, so that 16
// bytes are stored at a time. Rows that no key sees, or that do not attend, become 0.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/sequence.cuh"
#include "sdpa/fmha_bwd_fused/kernel_traits.cuh"

namespace sdpa::fmha_bwd_fused {

template <class Traits>
struct DqConvert {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;

  static constexpr int kBlockM = Traits::kBlockM;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kVectors = Traits::kDqVectors;
  static constexpr int kVectorsPerRow = kHeadDim / 8;
  static constexpr int kSmemBytes = kBlockM * kHeadDim * static_cast<int>(sizeof(Element));
  static_assert(kSmemBytes <= Traits::kSmemBytes);
  static_assert(kBlockM * kVectorsPerRow % Traits::kThreads == 0);

  SDPA_DEVICE static void run(const Params &params) {
    int bidbh, m_block, bidb, bidh;
    params.m_blocks(bidbh, m_block, Arch::block_idx());
    params.heads_q(bidb, bidh, bidbh);
    const Sequence sequence = Sequence::make(params, bidb);
    const int first_row = m_block * kBlockM;
    if (first_row >= sequence.num_rows) return;

    const int tid = Arch::thread_idx();
    Tensor sQ = make_tensor(make_smem_ptr(reinterpret_cast<Element *>(Arch::dynamic_smem())),
                            typename Traits::Keys::SmemLayoutB{});  // (kBlockM, kHeadDim)
    const int64_t index = Arch::block_idx();
    const bool has_sums = params.turns[index] != 0;
    if (has_sums) {
      const auto thr_mma = typename Traits::TiledMmaDq{}.get_slice(tid);
      Tensor coords =
          thr_mma.partition_C(make_identity_tensor(Shape<Int<kBlockM>, Int<kHeadDim>>{}));  // ((2, 2), MMA_M, MMA_N)
      const float4 *const sums = params.dq_sums + index * (kVectors * Traits::kThreads) + tid;
      const float scale = params.score_scale;
      CUTE_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const float4 sum = sums[v * Traits::kThreads];
        *reinterpret_cast<uint32_t *>(&sQ(coords(4 * v))) = arch::pack<Element>(sum.x * scale, sum.y * scale);
        *reinterpret_cast<uint32_t *>(&sQ(coords(4 * v + 2))) = arch::pack<Element>(sum.z * scale, sum.w * scale);
      }
    }
    Arch::syncthreads();  // all rows are in shared memory

    const TensorRef &tensor = params.dq;
    Element *const out = static_cast<Element *>(tensor.data) + bidb * tensor.batch_stride + bidh * tensor.head_stride +
                         (sequence.first_row_q + first_row) * tensor.row_stride;
    CUTE_UNROLL
    for (int it = 0; it < kBlockM * kVectorsPerRow / Traits::kThreads; ++it) {
      const int at = it * Traits::kThreads + tid;
      const int row = at / kVectorsPerRow, col = at % kVectorsPerRow * 8;
      if (first_row + row >= sequence.num_rows || col >= params.head_dim) continue;
      uint4 values = make_uint4(0u, 0u, 0u, 0u);
      if (has_sums && first_row + row < sequence.seqlen_q) values = *reinterpret_cast<const uint4 *>(&sQ(row, col));
      *reinterpret_cast<uint4 *>(out + int64_t{row} * tensor.row_stride + col) = values;
    }
  }
};

}  // namespace sdpa::fmha_bwd_fused
