// Global → shared: what one key block needs of the workspace and, where V keeps its 16 bits, of V, by cp.async.
//
// The workspace holds whole blocks as shared memory takes them, 16 bytes of a thread behind those of the one before, so
// nothing of it is conditional, and one address that moves from block to block is all that a thread keeps. V of 16 bits is
// the caller's: rows from seqlen_k on and columns from head_dim_v on become zero.
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
  using Block = typename Traits::Block;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim;

 public:
  // `n_block`: the first block that is loaded. The next ones are those before it, one after another.
  SDPA_DEVICE TileCopy(const QuantizedParams &params, const WorkTile &tile, const Sequence &sequence, int n_block,
                       char *smem)
      : params_(params), seqlen_k_(sequence.seqlen_k), smem_(smem) {
    const int tid = Traits::group_thread();
    const int64_t block =
        params.block(params.head(tile.bidb, tile.bidh_kv), params.first_block(sequence, tile.bidb) + n_block);
    source_ = params.blocks + block * Block::kBytes + 16 * tid;
    k_scale_ = params.k_scale + block * 4 + tid % 4;
    if constexpr (!Traits::kQuantizesV)
      v_ = static_cast<const Element *>(params.v.data) + tile.bidb * params.v.batch_stride +
           tile.bidh_kv * params.v.head_stride + sequence.first_row_k * params.v.row_stride;
  }

  // Queues block `n_block`, the one before the last one that was queued, to the stage that starts `stage` bytes behind
  // the first.
  SDPA_DEVICE void load(int n_block, int stage) {
    load_k(stage);
    load_v(n_block, stage);
  }

  // The two halves of `load`, in this order.
  SDPA_DEVICE void load_k(int stage) {
    char *const smem = smem_ + Traits::kOffsetK + stage;
    copy_tile<CopyK>(0, make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(smem)), typename Traits::SmemLayoutK{}));
  }
  SDPA_DEVICE void load_v(int n_block, int stage) {
    const int tid = Traits::group_thread();
    char *const smem = smem_ + Traits::kOffsetK + stage;
    if constexpr (Traits::kQuantizesV) {
      copy_tile<CopyV>(Block::kV, make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(smem + Block::kV)),
                                              typename Traits::SmemLayoutVt{}));
      if (tid < (Block::kBytes - Block::kLog2) / 16) copy_vector(Block::kLog2, smem + Block::kLog2 + 16 * tid);
    } else {
      copy_halves(n_block, reinterpret_cast<Element *>(smem + Block::kV), tid);
    }
    source_ -= Block::kBytes;
  }

  // The scale of the 16 keys of a block that a lane holds: of the first block, then of the one before it, and so on.
  SDPA_DEVICE float next_k_scale() {
    const float scale = *k_scale_;
    k_scale_ -= 4;
    return scale;
  }

 private:
  // The 16 bytes that lie `offset` behind this thread's place.
  SDPA_DEVICE void copy_vector(int offset, void *to) const {
    const Copy_Atom<typename Arch::CpAsync, int8_t> copy;
    Tensor gX = make_tensor(make_gmem_ptr(reinterpret_cast<const int8_t *>(source_ + offset)), Shape<_16>{});  // (16)
    Tensor sX = make_tensor(make_smem_ptr(static_cast<int8_t *>(to)), Shape<_16>{});                           // (16)
    cute::copy(copy.with(true), gX, sX);
  }

  // A tile of bytes whose first is `offset` behind the block's: pass after pass of 16 bytes a thread.
  template <class Copy, class Tile>
  SDPA_DEVICE void copy_tile(int offset, Tile &&sX) const {
    Tensor tXsX = Copy{}.get_slice(Traits::group_thread()).partition_D(sX);  // (16, CPY_M, CPY_N)
    CUTE_UNROLL
    for (int n = 0; n < size<2>(tXsX); ++n) {
      CUTE_UNROLL
      for (int m = 0; m < size<1>(tXsX); ++m)
        copy_vector(offset + (n * size<1>(tXsX) + m) * 16 * Traits::kGroupThreads, &tXsX(0, m, n));
    }
  }

  SDPA_DEVICE void copy_halves(int n_block, Element *tile, int tid) const {
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
  const char *source_;
  const float *k_scale_;
  const Element *v_ = nullptr;  // the sequence's first key
};

}  // namespace sdpa::fmha_fwd_q8
