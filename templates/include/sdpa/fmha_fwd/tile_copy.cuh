// Global → shared: tiles of kRows x kHeadDim elements of one tensor by cp.async, 16 bytes a thread.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/fmha_fwd/kernel_traits.cuh"

namespace sdpa::fmha_fwd {

// Row r of a tile in shared memory is row Order(r) of the tile in global memory.
template <class Traits, int kRows, class Order = Layout<Shape<Int<kRows>>, Stride<_1>>>
class TileCopy {
  using Element = typename Traits::Element;
  using SmemLayout =
      decltype(tile_to_shape(typename Traits::SmemLayoutAtom{}, Shape<Int<kRows>, Int<Traits::kHeadDim>>{}));

 public:
  // `data`: row 0 of (num_rows, kHeadDim). `tid` counts within the threads that share the tiles.
  SDPA_DEVICE TileCopy(const Element *data, int num_rows, int64_t row_stride, int tid)
      : data_(data), num_rows_(num_rows), row_stride_(row_stride), tid_(tid) {}

  // What this thread copies of every tile of the tensor: (8, CPY_M, CPY_K, blocks).
  SDPA_DEVICE auto source() const {
    Tensor mX = make_tensor(make_gmem_ptr(data_), make_shape(num_rows_, Int<Traits::kHeadDim>{}),
                            make_stride(row_stride_, _1{}));  // (num_rows, kHeadDim)
    Tensor gX =
        local_tile(mX, Shape<Int<kRows>, Int<Traits::kHeadDim>>{}, make_coord(_, 0));  // (kRows, kHeadDim, blocks)
    return thread_copy().partition_S(gX.compose(Order{}, _, _));
  }

  // Where it goes: (8, CPY_M, CPY_K).
  SDPA_DEVICE auto destination(Element *tile) const {
    return thread_copy().partition_D(make_tensor(make_smem_ptr(tile), SmemLayout{}));
  }

  // Queues one tile of `source`. Rows from rows_left on become zero with kPredicateRows, columns from num_cols on in
  // general kernels.
  template <bool kPredicateRows, class Source>
  SDPA_DEVICE void load(const Source &source, int block, Element *tile, int rows_left, int num_cols) const {
    Tensor cX = make_identity_tensor(Shape<Int<kRows>, Int<Traits::kHeadDim>>{});
    Tensor tXcX = thread_copy().partition_S(cX.compose(Order{}, _));  // (8, CPY_M, CPY_K) → (row, col)
    Tensor tXgX = source(_, _, _, block);                             // (8, CPY_M, CPY_K)
    Tensor tXsX = destination(tile);                                  // (8, CPY_M, CPY_K)
    const Copy_Atom<typename Traits::Arch::CpAsync, Element> copy;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tXgX); ++m) {
      const bool row_exists = !kPredicateRows || get<0>(tXcX(0, m, 0)) < rows_left;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tXgX); ++k) {
        const bool exists = row_exists && (!Traits::kIsGeneral || get<1>(tXcX(0, m, k)) < num_cols);
        cute::copy(copy.with(exists), tXgX(_, m, k), tXsX(_, m, k));
      }
    }
  }

 private:
  SDPA_DEVICE auto thread_copy() const { return typename Traits::GmemTiledCopy{}.get_slice(tid_); }

  const Element *data_;
  int num_rows_;
  int64_t row_stride_;
  int tid_;
};

}  // namespace sdpa::fmha_fwd
