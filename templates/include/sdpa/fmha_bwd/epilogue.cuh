// The epilogue: accumulators (kOwn x kHeadDim) → scaled, rounded, global memory. Rows go through the warp's own rows of
// shared memory, so that 16 bytes are stored at a time. Rows that exist but do not attend become 0.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/fmha_bwd/mainloop.cuh"

namespace sdpa::fmha_bwd {

template <class Traits>
struct Epilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;

  static constexpr int kOwn = Traits::kOwn;
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kVectorsPerRow = kHeadDim / 8;

  // `which`: the owned tile, A0 or A1, whose shared memory the rows go through; this warp has read its rows of it.
  // `tensor` is that of the head's row 0; rows below `length` attend, rows below `num_rows` exist.
  template <class Accumulator>
  SDPA_DEVICE static void store(Accumulator &acc, float scale, char *smem, int which, const TensorRef &tensor,
                                int64_t offset, int first_row, int length, int num_rows, int num_cols) {
    const int tid = Arch::thread_idx();
    const auto thr_mma = typename Traits::TiledMma{}.get_slice(tid);
    Tensor coords_ = thr_mma.partition_C(make_identity_tensor(Shape<Int<kOwn>, Int<kHeadDim>>{}));
    Tensor coords = make_tensor(coords_.data(), accumulator_rows_cols(coords_.layout()));  // (rows, cols)
    Tensor values = make_tensor(acc.data(), accumulator_rows_cols(acc.layout()));          // (rows, cols)
    Element *const rows = reinterpret_cast<Element *>(smem) + which * Traits::kTileA;
    Tensor sX = make_tensor(make_smem_ptr(rows), typename Traits::SmemLayoutA{});  // (kOwn, kHeadDim)
    Arch::syncwarp();  // every lane has read its last rows of the owned tile
    CUTE_UNROLL
    for (int i = 0; i < Traits::kRowsPerThread; ++i) {
      const bool attends = first_row + get<0>(coords(i, 0)) < length;
      CUTE_UNROLL
      for (int j = 0; j < size<1>(values); j += 2) {
        const uint32_t pair = arch::pack<Element>(values(i, j) * scale, values(i, j + 1) * scale);
        *reinterpret_cast<uint32_t *>(&sX(coords(i, j))) = attends ? pair : 0u;
      }
    }
    Arch::syncwarp();  // the warp's rows are in shared memory

    Element *const out = static_cast<Element *>(tensor.data) + offset;
    const int warp = tid / 32, lane = tid % 32;
    CUTE_UNROLL
    for (int m = 0; m < Traits::kMmaM; ++m) {
      const int first = (m * Traits::kNWarps + warp) * 16;
      CUTE_UNROLL
      for (int it = 0; it < 16 * kVectorsPerRow / 32; ++it) {
        const int index = it * 32 + lane;
        const int row = first + index / kVectorsPerRow, col = index % kVectorsPerRow * 8;
        if (first_row + row < num_rows && col < num_cols)
          *reinterpret_cast<uint4 *>(out + int64_t{first_row + row} * tensor.row_stride + col) =
              *reinterpret_cast<const uint4 *>(&sX(row, col));
      }
    }
  }
};

}  // namespace sdpa::fmha_bwd
