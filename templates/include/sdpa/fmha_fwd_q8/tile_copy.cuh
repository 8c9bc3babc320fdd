// Global → shared: what one key block needs of the workspace and, where V keeps its 16 bits, of V, by cp.async.
//
// The workspace holds whole blocks, so nothing of it is conditional; rows of K̂ are kHeadDim bytes apart, which the
// compiler knows. V of 16 bits is the caller's: rows from seqlen_k on and columns from head_dim_v on become zero.
#pragma once

#include <cute/tensor.hpp>

#include "sdpa/fmha_fwd_q8/kernel_traits.cuh"

namespace sdpa::fmha_fwd_q8 {

template <class Traits>
class TileCopy {
  using Arch = typename Traits::Arch;
  using Element = typename Traits::Element;
  using CopyK = typename Traits::template ByteCopy<Traits::kByteCols>;
  using CopyV = typename Traits::template ByteCopy<Traits::kBlockN>;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;

 public:
  // `n_block`: the first block that is loaded. The next ones are those before it, one after another.
  SDPA_DEVICE TileCopy(const QuantizedParams &params, const WorkTile &tile, const Sequence &sequence, int n_block,
                       char *smem)
      : params_(params), seqlen_k_(sequence.seqlen_k), smem_(smem) {
    const int tid = Arch::thread_idx(), head = params.head(tile.bidb, tile.bidh_kv);
    const int block = params.first_block(sequence, tile.bidb) + n_block;
    const int64_t row = params.row(head, block);
    k_ = raw_pointer_cast(source_of_k(params.k_hat + row * kHeadDim, tid).data());
    k_scale_ = params.k_scale + row / 16 + tid % 4;
    if constexpr (Traits::kQuantizesV) {
      v_ = raw_pointer_cast(
          source_of_v(params.v_hat + params.template byte_of_v<kHeadDim>(head, block), params.rows, tid).data());
      // Of 32 threads, 16 bring log2 st and the others 1 / st, 16 bytes each.
      scales_ = (tid < kBlockN / 4 ? params.v_log2 : params.v_inverse) + row + tid % (kBlockN / 4) * 4;
    } else {
      v_ = static_cast<const Element *>(params.v.data) + tile.bidb * params.v.batch_stride +
           tile.bidh_kv * params.v.head_stride + sequence.first_row_k * params.v.row_stride;
    }
  }

  // Queues block `n_block`: the one before the last one that was queued.
  SDPA_DEVICE void load(int n_block, int slot) {
    const int tid = Arch::thread_idx();
    load_k(reinterpret_cast<int8_t *>(smem_ + Traits::kOffsetK + slot * Traits::kTileK), tid);
    if constexpr (Traits::kQuantizesV) {
      load_v_hat(reinterpret_cast<int8_t *>(smem_ + Traits::kOffsetV + slot * Traits::kTileV), tid);
      load_scales(reinterpret_cast<float *>(smem_ + Traits::kOffsetScales + slot * Traits::kTileScales), tid);
    } else {
      load_v(n_block, reinterpret_cast<Element *>(smem_ + Traits::kOffsetV + slot * Traits::kTileV), tid);
    }
  }

  // The scale of the 16 keys of a block that a lane holds: of the first block, then of the one before it, and so on.
  SDPA_DEVICE float next_k_scale() {
    const float scale = *k_scale_;
    k_scale_ -= kBlockN / 16;
    return scale;
  }

 private:
  // What thread `tid` copies of a K tile (16, CPY_N, CPY_K), and of a tile of V̂ (16, CPY_D, CPY_N).
  SDPA_DEVICE static auto source_of_k(const int8_t *tile, int tid) {
    Tensor gK = make_tensor(make_gmem_ptr(tile), Shape<Int<kBlockN>, Int<kHeadDim>>{},
                            Stride<Int<kHeadDim>, _1>{});  // (kBlockN, kHeadDim)
    return CopyK{}.get_slice(tid).partition_S(gK.compose(typename Traits::KeyOrder{}, _));
  }
  SDPA_DEVICE static auto source_of_v(const int8_t *tile, int64_t rows, int tid) {
    Tensor gVt = make_tensor(make_gmem_ptr(tile), Shape<Int<kHeadDim>, Int<kBlockN>>{},
                             make_stride(rows, _1{}));  // (kHeadDim, kBlockN)
    return CopyV{}.get_slice(tid).partition_S(gVt);
  }

  template <class Source, class Destination>
  SDPA_DEVICE static void copy_all(const Source &tXgX, Destination &&tXsX) {
    const Copy_Atom<typename Arch::CpAsync, int8_t> copy;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tXgX); ++m) {
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tXgX); ++k) cute::copy(copy.with(true), tXgX(_, m, k), tXsX(_, m, k));
    }
  }

  // A thread's addresses move from block to block; all else about them is known when compiled, or the row stride.
  SDPA_DEVICE void load_k(int8_t *tile, int tid) {
    Tensor sK = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutK{});  // (kBlockN, kHeadDim)
    Tensor tKgK = make_tensor(make_gmem_ptr(k_), source_of_k(nullptr, 0).layout());
    copy_all(tKgK, CopyK{}.get_slice(tid).partition_D(sK));
    k_ -= Traits::kTileK;
  }

  SDPA_DEVICE void load_v_hat(int8_t *tile, int tid) {
    Tensor sVt = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutVt{});  // (kHeadDim, kBlockN)
    Tensor tVgV = make_tensor(make_gmem_ptr(v_), source_of_v(nullptr, params_.rows, 0).layout());
    copy_all(tVgV, CopyV{}.get_slice(tid).partition_D(sVt));
    v_ -= kBlockN;
  }

  SDPA_DEVICE void load_scales(float *scales, int tid) {
    if (tid < kBlockN / 2) {
      const Copy_Atom<typename Arch::CpAsync, float> copy;
      Tensor gX = make_tensor(make_gmem_ptr(scales_), Shape<_4>{});           // (4)
      Tensor sX = make_tensor(make_smem_ptr(scales + 4 * tid), Shape<_4>{});  // (4)
      cute::copy(copy.with(true), gX, sX);
    }
    scales_ -= kBlockN;
  }

  SDPA_DEVICE void load_v(int n_block, Element *tile, int tid) const {
    const int64_t v_row_stride = params_.v.row_stride;
    const auto thread = typename Traits::GmemTiledCopy{}.get_slice(tid);
    Tensor cV = make_identity_tensor(Shape<Int<kBlockN>, Int<kHeadDim>>{});
    Tensor gV =
        make_tensor(make_gmem_ptr(v_ + int64_t{n_block} * kBlockN * v_row_stride), Shape<Int<kBlockN>, Int<kHeadDim>>{},
                    make_stride(v_row_stride, _1{}));                                // (kBlockN, kHeadDim)
    Tensor sV = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutV16{});  // (kBlockN, kHeadDim)
    Tensor tVcV = thread.partition_S(cV.compose(typename Traits::KeyOrder{}, _));    // (8, CPY_N, CPY_K) → (key, col)
    Tensor tVgV = thread.partition_S(gV.compose(typename Traits::KeyOrder{}, _));    // (8, CPY_N, CPY_K)
    Tensor tVsV = thread.partition_D(sV);                                            // (8, CPY_N, CPY_K)
    const Copy_Atom<typename Arch::CpAsync, Element> copy;
    const int keys_left = seqlen_k_ - n_block * kBlockN;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tVgV); ++m) {
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tVgV); ++k) {
        const bool exists = get<0>(tVcV(0, m, k)) < keys_left && get<1>(tVcV(0, m, k)) < params_.head_dim_v;
        cute::copy(copy.with(exists), tVgV(_, m, k), tVsV(_, m, k));
      }
    }
  }

  const QuantizedParams &params_;
  int seqlen_k_;
  char *smem_;
  const int8_t *k_;
  const float *k_scale_;
  const std::conditional_t<Traits::kQuantizesV, int8_t, Element> *v_;  // of 16 bits: the sequence's first key
  const float *scales_ = nullptr;
};

}  // namespace sdpa::fmha_fwd_q8
