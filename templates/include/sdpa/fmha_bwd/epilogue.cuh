// The epilogue: accumulators (kOwn x kHeadDim) → scaled, rounded, global memory. Rows go through the warp's own rows of
// shared memory, so that 16 bytes are stored at a time (staged_rows.cuh). Rows that exist but do not attend become 0.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/arch/pack.hpp"
#include "sdpa/attention/softmax.cuh"
#include "sdpa/attention/staged_rows.cuh"
#include "sdpa/fmha_bwd/mainloop.cuh"

namespace sdpa::fmha_bwd {

template <class Traits>
struct Epilogue {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using Staged = StagedRows<Element, Traits::kOwn, Traits::kHeadDim, Traits::kSmemCols, Traits::kMmaM>;

  // `which`: the owned tile, A0 or A1, whose shared memory the rows go through; this warp has read its rows of it.
  // `tensor` is that of the head's row 0; rows below `length` attend, rows below `num_rows` exist.
  template <class Accumulator>
  SDPA_DEVICE static void store(Accumulator &acc, float scale, char *smem, int which, const TensorRef &tensor,
                                int64_t offset, int first_row, int length, int num_rows, int num_cols) {
    const int tid = Arch::thread_idx();
    Tensor values = make_tensor(acc.data(), accumulator_rows_cols(acc.layout()));  // (rows, cols)
    Element *const room = reinterpret_cast<Element *>(smem) + which * Traits::kTileA;
    Arch::syncwarp();  // every lane has read its last rows of the owned tile
    Staged::stage(room, tid, [&](int i, int j) SDPA_INLINE_LAMBDA {
      const bool attends = first_row + Staged::row(tid, i) < length;
      const uint32_t pair = arch::pack<Element>(values(i, j) * scale, values(i, j + 1) * scale);
      return attends ? pair : 0u;
    });
    Arch::syncwarp();  // the warp's rows are in shared memory
    Element *const out = static_cast<Element *>(tensor.data) + offset;
    Staged::store(room, tid, out, tensor.row_stride, first_row, num_rows, num_cols);
  }
};

}  // namespace sdpa::fmha_bwd
