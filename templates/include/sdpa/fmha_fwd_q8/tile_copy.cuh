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
      : params_(params),
        head_(static_cast<int>(Arch::uniform(static_cast<uint32_t>(params.head(tile.bidb, tile.bidh_kv))))),
        first_block_(static_cast<int>(Arch::uniform(static_cast<uint32_t>(params.first_block(sequence, tile.bidb))))),
        seqlen_k_(sequence.seqlen_k),
        smem_(smem) {
    if constexpr (!Traits::kQuantizesV)
      v_ = static_cast<const Element *>(params.v.data) + tile.bidb * params.v.batch_stride +
           tile.bidh_kv * params.v.head_stride + sequence.first_row_k * params.v.row_stride;
  }

  // Queues block `n_block`.
  SDPA_DEVICE void load(int n_block, int slot) const {
    const int tid = Traits::kRecomputesAddresses ? Arch::thread_idx_again() : Arch::thread_idx();
    load_k(n_block, reinterpret_cast<int8_t *>(smem_ + Traits::kOffsetK + slot * Traits::kTileK), tid);
    if constexpr (Traits::kQuantizesV) {
      load_v_hat(n_block, reinterpret_cast<int8_t *>(smem_ + Traits::kOffsetV + slot * Traits::kTileV), tid);
      load_scales(n_block, reinterpret_cast<float *>(smem_ + Traits::kOffsetScales + slot * Traits::kTileScales), tid);
    } else {
      load_v(n_block, reinterpret_cast<Element *>(smem_ + Traits::kOffsetV + slot * Traits::kTileV), tid);
    }
  }

  // The scale of the 16 keys of block `n_block` that a lane holds.
  SDPA_DEVICE float k_scale(int n_block) const {
    return params_.k_scale[params_.row(head_, first_block_ + n_block) / 16 + Arch::thread_idx() % 4];
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

  SDPA_DEVICE void load_k(int n_block, int8_t *tile, int tid) const {
    const int8_t *const k_hat = params_.k_hat + params_.row(head_, first_block_ + n_block) * kHeadDim;
    Tensor gK = make_tensor(make_gmem_ptr(k_hat), Shape<Int<kBlockN>, Int<kHeadDim>>{},
                            Stride<Int<kHeadDim>, _1>{});                          // (kBlockN, kHeadDim)
    Tensor sK = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutK{});  // (kBlockN, kHeadDim)
    const auto thread = CopyK{}.get_slice(tid);
    copy_all(CopyK{}, thread.partition_S(gK.compose(typename Traits::KeyOrder{}, _)), thread.partition_D(sK));
  }

  SDPA_DEVICE void load_v_hat(int n_block, int8_t *tile, int tid) const {
    const int8_t *const v_hat = params_.v_hat + params_.template byte_of_v<kHeadDim>(head_, first_block_ + n_block);
    Tensor gVt = make_tensor(make_gmem_ptr(v_hat), Shape<Int<kHeadDim>, Int<kBlockN>>{},
                             make_stride(params_.rows, _1{}));                       // (kHeadDim, kBlockN)
    Tensor sVt = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutVt{});  // (kHeadDim, kBlockN)
    const auto thread = CopyV{}.get_slice(tid);
    copy_all(CopyV{}, thread.partition_S(gVt), thread.partition_D(sVt));
  }

  // Of 32 threads, 16 bring log2 st and the others 1 / st, 16 bytes each.
  SDPA_DEVICE void load_scales(int n_block, float *scales, int tid) const {
    if (tid >= kBlockN / 2) return;
    const float *const source = (tid < kBlockN / 4 ? params_.v_log2 : params_.v_inverse) +
                                params_.row(head_, first_block_ + n_block) + tid % (kBlockN / 4) * 4;
    const Copy_Atom<typename Arch::CpAsync, float> copy;
    Tensor gX = make_tensor(make_gmem_ptr(source), Shape<_4>{});            // (4)
    Tensor sX = make_tensor(make_smem_ptr(scales + 4 * tid), Shape<_4>{});  // (4)
    cute::copy(copy.with(true), gX, sX);
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
  int head_;
  int first_block_;
  int seqlen_k_;
  char *smem_;
  const Element *v_ = nullptr;  // of the sequence's first key, where V has 16 bits
};

}  // namespace sdpa::fmha_fwd_q8
