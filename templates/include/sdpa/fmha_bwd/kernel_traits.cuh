// Everything that a backward kernel knows at compile time: one config in, the layouts and MMAs of both roles out.
//
// A CTA has one of two roles. It owns a tile of one side, and tiles of the other side stream by:
//
//   role    owns (A0, A1), kOwn rows    streams (B0, B1), kStream rows    S, dP            results
//   keys    K, V    kBlockN keys        Q, dO   kBlockM rows              transposed       dK, dV
//   rows    Q, dO   kDqBlockM rows      K, V    kDqBlockN keys            as they are      dQ
//
// Above head_dim 128 registers do not hold dK and dV at once: the keys role is two there, of kernels with one stage.
//
//   dk      K, V    kBlockN keys        Q, dO   kBlockM rows              transposed       dK
//   dv      K       kBlockN keys        Q, dO   kBlockM rows              transposed, S    dV
//
// Shared memory of one CTA: | A0 | A1 | (B0 | B1) of every stage | row statistics of every stage, where keys are owned |
// without A1 in the dv role. Warps lie along what is owned, so that S and dP become operands of the next multiplication
// where they are: nothing but operands crosses shared memory.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target.hpp"
#include "sdpa/fmha_bwd/params.hpp"

namespace sdpa::fmha_bwd {

using namespace cute;

inline constexpr int kMaxSmemBytes = 101376;  // of a CTA on sm_89, as in fmha_fwd

enum class Role { kKeys, kRows, kDk, kDv };

// One role of a kernel, with the names that attention/ and fmha_fwd/tile_copy.cuh ask of Traits.
template <class Kernel, Role kRole_>
struct RoleTraits {
  using Arch = typename Kernel::Arch;
  using Element = typename Kernel::Element;
  using Params = fmha_bwd::Params;
  static constexpr Role kRole = kRole_;
  static constexpr bool kOwnsKeys = kRole != Role::kRows;
  static constexpr bool kNeedsDp = kRole != Role::kDv;
  static constexpr int kHeadDim = Kernel::kHeadDim;
  static constexpr int kBlockM = kOwnsKeys ? Kernel::kBlockM : Kernel::kDqBlockM;
  static constexpr int kBlockN = kOwnsKeys ? Kernel::kBlockN : Kernel::kDqBlockN;
  static constexpr int kOwn = kOwnsKeys ? kBlockN : kBlockM;
  static constexpr int kStream = kOwnsKeys ? kBlockM : kBlockN;
  static constexpr int kStages = Kernel::kStages;
  static constexpr int kNWarps = Kernel::kNWarps;
  static constexpr int kThreads = Kernel::kThreads;
  static constexpr bool kHasMask = Kernel::kHasMask;
  static constexpr bool kHasDropout = Kernel::kHasDropout;
  static constexpr bool kIsGeneral = true;
  static constexpr bool kPermuteKeys = false;
  static constexpr bool kMayBeCausal = true;
  static constexpr bool kMayHaveWindow = true;

  static_assert(kOwn % (16 * kNWarps) == 0, "a warp's MMA covers 16 rows of what is owned");
  static_assert(kStream % 16 == 0 && kHeadDim % 16 == 0, "operands come in steps of 16");
  static_assert(kPaddedRows % kBlockM == 0, "tiles of rows read whole vectors of row statistics");
  static_assert(kBlockN % 32 == 0 && kBlockM % 16 == 0, "dropout goes by blocks of 16 rows and 32 keys");
  static_assert(sizeof(Element) == 2);

  SDPA_DEVICE static int position(const Params &, int row) { return row; }

  // ---- shared memory ----
  static constexpr int kSmemCols = kHeadDim % 64 == 0 ? 64 : kHeadDim % 32 == 0 ? 32 : 16;
  static constexpr int kSwizzleBits = kSmemCols == 64 ? 3 : kSmemCols == 32 ? 2 : 1;
  using SmemLayoutAtom = decltype(composition(Swizzle<kSwizzleBits, 3, 3>{},
                                              Layout<Shape<_8, Int<kSmemCols>>, Stride<Int<kSmemCols>, _1>>{}));
  using SmemLayoutA = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kOwn>, Int<kHeadDim>>{}));
  using SmemLayoutB = decltype(tile_to_shape(SmemLayoutAtom{}, Shape<Int<kStream>, Int<kHeadDim>>{}));
  using SmemLayoutBt = decltype(composition(
      SmemLayoutB{}, make_layout(Shape<Int<kHeadDim>, Int<kStream>>{}, GenRowMajor{})));  // (kHeadDim, kStream)

  static constexpr int kTileA = kOwn * kHeadDim;  // elements
  static constexpr int kTileB = kStream * kHeadDim;
  static constexpr int kOffsetB = (kNeedsDp ? 2 : 1) * kTileA;
  static constexpr int kStatisticsBytes = kOwnsKeys ? kStages * kStream * static_cast<int>(sizeof(float2)) : 0;
  static constexpr int kOffsetStatistics = static_cast<int>(sizeof(Element)) * (kOffsetB + 2 * kStages * kTileB);
  static constexpr int kSmemBytes = kOffsetStatistics + kStatisticsBytes;

  // ---- MMA ----
  using TiledMma = TiledMMA<MMA_Atom<typename Arch::template MmaOp<Element>>, Layout<Shape<Int<kNWarps>, _1, _1>>,
                            Tile<Int<16 * kNWarps>, _16, _16>>;
  static constexpr int kMmaM = kOwn / (16 * kNWarps);
  static constexpr int kRowsPerThread = 2 * kMmaM;
  using SmemCopyAtom = Copy_Atom<typename Arch::LdsmN, Element>;
  using SmemCopyAtomT = Copy_Atom<typename Arch::LdsmT, Element>;

  // ---- global → shared: 16 bytes a thread, kThreadsPerRow neighbours along a row ----
  static constexpr int kThreadsPerRow = kSmemCols / 8;
  static constexpr int kRowsPerPass = kThreads / kThreadsPerRow;
  using GmemTiledCopy =
      decltype(make_tiled_copy(Copy_Atom<typename Arch::CpAsync, Element>{},
                               Layout<Shape<Int<kRowsPerPass>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>{},
                               Layout<Shape<_1, _8>>{}));
  static_assert(kOwn % kRowsPerPass == 0 && kStream % kRowsPerPass == 0, "a pass of the loads covers whole tiles");
  static_assert(!kOwnsKeys || kStream / 2 <= kThreads, "one pass loads the row statistics of a tile");
};

// Config: Arch, Element, kHeadDim, kBlockM, kBlockN, kDqBlockM, kDqBlockN, kStages, kNWarps, kCtasPerSm, kHasDropout,
// kHasMask (may have one: a launch need not).
template <class Config>
struct KernelTraits : Config {
  static constexpr int kThreads = 32 * Config::kNWarps;
  static constexpr bool kSplitsKeys = Config::kStages == 1;  // dK and dV have CTAs of their own

  using Keys = RoleTraits<KernelTraits, Role::kKeys>;
  using Dk = RoleTraits<KernelTraits, Role::kDk>;  // this and the next one in place of Keys, with kSplitsKeys
  using Dv = RoleTraits<KernelTraits, Role::kDv>;
  using Rows = RoleTraits<KernelTraits, Role::kRows>;

  // All roles are in one launch. That of dK takes as much as that of dK and dV, and more than that of dV.
  static constexpr int kSmemBytes = Dk::kSmemBytes > Rows::kSmemBytes ? Dk::kSmemBytes : Rows::kSmemBytes;
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_89 gives one CTA at most 99 KB of shared memory");
};

}  // namespace sdpa::fmha_bwd
