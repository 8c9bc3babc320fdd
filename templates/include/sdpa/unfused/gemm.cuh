// The two batched GEMMs of the baseline: CUTLASS's sm_80 tensor-op mainloop and epilogue (m16n8k16, cp.async
// multistage) inside a kernel of our own, one CTA per (batch * head, m_block, n_block) in a one-dimensional grid:
//
//   QkGemm   S [seqlen_q, seqlen_k] = alpha * Q [seqlen_q, head_dim] K [seqlen_k, head_dim]ᵀ
//   PvGemm   O [seqlen_q, head_dim] = alpha * P [seqlen_q, seqlen_k] V [seqlen_k, head_dim]
//
// The kernel of our own is what lets every tensor have 64-bit batch and head strides (views, expanded and grouped
// heads), and lets causal problems skip: QkGemm the tiles that nobody sees, PvGemm the keys past the tile's diagonal.
// The types of this file name no CUTLASS type in their template arguments, so kernel symbols do not either.
#pragma once

#include <cutlass/epilogue/thread/linear_combination.h>
#include <cutlass/gemm/kernel/default_gemm.h>
#include <cutlass/gemm/threadblock/threadblock_swizzle.h>

#include <type_traits>

#include "sdpa/unfused/problem.hpp"
#include "sdpa/unfused/tile.hpp"

namespace sdpa::unfused {

// One operand of all heads: [batch, heads] matrices.
struct BatchedMatrix {
  void *data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t ld;
};

template <class Element>
CUTLASS_DEVICE Element *head_of(const BatchedMatrix &matrix, int bidb, int head) {
  return static_cast<Element *>(matrix.data) + bidb * matrix.batch_stride + head * matrix.head_stride;
}

// CUTLASS's mainloop and epilogue for row-major A [m, k] and D [m, n].
template <class Element, class LayoutB, class ElementOut, int kM, int kN, int kK, int kStages, int kWarpsM, int kWarpsN>
struct TensorOpGemm {
  static_assert(kStages >= 3, "CUTLASS's cp.async mainloop starts at three stages");
  using OutputOp = cutlass::epilogue::thread::LinearCombination<ElementOut, 16 / sizeof(ElementOut), float, float,
                                                                cutlass::epilogue::thread::ScaleType::OnlyAlphaScaling>;
  using Default = cutlass::gemm::kernel::DefaultGemm<
      Element, cutlass::layout::RowMajor, kVectorElements, Element, LayoutB, kVectorElements, ElementOut,
      cutlass::layout::RowMajor, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
      cutlass::gemm::GemmShape<kM, kN, kK>, cutlass::gemm::GemmShape<kM / kWarpsM, kN / kWarpsN, kK>,
      cutlass::gemm::GemmShape<16, 8, 16>, OutputOp, cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<>,
      kStages, false, cutlass::arch::OpMultiplyAdd>;
  using Mma = typename Default::Mma;
  using Epilogue = typename Default::Epilogue;
};

// A warp-level MMA of fp16 operands whose B arrives as the bits of bf16 and is converted between shared memory and
// the tensor core.
template <class Base>
struct Bf16BWarpMma : Base {
  using typename Base::FragmentA;
  using typename Base::FragmentB;
  using typename Base::TransformedFragmentA;
  using typename Base::TransformedFragmentB;

  CUTLASS_DEVICE void transform(TransformedFragmentA &dst_a, TransformedFragmentB &dst_b, const FragmentA &a,
                                const FragmentB &b) const {
    dst_a = a;
    static_assert(sizeof(FragmentB) == sizeof(TransformedFragmentB) && sizeof(FragmentB) % 4 == 0);
    const auto *pairs = reinterpret_cast<const uint32_t *>(&b);
    auto *halves = reinterpret_cast<uint32_t *>(&dst_b);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < static_cast<int>(sizeof(FragmentB) / 4); ++i) {
      const float low = __uint_as_float(pairs[i] << 16);
      const float high = __uint_as_float(pairs[i] & 0xffff0000u);
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(halves[i]) : "f"(high), "f"(low));
    }
  }
};

// The same mainloop with another warp-level MMA.
template <class Mma, template <class> class WarpMma>
struct ReplaceWarpMma;
template <class Shape, class IteratorA, class SmemIteratorA, cutlass::arch::CacheOperation::Kind kCacheA,
          class IteratorB, class SmemIteratorB, cutlass::arch::CacheOperation::Kind kCacheB, class ElementC,
          class LayoutC, class Policy, int kStages, cutlass::gemm::SharedMemoryClearOption kClear,
          template <class> class WarpMma>
struct ReplaceWarpMma<
    cutlass::gemm::threadblock::MmaMultistage<Shape, IteratorA, SmemIteratorA, kCacheA, IteratorB, SmemIteratorB,
                                              kCacheB, ElementC, LayoutC, Policy, kStages, kClear>,
    WarpMma> {
  using type = cutlass::gemm::threadblock::MmaMultistage<
      Shape, IteratorA, SmemIteratorA, kCacheA, IteratorB, SmemIteratorB, kCacheB, ElementC, LayoutC,
      cutlass::gemm::threadblock::MmaPolicy<WarpMma<typename Policy::Operator>, typename Policy::SmemPaddingA,
                                            typename Policy::SmemPaddingB, Policy::kPartitionsK>,
      kStages, kClear>;
};

template <sdpa_dtype kDtype>
using ElementOf = std::conditional_t<kDtype == SDPA_DTYPE_F16, cutlass::half_t, cutlass::bfloat16_t>;

template <sdpa_dtype kDtype, bool kWideLogits, int kBlockM, int kBlockN, int kStages, int kNWarps>
struct QkGemm {
  static constexpr GemmTile kTile = qk_tile(kBlockM, kBlockN, kStages, kNWarps);
  static constexpr bool kIsPv = false;
  using Gemm = TensorOpGemm<ElementOf<kDtype>, cutlass::layout::ColumnMajor,
                            std::conditional_t<kWideLogits, float, cutlass::half_t>, kTile.block_m, kTile.block_n,
                            kTile.block_k, kTile.stages, kTile.warps_m, kTile.warps_n>;
  using Mma = typename Gemm::Mma;
  using Epilogue = typename Gemm::Epilogue;
};

template <sdpa_dtype kDtype, int kBlockM, int kN, int kNWarps>
struct PvGemm {
  static constexpr GemmTile kTile = pv_tile(kBlockM, kN, kNWarps);
  static constexpr bool kIsPv = true;
  using Gemm = TensorOpGemm<cutlass::half_t, cutlass::layout::RowMajor, ElementOf<kDtype>, kTile.block_m, kTile.block_n,
                            kTile.block_k, kTile.stages, kTile.warps_m, kTile.warps_n>;
  using Mma = typename std::conditional_t<kDtype == SDPA_DTYPE_F16, std::common_type<typename Gemm::Mma>,
                                          ReplaceWarpMma<typename Gemm::Mma, Bf16BWarpMma>>::type;
  using Epilogue = typename Gemm::Epilogue;
};

template <class Gemm>
union GemmSharedStorage {
  typename Gemm::Mma::SharedStorage main_loop;
  typename Gemm::Epilogue::SharedStorage epilogue;
};

template <class Gemm>
struct GemmParams {
  using IteratorA = typename Gemm::Mma::IteratorA;
  using IteratorB = typename Gemm::Mma::IteratorB;
  using OutputIterator = typename Gemm::Epilogue::OutputTileIterator;

  typename IteratorA::Params iterator_a;
  typename IteratorB::Params iterator_b;
  typename OutputIterator::Params iterator_out;
  BatchedMatrix a;
  BatchedMatrix b;
  BatchedMatrix out;
  KeyRange keys;
  int32_t m;
  int32_t n;
  int32_t k;
  int32_t m_tiles;
  int32_t n_tiles;
  int32_t num_heads;
  int32_t heads_per_b;  // heads of A and D that share one B
  float alpha;

  GemmParams(const sdpa_params &p, const BatchedMatrix &a_, const BatchedMatrix &b_, const BatchedMatrix &out_, int n_,
             int k_, float alpha_)
      : iterator_a(typename IteratorA::Layout(a_.ld)),
        iterator_b(typename IteratorB::Layout(b_.ld)),
        iterator_out(typename OutputIterator::Layout(out_.ld)),
        a(a_),
        b(b_),
        out(out_),
        keys(key_range(p)),
        m(p.seqlen_q),
        n(n_),
        k(k_),
        m_tiles(static_cast<int>(ceil_div(p.seqlen_q, Gemm::kTile.block_m))),
        n_tiles(static_cast<int>(ceil_div(n_, Gemm::kTile.block_n))),
        num_heads(p.num_heads_q),
        heads_per_b(p.num_heads_q / p.num_heads_kv),
        alpha(alpha_) {}
};

// Accumulates A [m_block's rows, depth] B [depth, n_block's columns]. A's rows may be read up to the next multiple of
// 8 past `depth`, where P holds zeros; B's rows past it are never read.
template <class Gemm>
CUTLASS_DEVICE void accumulate(const GemmParams<Gemm> &params, GemmSharedStorage<Gemm> &shared,
                               typename Gemm::Mma::IteratorA::Pointer a, typename Gemm::Mma::IteratorB::Pointer b,
                               int m_start, int n_start, int depth, int warp_idx,
                               typename Gemm::Mma::FragmentC &accumulators) {
  using Mma = typename Gemm::Mma;
  constexpr int kBlockK = Gemm::kTile.block_k;
  // CUTLASS visits the odd-sized step of a depth first and would then read misaligned vectors of A when it is not a
  // multiple of 8: such a depth goes in two parts, the second being the odd-sized step alone.
  // The first GEMM's depth, head_dim, always is a multiple.
  const int first_end = Gemm::kIsPv && depth % kVectorElements != 0 ? depth - depth % kBlockK : depth;
  CUTLASS_PRAGMA_NO_UNROLL
  for (int start = 0, end = first_end; start < depth; start = end, end = depth) {
    if (start == end) continue;
    typename Mma::IteratorA iterator_a(params.iterator_a, a, {params.m, end}, threadIdx.x, {m_start, start});
    typename Mma::IteratorB iterator_b(params.iterator_b, b, {end, params.n}, threadIdx.x, {start, n_start});
    Mma mma(shared.main_loop, threadIdx.x, warp_idx, threadIdx.x % 32);
    mma((end - start + kBlockK - 1) / kBlockK, accumulators, iterator_a, iterator_b, accumulators);
    if (!Gemm::kIsPv) break;
  }
}

template <class Gemm>
__global__ void __launch_bounds__(32 * Gemm::kTile.warps(), Gemm::kTile.warps() <= 4 ? 2 : 1)
    unfused_gemm(const __grid_constant__ GemmParams<Gemm> params) {
  using Mma = typename Gemm::Mma;
  using Epilogue = typename Gemm::Epilogue;
  using OutputOp = typename Epilogue::OutputOp;
  using OutputIterator = typename Epilogue::OutputTileIterator;
  extern __shared__ __align__(128) char smem[];
  auto &shared = *reinterpret_cast<GemmSharedStorage<Gemm> *>(smem);

  // Tiles of one head are neighbours, columns first: they share A through L2. The second GEMM starts with the last
  // rows, which see most keys.
  const uint32_t tiles = uint32_t(params.m_tiles) * uint32_t(params.n_tiles);
  const uint32_t bidbh = blockIdx.x / tiles;
  const uint32_t tile = blockIdx.x % tiles;
  const int n_block = static_cast<int>(tile % uint32_t(params.n_tiles));
  int m_block = static_cast<int>(tile / uint32_t(params.n_tiles));
  if (Gemm::kIsPv) m_block = params.m_tiles - 1 - m_block;
  const int bidb = static_cast<int>(bidbh / uint32_t(params.num_heads));
  const int bidh = static_cast<int>(bidbh % uint32_t(params.num_heads));
  const int m_start = m_block * Gemm::kTile.block_m;
  const int n_start = n_block * Gemm::kTile.block_n;

  int depth = params.k;
  if constexpr (Gemm::kIsPv) {
    depth = params.keys.depth_of_tile(m_block, Gemm::kTile.block_m, Gemm::kTile.block_k);
  } else {
    const int row_end = min(m_start + Gemm::kTile.block_m, params.m);
    if (n_start >= params.keys.keys_seen_before(row_end)) return;
  }

  const int warp_idx = cutlass::canonical_warp_idx_sync();
  typename Mma::FragmentC accumulators;
  accumulators.clear();
  accumulate<Gemm>(params, shared, head_of<typename Mma::IteratorA::Element>(params.a, bidb, bidh),
                   head_of<typename Mma::IteratorB::Element>(params.b, bidb, bidh / params.heads_per_b), m_start,
                   n_start, depth, warp_idx, accumulators);

  // The mainloop ends with a barrier, after which the epilogue may take over its shared memory.
  const OutputOp output_op{typename OutputOp::Params(params.alpha)};
  OutputIterator out(params.iterator_out, head_of<typename OutputIterator::Element>(params.out, bidb, bidh),
                     {params.m, params.n}, threadIdx.x, {m_start, n_start});
  Epilogue epilogue(shared.epilogue, threadIdx.x, warp_idx, threadIdx.x % 32);
  epilogue(output_op, out, accumulators);
}

}  // namespace sdpa::unfused
