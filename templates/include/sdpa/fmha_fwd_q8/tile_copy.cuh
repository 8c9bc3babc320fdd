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
      : params_(params), smem_(smem) {
    const int tid = Traits::group_thread();
    const int64_t block =
        params.block(params.head(tile.bidb, tile.bidh_kv), params.first_block(sequence, tile.bidb) + n_block);
    source_ = params.blocks + block * Block::kBytes + 16 * tid;
    k_scale_ = params.k_scale + block * 4 + tid % 4;
    if constexpr (!Traits::kQuantizesV) {
      const int key = n_block * kBlockN + first_key();
      v_ = static_cast<const Element *>(params.v.data) + tile.bidb * params.v.batch_stride +
           tile.bidh_kv * params.v.head_stride + (sequence.first_row_k + key) * params.v.row_stride + first_column();
      v_keys_ = sequence.seqlen_k - key;
    }
  }

  // Queues the next block to the stage that starts `stage` bytes behind the first. kIsFirst: nothing was queued before,
  // and keys may be missing.
  template <bool kIsFirst>
  SDPA_DEVICE void load(int stage) {
    load_k(stage);
    load_v<kIsFirst>(stage);
  }

  // The two halves of `load`, in this order.
  SDPA_DEVICE void load_k(int stage) {
    char *const smem = smem_ + Traits::kOffsetK + stage;
    copy_tile<CopyK>(0, make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(smem)), typename Traits::SmemLayoutK{}));
  }
  template <bool kIsFirst>
  SDPA_DEVICE void load_v(int stage) {
    const int tid = Traits::group_thread();
    char *const smem = smem_ + Traits::kOffsetK + stage;
    if constexpr (Traits::kQuantizesV) {
      copy_tile<CopyV>(Block::kV, make_tensor(make_smem_ptr(reinterpret_cast<int8_t *>(smem + Block::kV)),
                                              typename Traits::SmemLayoutVt{}));
      if (tid < (Block::kBytes - Block::kLog2) / 16) copy_vector(Block::kLog2, smem + Block::kLog2 + 16 * tid);
    } else {
      copy_halves<kIsFirst>(reinterpret_cast<Element *>(smem + Block::kV));
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

  // Of V of 16 bits, a thread's own place in a block. Its passes start at multiples of a power of two: for these and what
  // lies between, KeyOrder of a sum is the sum of KeyOrders.
  static constexpr int kPassKeys = Traits::kGroupThreads / Traits::kThreadsPerRow;
  static_assert((kPassKeys & (kPassKeys - 1)) == 0);
  SDPA_DEVICE static int first_key() {
    return typename Traits::KeyOrder{}(Traits::group_thread() / Traits::kThreadsPerRow);
  }
  SDPA_DEVICE static int first_column() { return Traits::group_thread() % Traits::kThreadsPerRow * 8; }

  template <bool kIsFirst>
  SDPA_DEVICE void copy_halves(Element *tile) {
    Tensor sV = make_tensor(make_smem_ptr(tile), typename Traits::SmemLayoutV16{});  // (kBlockN, kHeadDim)
    Tensor tVsV =
        typename Traits::GmemTiledCopy{}.get_slice(Traits::group_thread()).partition_D(sV);  // (8, CPY_N, CPY_K)
    const Copy_Atom<typename Arch::CpAsync, Element> copy;
    const int64_t row_stride = params_.v.row_stride;
    CUTE_UNROLL
    for (int m = 0; m < size<1>(tVsV); ++m) {
      constexpr typename Traits::KeyOrder order;
      const int key = order(m * kPassKeys);  // from the thread's first
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tVsV); ++k) {
        const bool exists = (!kIsFirst || key < v_keys_) && first_column() + k * Traits::kSmemCols < params_.head_dim_v;
        Tensor from = make_tensor(make_gmem_ptr(v_ + key * row_stride + k * Traits::kSmemCols), Shape<_8>{});  // (8)
        cute::copy(copy.with(exists), from, tVsV(_, m, k));
      }
    }
    v_ -= kBlockN * row_stride;
  }

  const QuantizedParams &params_;
  char *smem_;
  const char *source_;
  const float *k_scale_;
  const Element *v_ = nullptr;  // this thread's first vector of V
  int v_keys_ = 0;              // of the first block: those that exist from the vector's own on
};

}  // namespace sdpa::fmha_fwd_q8
