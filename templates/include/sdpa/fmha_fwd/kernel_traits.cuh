// Everything that a fused kernel knows at compile time: one config in, every layout, copy and MMA out.
//
// Shared memory of one CTA, in elements (G = kKvGroups, S = kStages, T = a tile of kBlockN x kHeadDim):
//
//   default     | Q kBlockM x kHeadDim | K[0..S) | V[0..S) |
//   kQInRegs    | V[0..S), under it first Q | K[0..S) |      Q lives in registers, so its room is V's
//   G > 1       | group 0: T[0..3) | ... | group G-1: T[0..3) |     rings of K and V tiles; Q lives in registers
//   merge       | group 0: float O kBlockM x kHeadDim, in the order of registers, statistics kBlockM x 8 | ... |    G > 1
//
// A group's part of the merge overlays its own ring.
// A general kernel serves every head_dim up to kHeadDim: columns beyond it are zero in shared memory.
// The head dimension is never padded in memory: rows of 64, 32 or 16 columns are swizzled so that the eight 16-byte rows of any
// ldmatrix fall into eight different bank groups (3, 2 or 1 swizzle bits).
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target.hpp"
#include "sdpa/attention/params.hpp"

namespace sdpa::fmha_fwd {

using namespace cute;

// Shared memory that a CTA can opt in to on compute capability 8.9 (L4, RTX 4090): all of an SM's 100 KB but the one
// that the driver takes for a CTA. generator/core/arch.py has the same number and refuses tiles before they compile.
inline constexpr int kMaxSmemBytes = 101376;

// Config: Arch, Element, kHeadDim, kBlockM, kBlockN, kStages, kNWarps, kKvGroups, kCtasPerSm, kQInRegs, kIsCausal,
// kIsGeneral, kHasDropout, kIsSplit, kMask.
template <class Config>
struct KernelTraits : Config {
  using Config::kBlockM;
  using Config::kBlockN;
  using Config::kHasDropout;
  using Config::kHeadDim;
  using Config::kIsCausal;
  using Config::kIsGeneral;
  using Config::kIsSplit;
  using Config::kKvGroups;
  using Config::kMask;
  using Config::kNWarps;
  using Config::kQInRegs;
  using Config::kStages;
  using typename Config::Arch;
  using typename Config::Element;
  using Params = std::conditional_t<kIsSplit, SplitParams, std::conditional_t<kIsGeneral, GeneralParams, sdpa::Params>>;
  static constexpr bool kHasMask = kMask != MaskKind::kNone;
  static constexpr bool kHasBias = kMask == MaskKind::kBias16 || kMask == MaskKind::kBias32;
  static constexpr bool kMayBeCausal = kIsCausal || kIsGeneral;
  static constexpr bool kMayHaveWindow =
      kIsGeneral && !(kHasDropout && kBlockM == 128 && kHeadDim >= 64);  // these tiles have no registers left

  static constexpr int kThreads = 32 * kNWarps;
  static constexpr int kWarpsM = kNWarps / kKvGroups;  // warps of one group, each with rows of its own
  static constexpr int kGroupThreads = 32 * kWarpsM;
  // Small grids are what KV groups are for.
  static constexpr CausalOrder kCausalOrder = kKvGroups > 1 ? CausalOrder::kInRuns : CausalOrder::kLongestFirst;

  static_assert(kNWarps % kKvGroups == 0 && kKvGroups <= 8, "every KV group has the same number of warps");
  static_assert(kBlockM % (16 * kWarpsM) == 0, "a warp's MMA covers 16 query rows");
  static_assert(kBlockN % 16 == 0 && kHeadDim % 16 == 0, "ldmatrix.x4 and the PV operand come in steps of 16");
  static_assert(!kQInRegs || kKvGroups == 1, "with KV groups, Q goes straight to registers");
  static_assert(kStages == 1 || kKvGroups == 1, "KV groups work on rings of three tiles");
  static_assert(kHeadDim % (8 * kKvGroups) == 0 || kKvGroups == 1,
                "each KV group completes as many columns as the others");
  static_assert(!kIsCausal || !kIsGeneral, "a general kernel learns at run time whether it is causal");
  static_assert(!kHasDropout || kIsGeneral, "dropout is a variant of the general kernels");
  static_assert(!kIsSplit || (kIsGeneral && !kHasDropout && !kQInRegs), "a split kernel is general, without dropout");
  static_assert(!kHasMask || (kIsGeneral && !kIsSplit), "masks are a general kernel's, and not a split one's");
  static_assert(!kIsGeneral || kIsSplit || kBlockN % 32 == 0, "masks and dropout work on blocks of 32 keys");

  // Columns of q and k, and of v and out.
  SDPA_DEVICE static int head_dim(const Params &params) {
    if constexpr (kIsGeneral) return params.head_dim;
    return kHeadDim;
  }
  SDPA_DEVICE static int head_dim_v(const Params &params) {
    if constexpr (kIsGeneral) return params.head_dim_v;
    return kHeadDim;
  }

  // The tile of a CTA; a split kernel counts otherwise.
  SDPA_DEVICE static WorkTile work_tile(const Params &params, int block_idx) {
    static_assert(!kIsSplit);
    if constexpr (kIsGeneral) {
      if (!params.is_causal) return params.scheduler.template tile<false, true, kCausalOrder>(block_idx);
    }
    return params.scheduler.template tile<kMayBeCausal, kIsGeneral, kCausalOrder>(block_idx);
  }

  // The position in its sequence of row `row`: a tile of a split kernel holds the rows of all heads of a key head.
  SDPA_DEVICE static int position(const Params &params, int row) {
    if constexpr (kIsSplit) return params.heads_per_kv.div(row);
    return row;
  }

  // Elements from row 0 of the tile's (first) head to row `row` of the tile.
  SDPA_DEVICE static int64_t row_offset(const Params &params, const TensorRef &tensor, int64_t row) {
    if constexpr (kIsSplit) {
      int position, head;
      params.heads_per_kv(position, head, static_cast<int>(row));
      return position * tensor.row_stride + head * tensor.head_stride;
    } else {
      return row * tensor.row_stride;
    }
  }

  // ---- order of the keys ----
  // Row r of a K or V tile, and column r of S, is key KeyOrder(r) of the block. For a dense mask the keys of 32 are
  // permuted so that the columns 8t + 2l + {0, 1} of lane l in a quad are its neighbours 8l + 2t + {0, 1}; softmax and
  // P V do not care. Dropout needs the order as it is.
  static constexpr bool kPermuteKeys = kHasMask && !kHasDropout;
  static constexpr int kMaskRun = kPermuteKeys ? 8 : 2;  // neighbouring keys that a thread holds
  using KeyOrder =
      std::conditional_t<kPermuteKeys,
                         Layout<Shape<Shape<_2, _4, _4, Int<kBlockN / 32>>>, Stride<Stride<_1, _8, _2, _32>>>,
                         Layout<Shape<Int<kBlockN>>, Stride<_1>>>;

  // ---- shared memory ----
  static constexpr int kSmemCols = kHeadDim % 64 == 0 ? 64 : kHeadDim % 32 == 0 ? 32 : 16;
  static constexpr int kSwizzleBits = kSmemCols == 64 ? 3 : kSmemCols == 32 ? 2 : 1;
  using SmemLayoutAtom = decltype(composition(Swizzle<kSwizzleBits, 3, 3>{},
                                              Layout<Shape<_8, Int<kSmemCols>>, Stride<Int<kSmemCols>, _1>>{}));
  using SmemLayoutQ = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using SmemLayoutKV = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  using SmemLayoutVt = decltype(composition(
      SmemLayoutKV{}, make_layout(Shape<Int<kHeadDim>, Int<kBlockN>>{}, GenRowMajor{})));  // (kHeadDim, kBlockN)

  static constexpr int kTileQ = kBlockM * kHeadDim;  // elements
  static constexpr int kTileKV = kBlockN * kHeadDim;
  // With KV groups every group loads Q for itself. A single warp takes it by way of the ring's last tile, for two
  // barriers of that warp; more warps would wait for each other there, and take it straight from global memory.
  static constexpr bool kQByRing = kKvGroups > 1 && kGroupThreads == 32 && !kIsSplit && kBlockM <= kBlockN;
  static constexpr bool kQDirect = kKvGroups > 1 && !kQByRing;
  static constexpr int kRingTiles = kKvGroups > 1 ? 3 : 2;  // K and V buffers in flight when kStages == 1
  static constexpr int kRegionV = kStages * kTileKV;
  static constexpr int kOffsetQ = kQByRing ? 2 * kTileKV : 0;
  static constexpr int kOffsetK = kKvGroups > 1 ? 0 : kQInRegs ? (kTileQ > kRegionV ? kTileQ : kRegionV) : kTileQ;
  static constexpr int kOffsetV = kKvGroups > 1 || kQInRegs ? 0 : kTileQ + kRegionV;
  static constexpr int kMergeBytes = static_cast<int>(sizeof(float)) * kBlockM * (kHeadDim + 8);
  static constexpr int kRingBytes = static_cast<int>(sizeof(Element)) * kRingTiles * kTileKV;
  static constexpr int kGroupBytes = kRingBytes > kMergeBytes ? kRingBytes : kMergeBytes;
  static constexpr int kSmemBytes =
      kKvGroups > 1 ? kKvGroups * kGroupBytes
                    : static_cast<int>(sizeof(Element)) * (kQInRegs ? kOffsetK + kRegionV : kTileQ + 2 * kRegionV);
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_89 gives one CTA at most 99 KB of shared memory");
  static_assert(sizeof(Element) == 2);

  // ---- MMA: warps along M only, so a row's maximum and sum stay within four lanes ----
  using TiledMma = TiledMMA<MMA_Atom<typename Arch::template MmaOp<Element>>, Layout<Shape<Int<kWarpsM>, _1, _1>>,
                            Tile<Int<16 * kWarpsM>, _16, _16>>;
  static constexpr int kMmaM = kBlockM / (16 * kWarpsM);
  static constexpr int kRowsPerThread = 2 * kMmaM;

  using SmemCopyAtom = Copy_Atom<typename Arch::LdsmN, Element>;
  using SmemCopyAtomT = Copy_Atom<typename Arch::LdsmT, Element>;

  // ---- global → shared: 16 bytes a thread of one group, kThreadsPerRow neighbours along a row ----
  static constexpr int kThreadsPerRow = kSmemCols / 8;
  static constexpr int kRowsPerPass = kGroupThreads / kThreadsPerRow;
  using GmemTiledCopy =
      decltype(make_tiled_copy(Copy_Atom<typename Arch::CpAsync, Element>{},
                               Layout<Shape<Int<kRowsPerPass>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>{},
                               Layout<Shape<_1, _8>>{}));
  // General kernels have no registers to keep what follows from their parameters for the loop. Of the split ones, these
  // would spill.
  static constexpr bool kComputesAgain = kIsGeneral && (!kIsSplit || kKvGroups == 1 || kHeadDim * kWarpsM >= 512);
  // Large accumulators leave no registers for addresses; computing them again for every tile costs less than spills.
  // At head_dim 80 the plain kernel spills without this, and the causal one with it.
  static constexpr bool kRecomputesAddresses = (kIsSplit && kKvGroups > 1 && kHeadDim == 256) ||
                                               (!kIsGeneral && kBlockM * kHeadDim >= 128 * (kIsCausal ? 96 : 80));
  // Where rows see all keys, a split kernel starts without working that out; but for the one that would spill.
  static constexpr bool kHasShortPrologue = kIsSplit && (kKvGroups == 1 || kHeadDim * kWarpsM < 512);
  // At head_dim 80, causal kernels and those with dropout spill unless a tile's first row is found again for each use.
  static constexpr bool kFindsRowAgain = kHeadDim == 80 && kBlockM == 128;
  // With Q in registers, they spill where the addresses at which O is staged follow from one.
  static constexpr bool kStagesByLayout = kFindsRowAgain && kQInRegs;
  // With dropout, the largest of them leave none for the mask's address either; smaller ones spill with this.
  static constexpr bool kFindsMaskAgain = kHasMask && kHasDropout && kBlockM * kHeadDim >= 128 * 128;
  // Large tiles with biases of 16 bits wait for these, up to head_dim 80: a thread asks for the lines of a row a block
  // ahead. Other masks, and larger head_dims, are slower with this.
  static constexpr bool kPrefetchesMask = kMask == MaskKind::kBias16 && !kHasDropout && kHeadDim >= 64 &&
                                          kHeadDim <= 80 && kKvGroups == 1 && kBlockM == kGroupThreads;
  static_assert(kBlockN % kRowsPerPass == 0, "a pass of the K and V loads covers whole tiles");
  static_assert(kQDirect || kBlockM % kRowsPerPass == 0, "a pass of the Q loads covers whole tiles");
};

}  // namespace sdpa::fmha_fwd
