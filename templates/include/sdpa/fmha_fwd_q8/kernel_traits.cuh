// Everything that a quantised kernel knows at compile time: one config in, every layout, copy and MMA out.
//
// Shared memory of one CTA, in bytes (S = kStages, D = kHeadDim):
//
//   int8     | Q kBlockM x D | S times: K 64 x D | V D x 64 | log2 st and 1 / st of 64 tokens, float |
//   int8_qk  | Q kBlockM x D | S times: K 64 x D | V 64 x D, two bytes an element |
//   O        | Q             | kBlockM x D, two bytes an element, over the stages |      once the loop has ended
//
// Every KV group of a split kernel has a stage of its own; once all loops have ended, they are what group_merge.cuh says.
//
// Rows of 128, 64 or 32 bytes are swizzled so that the eight 16-byte rows of any ldmatrix fall into eight different bank
// groups (3, 2 or 1 swizzle bits).
//
// Row r of a K tile, and column r of S, is key KeyOrder(r) of the block: then the columns 8t + 2l + {0, 1} of lane l in a
// quad, t = 2i and 2i + 1, are the keys 16i + 4l + {0, 1, 2, 3}. Those are the bytes that the lane holds of the A operand
// of m16n8k32, so P goes from sums to operand without a shuffle, and the 16 keys of a block that a lane holds have one
// scale. V of bytes keeps the natural order; V of 16 bits has KeyOrder too, which suits m16n8k16.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target.hpp"
#include "sdpa/fmha_fwd_q8/params.hpp"

namespace sdpa::fmha_fwd_q8 {

using namespace cute;

// As in fmha_fwd/kernel_traits.cuh.
inline constexpr int kMaxSmemBytes = 101376;
inline constexpr int kReservedSmemBytes = 1024;  // of every CTA

inline constexpr float kMagic = 12582912.f;         // 1.5 · 2^23: this + n is exact for |n| < 2^22, and its bits
inline constexpr uint32_t kMagicBits = 0x4B400000;  // are kMagicBits + n
inline constexpr int kLargestInt8 = 127;            // -128 is never used
inline constexpr float kLargestP = 252.f;           // not 255: rounding may exceed it, and 256 would wrap to 0
inline constexpr float kCap = 0.01f;                // of the product of the scales: bounds that rounding
inline constexpr float kFlat = 4.f;                 // largest over smallest of 16 tokens that share a scale
inline constexpr float kInverseUnit = 65536.f;      // of v_inverse: keeps row sums away from float's ends

// Row r of K̂ in a block → key.
using BlockKeyOrder = Layout<Shape<Shape<_2, _4, _2, Int<kBlock / 16>>>, Stride<Stride<_1, _4, _2, _16>>>;

// Config: Arch, Element, kHeadDim, kBlockM, kBlockN, kStages, kNWarps, kKvGroups (warps that share the query rows and
// split the keys), kMath, kMask, kCtasPerSm.
template <class Config>
struct KernelTraits : Config {
  using Config::kBlockM;
  using Config::kBlockN;
  using Config::kHeadDim;
  using Config::kKvGroups;
  using Config::kMask;
  using Config::kMath;
  using Config::kNWarps;
  using Config::kStages;
  using typename Config::Arch;
  using typename Config::Element;
  static constexpr bool kIsSplit = kKvGroups > 1;
  using Params = std::conditional_t<kIsSplit, SplitQuantizedParams, QuantizedParams>;
  static constexpr bool kQuantizesV = kMath == Math::kInt8;
  static constexpr bool kHasMask = kMask != MaskKind::kNone;
  static constexpr bool kHasBias = kMask == MaskKind::kBias16 || kMask == MaskKind::kBias32;
  static constexpr int kMaskRun = 4;  // neighbouring keys that a thread holds: see KeyOrder
  static constexpr int kThreads = 32 * kNWarps;
  static constexpr int kWarpsM = kNWarps / kKvGroups;
  static constexpr int kGroupThreads = 32 * kWarpsM;
  // The thread's index among those that share K and V.
  SDPA_DEVICE static int group_thread() {
    if constexpr (kIsSplit) return Arch::thread_idx() % kGroupThreads;
    return Arch::thread_idx();
  }

  // A thread's index among those that compute.
  SDPA_DEVICE static int row_thread_again() { return Arch::thread_idx_again(); }
  // Every warp has read its last K and V: their room may take O.
  SDPA_DEVICE static void sync_before_out() { Arch::syncthreads(); }

  // What the shared parts of attention/ and fmha_fwd/ ask.
  static constexpr bool kIsGeneral = true;
  static constexpr bool kHasDropout = false;
  static constexpr bool kMayBeCausal = true;
  static constexpr bool kMayHaveWindow = true;
  static constexpr CausalOrder kCausalOrder = CausalOrder::kLongestFirst;
  SDPA_DEVICE static int head_dim_v(const Params &params) { return params.head_dim_v; }
  // A tile of a split kernel holds the rows of all heads of a key head, as in fmha_fwd/split.cuh.
  SDPA_DEVICE static int position([[maybe_unused]] const Params &params, int row) {
    if constexpr (kIsSplit) return params.heads_per_kv.div(row);
    return row;
  }
  SDPA_DEVICE static int64_t row_offset([[maybe_unused]] const Params &params, const TensorRef &tensor, int64_t row) {
    if constexpr (kIsSplit) {
      int position, head;
      params.heads_per_kv(position, head, static_cast<int>(row));
      return position * tensor.row_stride + head * tensor.head_stride;
    } else {
      return row * tensor.row_stride;
    }
  }
  SDPA_DEVICE static WorkTile work_tile(const Params &params, int block_idx) {
    if (params.is_causal) return params.scheduler.template tile<true, kHasMask, kCausalOrder>(block_idx);
    return params.scheduler.template tile<false, kHasMask, kCausalOrder>(block_idx);
  }

  static_assert(sizeof(Element) == 2);
  static_assert(kBlockN == kBlock, "groups of K, rules for zero tokens and packed rows go by blocks of 64 keys");
  static_assert(kBlockM % (16 * kWarpsM) == 0, "a warp's MMA covers 16 query rows");
  static_assert(kHeadDim % 32 == 0, "a k-step of the MMA is 32 bytes");
  static_assert(kIsSplit || kStages >= 2, "K and V travel together, a block ahead");
  static_assert(!kIsSplit || (kStages == 1 && kGroupThreads == 32), "a warp alone has a room for K and one for V");
  static_assert(!kIsSplit || !kHasMask, "split kernels take no masks");
  // The float that stands for kMagic + n is exact: the largest sums of Q Kᵀ stay below 2^22 for head_dim up to 256.
  static_assert(kLargestInt8 * kLargestInt8 * kHeadDim < 1 << 22);
  static_assert(256 * kLargestInt8 * kBlockN < 1 << 22, "and those of P V");
  // Half a unit of the subtrahend, whose largest is kMagic · kCap < 2^17, lets 252 grow to less than 255.5.
  static_assert(kMagic * kCap < 131072.f && kLargestP * 1.0109f < 255.5f, "log2 of 1.0109 is 2^-6");

  using KeyOrder = BlockKeyOrder;

  // ---- shared memory ----
  using Block = BlockLayout<kMath, kHeadDim>;
  static constexpr int kByteCols = Block::kCols;
  template <int kCols>
  using ByteAtom = decltype(composition(Swizzle<kCols == 128  ? 3
                                                : kCols == 64 ? 2
                                                              : 1,
                                                4, 3>{},
                                        Layout<Shape<_8, Int<kCols>>, Stride<Int<kCols>, _1>>{}));
  using SmemLayoutQ = decltype(tile_to_shape(ByteAtom<kByteCols>{}, Shape<Int<kBlockM>, Int<kHeadDim>>{}));
  using SmemLayoutK = decltype(tile_to_shape(ByteAtom<kByteCols>{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  using SmemLayoutVt = decltype(tile_to_shape(ByteAtom<kBlockN>{}, Shape<Int<kHeadDim>, Int<kBlockN>>{}));

  // Of 16-bit elements: O, and V of int8_qk. As in fmha_fwd.
  static constexpr int kSmemCols = kHeadDim % 64 == 0 ? 64 : 32;
  using SmemLayoutAtom = decltype(composition(Swizzle<kSmemCols == 64 ? 3 : 2, 3, 3>{},
                                              Layout<Shape<_8, Int<kSmemCols>>, Stride<Int<kSmemCols>, _1>>{}));
  using SmemLayoutV16 = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kBlockN>, Int<kHeadDim>>{}));
  using SmemLayoutV16t = decltype(composition(
      SmemLayoutV16{}, make_layout(Shape<Int<kHeadDim>, Int<kBlockN>>{}, GenRowMajor{})));  // (kHeadDim, kBlockN)

  static constexpr int kTileQ = kBlockM * kHeadDim;  // bytes, like all below
  static constexpr int kStageBytes = kQuantizesV ? Block::kBytes : 3 * Block::kTile;
  static constexpr int kOffsetK = kTileQ;  // of stage 0, as the next two
  static constexpr int kOffsetV = kOffsetK + Block::kV;
  static constexpr int kOffsetScales = kOffsetK + Block::kLog2;
  static constexpr int kOffsetO = kTileQ;
  static constexpr int kGroupBytes = kStages * kStageBytes;
  static constexpr int kRingBytes = kTileQ + kKvGroups * kGroupBytes;
  static constexpr int kOutBytes = kIsSplit ? 0 : kOffsetO + 2 * kTileQ;
  static constexpr int kMergeBytes = static_cast<int>(sizeof(float)) * kBlockM * (kHeadDim + 8);
  static_assert(!kIsSplit || kMergeBytes <= kGroupBytes, "what a group hands over takes the room of its K and V");
  static constexpr int kSmemBytes = kRingBytes > kOutBytes ? kRingBytes : kOutBytes;
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_89 gives one CTA at most 99 KB of shared memory");

  // ---- MMA: warps along M only, so a row's maximum and sum stay within four lanes ----
  using WarpsMNK = Layout<Shape<Int<kWarpsM>, _1, _1>>;
  using TiledMmaQk = TiledMMA<MMA_Atom<typename Arch::MmaS8S8>, WarpsMNK, Tile<Int<16 * kWarpsM>, _16, _32>>;
  using TiledMmaPv = std::conditional_t<
      kQuantizesV, TiledMMA<MMA_Atom<typename Arch::MmaU8S8>, WarpsMNK, Tile<Int<16 * kWarpsM>, _16, _32>>,
      TiledMMA<MMA_Atom<typename Arch::template MmaOp<Element>>, WarpsMNK, Tile<Int<16 * kWarpsM>, _16, _16>>>;
  static constexpr int kMmaM = kBlockM / (16 * kWarpsM);
  static constexpr int kRowsPerThread = 2 * kMmaM;
  // Columns of O whose integer sums a thread holds next to O, in MMA tiles of 8. A larger O leaves no room for more.
  static constexpr int kColumnTiles = kHeadDim == 64 ? 4 : 2;
  // O takes the sums of P̂ V̂ as the floats kMagic + P̂ V̂: one instruction an element instead of two. Memory bounds split
  // kernels.
  static constexpr bool kShiftsO = kQuantizesV && !kIsSplit;

  // The operands of Q̂ K̂ᵀ that are Q stay in registers. A mask leaves none, and more CTAs hide more of a split kernel's loads.
  static constexpr bool kKeepsQ = !kHasMask && !kIsSplit;

  static constexpr bool kSumsStartAtMagic = true;  // those of Q̂ K̂ᵀ, so that they are floats when they are done
  static constexpr bool kAddsLate = false;

  using ByteLdsm = Copy_Atom<typename Arch::LdsmN, int8_t>;
  using LdsmT = Copy_Atom<typename Arch::LdsmT, Element>;

  // ---- global → shared, 16 bytes a thread ----
  template <int kCols>
  using ByteCopy = decltype(make_tiled_copy(
      Copy_Atom<typename Arch::CpAsync, int8_t>{},
      Layout<Shape<Int<kGroupThreads / (kCols / 16)>, Int<kCols / 16>>, Stride<Int<kCols / 16>, _1>>{},
      Layout<Shape<_1, _16>>{}));
  static constexpr int kThreadsPerRow = kSmemCols / 8;
  using GmemTiledCopy = decltype(make_tiled_copy(
      Copy_Atom<typename Arch::CpAsync, Element>{},
      Layout<Shape<Int<kGroupThreads / kThreadsPerRow>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>{},
      Layout<Shape<_1, _8>>{}));
  static_assert(kBlockN % (kGroupThreads / (kByteCols / 16)) == 0, "a pass of the K loads covers whole tiles");
  static_assert(kHeadDim % (kGroupThreads / (kBlockN / 16)) == 0, "a pass of the V loads covers whole tiles");
  static_assert(kQuantizesV || kBlockN % (kGroupThreads / kThreadsPerRow) == 0, "so does one of V of 16 bits");
};

}  // namespace sdpa::fmha_fwd_q8
