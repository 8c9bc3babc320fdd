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
  SDPA_DEVICE TileCopy(const QuantizedParams &params, const WorkTile &tile, const Sequence &sequence, char *smem)
      : tid_(Arch::thread_idx()),
        seqlen_k_(sequence.seqlen_k),
        head_dim_v_(params.head_dim_v),
        v_row_stride_(Traits::kQuantizesV ? params.rows : params.v.row_stride),
        smem_(smem) {
    const int64_t first_row = params.first_row(sequence, tile.bidb, tile.bidh_kv);
    k_hat_ = params.k_hat + first_row * kHeadDim;
    if constexpr (Traits::kQuantizesV) {
      v_ = params.v_hat + params.template first_byte_v<kHeadDim>(sequence, tile.bidb, tile.bidh_kv);
      // Two lanes of 16 for log2 st and 1 / st, 16 bytes each.
      scales_ = (tid_ < kBlockN / 4 ? params.v_log2 : params.v_inverse) + first_row + tid_ % (kBlockN / 4) * 4;
    } else {
      v_ = static_cast<const Element *>(params.v.data) + tile.bidb * params.v.batch_stride +
           tile.bidh_kv * params.v.head_stride + sequence.first_row_k * params.v.row_stride;
    }
  }

  // Queues block `n_block`.
  SDPA_DEVICE void load(int n_block, int slot) const {
    load_k(n_block, reinterpret_cast<int8_t *>(smem_ + Traits::kOffsetK + slot * Traits::kTileK));
    if constexpr (Traits::kQuantizesV) {
      load_v_hat(n_block, reinterpret_cast<int8_t *>(smem_ + Traits::kOffsetV + slot * Traits::kTileV));
      load_scales(n_block, reinterpret_cast<float *>(smem_ + Traits::kOffsetScales + slot * Traits::kTileScales));
    } else {
      load_v(n_block, reinterpret_cast<Element *>(smem_ + Traits::kOffsetV + slot * Traits::kTileV));
    }
  }

 private:
  template <class Copy, class Source, class Destination>
  SDPA_DEVICE static void copy_all(const Copy &, const Source &tXgX, Destination &&tXsX) {
    const Copy_Atom<typename Arch::CpAsync, int8_t> copy;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tXgX); ++m) {
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tXgX); ++k) cute::copy(copy.with(true), tXgX(_, m, k), tXsX(_, m, k));
    }
  }

  SDPA_DEVICE void load_k(int n_block, int8_t *tile) const {
    Tensor gK = make_tensor(make_gmem_ptr(k_hat_ + int64_t{n_block} * Traits::kTileK),
                            Shape<Int<kBlockN>, Int<kHeadDim>>{}, Stride<Int<kHeadDim>, _1>{});  // (kBlockN, kHeadDim)
    Tensor sK = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutK{});                // (kBlockN, kHeadDim)
    const auto thread = CopyK{}.get_slice(tid_);
    copy_all(CopyK{}, thread.partition_S(gK.compose(typename Traits::KeyOrder{}, _)), thread.partition_D(sK));
  }

  SDPA_DEVICE void load_v_hat(int n_block, int8_t *tile) const {
    Tensor gVt = make_tensor(make_gmem_ptr(v_ + n_block * kBlockN), Shape<Int<kHeadDim>, Int<kBlockN>>{},
                             make_stride(v_row_stride_, _1{}));                      // (kHeadDim, kBlockN)
    Tensor sVt = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutVt{});  // (kHeadDim, kBlockN)
    const auto thread = CopyV{}.get_slice(tid_);
    copy_all(CopyV{}, thread.partition_S(gVt), thread.partition_D(sVt));
  }

  SDPA_DEVICE void load_scales(int n_block, float *scales) const {
    if (tid_ >= kBlockN / 2) return;
    const Copy_Atom<typename Arch::CpAsync, float> copy;
    Tensor gX = make_tensor(make_gmem_ptr(scales_ + n_block * kBlockN), Shape<_4>{});  // (4)
    Tensor sX = make_tensor(make_smem_ptr(scales + 4 * tid_), Shape<_4>{});            // (4)
    cute::copy(copy.with(true), gX, sX);
  }

  SDPA_DEVICE void load_v(int n_block, Element *tile) const {
    const auto thread = typename Traits::GmemTiledCopy{}.get_slice(tid_);
    Tensor cV = make_identity_tensor(Shape<Int<kBlockN>, Int<kHeadDim>>{});
    Tensor gV =
        make_tensor(make_gmem_ptr(v_ + int64_t{n_block} * kBlockN * v_row_stride_),
                    Shape<Int<kBlockN>, Int<kHeadDim>>{}, make_stride(v_row_stride_, _1{}));  // (kBlockN, kHeadDim)
    Tensor sV = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutV16{});           // (kBlockN, kHeadDim)
    Tensor tVcV = thread.partition_S(cV.compose(typename Traits::KeyOrder{}, _));  // (8, CPY_N, CPY_K) → (key, col)
    Tensor tVgV = thread.partition_S(gV.compose(typename Traits::KeyOrder{}, _));  // (8, CPY_N, CPY_K)
    Tensor tVsV = thread.partition_D(sV);                                          // (8, CPY_N, CPY_K)
    const Copy_Atom<typename Arch::CpAsync, Element> copy;
    const int keys_left = seqlen_k_ - n_block * kBlockN;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tVgV); ++m) {
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tVgV); ++k) {
        const bool exists = get<0>(tVcV(0, m, k)) < keys_left && get<1>(tVcV(0, m, k)) < head_dim_v_;
        cute::copy(copy.with(exists), tVgV(_, m, k), tVsV(_, m, k));
      }
    }
  }

  int tid_;
  int seqlen_k_;
  int head_dim_v_;
  int64_t v_row_stride_;
  char *smem_;
  const int8_t *k_hat_;
  const std::conditional_t<Traits::kQuantizesV, int8_t, Element> *v_;
  const float *scales_ = nullptr;
};

}  // namespace sdpa::fmha_fwd_q8
