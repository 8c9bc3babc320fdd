// Everything that a fused backward kernel knows at compile time. Its CTAs are those of fmha_bwd that own keys, with one
// more multiplication, for which the warps lie otherwise:
//
//   dQ (kBlockM x kHeadDim) += dS (kBlockM x kBlockN) K     kDqWarpsM warps along rows, the others along columns
//
// Shared memory of one CTA: | that of the keys role | dS, transposed: kBlockN x kBlockM |.
#pragma once

#include "sdpa/fmha_bwd/kernel_traits.cuh"
#include "sdpa/fmha_bwd_fused/params.hpp"

namespace sdpa::fmha_bwd_fused {

using namespace cute;

// Config: Arch, Element, kHeadDim, kBlockM, kBlockN, kStages, kNWarps, kHasDropout, kCtasPerSm.
template <class Config>
struct KernelTraits : Config {
  using Config::kBlockM;
  using Config::kBlockN;
  using Config::kHeadDim;
  using Config::kNWarps;
  using Config::kStages;
  using typename Config::Arch;
  using typename Config::Element;
  static constexpr int kThreads = 32 * kNWarps;
  static constexpr bool kHasMask = false;

  // What fmha_bwd/launch.cuh asks of a kernel with two roles: there are no CTAs of the other one.
  static constexpr int kDqBlockM = kBlockM;
  static constexpr int kDqBlockN = kBlockN;
  static constexpr bool kSplitsKeys = false;

  using Keys = fmha_bwd::RoleTraits<KernelTraits, fmha_bwd::Role::kKeys>;
  static_assert(kStages > 1, "the loop of fmha_bwd/mainloop.cuh loads a tile ahead");
  static_assert(kHeadDim <= 128, "registers hold dK and dV at once");

  // ---- dS in shared memory ----
  static constexpr int kSmemColsDs = kBlockM % 64 == 0 ? 64 : 32;
  static constexpr int kSwizzleBitsDs = kSmemColsDs == 64 ? 3 : 2;
  using SmemLayoutAtomDs = decltype(composition(Swizzle<kSwizzleBitsDs, 3, 3>{},
                                                Layout<Shape<_8, Int<kSmemColsDs>>, Stride<Int<kSmemColsDs>, _1>>{}));
  using SmemLayoutDsT = decltype(tile_to_shape(SmemLayoutAtomDs{}, Shape<Int<kBlockN>, Int<kBlockM>>{}));
  using SmemLayoutDs =
      decltype(composition(SmemLayoutDsT{}, make_layout(Shape<Int<kBlockM>, Int<kBlockN>>{}, GenRowMajor{})));
  using SmemLayoutKt = decltype(composition(typename Keys::SmemLayoutA{},
                                            make_layout(Shape<Int<kHeadDim>, Int<kBlockN>>{}, GenRowMajor{})));
  static constexpr int kOffsetDs = Keys::kSmemBytes;
  static constexpr int kSmemBytes = kOffsetDs + static_cast<int>(sizeof(Element)) * kBlockM * kBlockN;
  static_assert(kBlockM % 32 == 0, "rows of dS are whole chunks of shared memory");
  static_assert(kOffsetDs % 128 == 0);
  static_assert(kSmemBytes <= fmha_bwd::kMaxSmemBytes, "sm_89 gives one CTA at most 99 KB of shared memory");

  // ---- MMA of dQ ----
  static constexpr int kDqWarpsM = kBlockM / 16 < kNWarps / 2 ? kBlockM / 16 : kNWarps / 2;
  static constexpr int kDqWarpsN = kNWarps / kDqWarpsM;
  static_assert(kDqWarpsM * kDqWarpsN == kNWarps && kBlockM % (16 * kDqWarpsM) == 0);
  static_assert(kHeadDim % (16 * kDqWarpsN) == 0, "a warp's columns come by ldmatrix.x4");
  using TiledMmaDq =
      TiledMMA<MMA_Atom<typename Arch::template MmaOp<Element>>, Layout<Shape<Int<kDqWarpsM>, Int<kDqWarpsN>, _1>>,
               Tile<Int<16 * kDqWarpsM>, Int<16 * kDqWarpsN>, _16>>;
  static constexpr int kDqVectors = kBlockM * kHeadDim / kThreads / 4;  // of four sums, of a thread
};

}  // namespace sdpa::fmha_bwd_fused
