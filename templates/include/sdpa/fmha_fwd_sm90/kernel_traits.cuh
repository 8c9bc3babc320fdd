// Everything that an sm_90 kernel knows at compile time: one config in, every layout, MMA and barrier out.
//
// A CTA has one warpgroup that loads and kConsumers that compute, 64 query rows each. Shared memory, in tiles of
// elements, each a multiple of 8 swizzled rows:
//
//   | Q kStagesQ x kConsumers x (64 x kHeadDim) | K kStages x (kBlockN x kHeadDim) | V likewise | O of kConsumers, or in
//   Q's room | barriers
//
// A tile lies in chunks of kSmemCols columns, one TMA box each: chunk c of a tile of R rows starts at element
// c · R · kSmemCols. V is read as the transposed operand from the same bytes.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target_sm90.hpp"
#include "sdpa/attention/key_range.cuh"
#include "sdpa/attention/key_split.cuh"
#include "sdpa/fmha_fwd_sm90/grid.hpp"
#include "sdpa/fmha_fwd_sm90/params.hpp"

namespace sdpa::fmha_fwd_sm90 {

using namespace cute;

inline constexpr int kMaxSmemBytes = 232448;  // that a CTA can opt in to on compute capability 9.0
inline constexpr int kWarpgroup = 128;        // threads
inline constexpr int kWarpgroupRows = 64;     // query rows of a wgmma
inline constexpr int kWarpRows = 16;          // of these, a warp's

// Config: Arch, Element, kHeadDim, kBlockM, kBlockN, kStages, kCluster, kIsCausal, kIsGeneral, kHasDropout, kIsSplit, kMask.
template <class Config>
struct KernelTraits : Config {
  using Config::kBlockM;
  using Config::kBlockN;
  using Config::kCluster;
  using Config::kHasDropout;
  using Config::kHeadDim;
  using Config::kIsCausal;
  using Config::kIsGeneral;
  using Config::kIsSplit;
  using Config::kMask;
  using Config::kStages;
  using typename Config::Arch;
  using typename Config::Element;
  using TensorMap = typename Arch::TensorMap;
  using Params = std::conditional_t<
      kIsSplit, fmha_fwd_sm90::SplitParams<TensorMap>,
      std::conditional_t<kIsGeneral, fmha_fwd_sm90::GeneralParams<TensorMap>, fmha_fwd_sm90::Params<TensorMap>>>;
  static constexpr bool kHasMask = kMask != MaskKind::kNone;
  static constexpr bool kHasBias = kMask == MaskKind::kBias16 || kMask == MaskKind::kBias32;
  static constexpr bool kLeavesBlocksOut = kMask == MaskKind::kBool;  // that the mask hides from all rows of a tile
  static constexpr bool kMayBeCausal = kIsCausal || kIsGeneral;
  static constexpr bool kMayHaveWindow = kIsGeneral;

  static constexpr int kConsumers = kBlockM / kWarpgroupRows;  // warpgroups
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);

  // CTAs of a cluster: one, or a pair that has a tile of twice as many rows. Each loads one half of the rows of every
  // block of K and V, and sends it to both.
  static constexpr bool kIsPair = kCluster == 2;
  static constexpr int kRowsOfLoad = kBlockN / kCluster;
  static_assert(kCluster == 1 || (kIsPair && !kIsGeneral && kConsumers == 2), "pairs are plain, with two consumers");
  static_assert(kRowsOfLoad % 8 == 0, "a half of a block starts where its swizzle does");

  // Small accumulators leave room for a second CTA, which computes while the first one begins or ends a tile.
  static constexpr int kAccumulatorRegisters = kBlockN / 2 + kBlockN / 4 + kHeadDim / 2;  // S, P and O at once
  static constexpr int kCtasPerSm = kConsumers == 2 && kAccumulatorRegisters <= 72 && !kIsGeneral ? 2 : 1;
  // setmaxnreg deals the registers of the launch out again. Not one more, or a consumer waits for them for ever. The
  // warp that loads for a general kernel has coordinates of sequences to keep, that of a pair its half of a block.
  static constexpr bool kHasMoreToKeep = kIsGeneral || kIsPair;
  static constexpr int kLaunchRegisters = kCtasPerSm == 2 ? 80 : kConsumers == 3 ? 128 : 168;  // a thread
  static constexpr int kConsumerRegisters = kCtasPerSm == 2 ? 104 : kConsumers == 3 ? 160 : kHasMoreToKeep ? 232 : 240;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kHasMoreToKeep ? 40 : 24;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters);

  static_assert(!kIsCausal || !kIsGeneral, "a general kernel learns at run time whether it is causal");
  static_assert(!kIsSplit || (kIsGeneral && !kHasMask && !kHasDropout), "split kernels are general, without masks");
  static_assert((!kHasMask && !kHasDropout) || (kIsGeneral && kConsumers == 2),
                "masks and dropout are a general kernel's, and take registers that three consumers do not have");
  static_assert(!kHasMask || kAccumulatorRegisters <= 160, "larger accumulators leave no registers for masks");
  static_assert(kBlockM % kWarpgroupRows == 0 && (kConsumers == 2 || kConsumers == 3), "2 or 3 consumer warpgroups");
  static_assert(kBlockN % 16 == 0 && kBlockN <= 256 && kHeadDim % 16 == 0 && kHeadDim <= 256, "steps of wgmma");
  static_assert(kAccumulatorRegisters <= (kConsumers == 3 ? 132 : 200), "S, P and O are in registers at once");

  // Whether a CTA may compute several tiles. What a mask leaves of a tile is not known here; a split has a part of one.
  static constexpr bool kTakesTurns = !kHasMask && !kIsSplit;
  // A general kernel that does has no registers to keep what is the same for all of its tiles.
  static constexpr bool kKeepsNothing = kIsGeneral && kTakesTurns;

  SDPA_DEVICE static bool is_causal(const Params &params) {
    if constexpr (kIsGeneral) return params.is_causal;
    return kIsCausal;
  }

  SDPA_DEVICE static WorkTile work_tile(const Params &params, uint32_t index) {
    if constexpr (kIsSplit) index = static_cast<uint32_t>(params.num_splits.div(static_cast<int>(index)));
    if constexpr (kIsGeneral) {
      if (params.window_right < 0)  // rows see as many keys behind them as there are
        return params.scheduler.template tile<false, kHasMask, CausalOrder::kLongestFirst>(static_cast<int>(index));
    }
    if constexpr (kIsCausal) return causal_tile(params, index);
    return params.scheduler.template tile<kMayBeCausal, kHasMask, CausalOrder::kLongestFirst>(static_cast<int>(index));
  }

  // The same, computed anew instead of kept in registers.
  SDPA_DEVICE static WorkTile work_tile_again(const Params &params, uint32_t index) {
    const int again = kTakesTurns ? Arch::forget_origin(static_cast<int>(index)) : Arch::block_idx_again();
    return work_tile(params, static_cast<uint32_t>(again));
  }

  // ---- masks and dropout ----
  // Pairs of a mask's columns in each of a thread's two rows that are asked for before the products which make the
  // scores: half as many as long as S, P, O and these leave the other registers too few.
  static constexpr int kMaskRegisters = (!kHasDropout ? 192 : kLeavesBlocksOut ? 172 : 184) - kAccumulatorRegisters;
  static constexpr int kMaskWords = kMask == MaskKind::kBias32 ? 4 : 2;  // of a pair in both rows
  static constexpr int mask_pairs_ahead(int pairs) {
    return pairs % 2 != 0 || pairs * kMaskWords <= kMaskRegisters ? pairs : mask_pairs_ahead(pairs / 2);
  }
  static constexpr int kMaskPairsAhead = mask_pairs_ahead(kBlockN / 8);
  // Next to a mask, large accumulators leave no registers to keep seed and offset for the loop.
  static constexpr bool kFindsDropoutAgain = kHasDropout && kHasMask && kAccumulatorRegisters >= 160;
  static constexpr int kMaskRun = 2;  // neighbouring columns that a thread holds
  static constexpr int kMmaM = 1;     // what dropout.cuh asks: a thread holds two rows, and the keys in their order
  static constexpr bool kPermuteKeys = false;

  // Where a CTA's cluster stands in the grid, and where the CTA stands in its cluster.
  SDPA_DEVICE static int cluster_idx() { return Arch::block_idx() / kCluster; }
  SDPA_DEVICE static int rank() { return Arch::block_idx() % kCluster; }
  // Which 64 rows of its head a consumer has, of the tile at `m_block`. Of a pair's four, the first CTA has 0 and 3, the
  // second 1 and 2, so that causal work comes out even.
  SDPA_DEVICE static int warpgroup_idx(int m_block, int consumer) {
    if constexpr (kIsPair) return m_block * 4 + consumer * 2 + (consumer ^ rank());
    return m_block * kConsumers + consumer;
  }
  SDPA_DEVICE static int first_row(int m_block, int consumer) {
    if constexpr (kIsPair) return warpgroup_idx(m_block, consumer) * kWarpgroupRows;
    return m_block * kBlockM + consumer * kWarpgroupRows;
  }

  // A row's position in its sequence; key_range.cuh and mask.cuh ask.
  SDPA_DEVICE static int position(const Params &, int row) { return row; }

  // ---- shared memory ----
  static constexpr int kSmemCols = kHeadDim % 64 == 0 ? 64 : kHeadDim % 32 == 0 ? 32 : 16;
  static constexpr int kSwizzleBytes = 2 * kSmemCols;
  using AtomK = std::conditional_t<
      kSmemCols == 64, GMMA::Layout_K_SW128_Atom<Element>,
      std::conditional_t<kSmemCols == 32, GMMA::Layout_K_SW64_Atom<Element>, GMMA::Layout_K_SW32_Atom<Element>>>;
  using AtomV = std::conditional_t<
      kSmemCols == 64, GMMA::Layout_MN_SW128_Atom<Element>,
      std::conditional_t<kSmemCols == 32, GMMA::Layout_MN_SW64_Atom<Element>, GMMA::Layout_MN_SW32_Atom<Element>>>;
  using SmemLayoutQ = decltype(tile_to_shape(AtomK{}, Shape<Int<kWarpgroupRows>, Int<kHeadDim>>{}));
  using SmemLayoutK = decltype(tile_to_shape(AtomK{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using SmemLayoutVt = decltype(tile_to_shape(AtomV{}, Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>{},
                                              Step<_2, _1, _3>{}));  // (kHeadDim, kBlockN, kStages)

  static constexpr int kTileQ = kWarpgroupRows * kHeadDim;  // elements, of one warpgroup
  static constexpr int kTileKV = kBlockN * kHeadDim;
  static constexpr int kTileBytesQ = kTileQ * static_cast<int>(sizeof(Element));
  static constexpr int kTileBytesKV = kTileKV * static_cast<int>(sizeof(Element));
  // Where a second tile of that size does not fit, O leaves through Q's room, and the next tile waits for it.
  static constexpr bool kOutInQ = 2 * (2 * kConsumers * kTileQ + 2 * kStages * kTileKV) > kMaxSmemBytes - 1024;

  // Q of the next tile arrives while this one is computed, where there is room for both and CTAs have several tiles.
  static constexpr int kElementsOfTwoQ = 3 * kConsumers * kTileQ + 2 * kStages * kTileKV;  // O too
  static constexpr int kStagesQ = !kIsGeneral && !kOutInQ && 2 * kElementsOfTwoQ <= kMaxSmemBytes - 1024 ? 2 : 1;

  struct SharedStorage {
    alignas(1024) Element q[kStagesQ][kConsumers][kTileQ];
    Element k[kStages][kTileKV];
    Element v[kStages][kTileKV];
    Element out[kOutInQ ? 1 : kConsumers][kOutInQ ? 512 : kTileQ];
    // full: one arrival and the bytes of the copies. empty: one arrival of every warp that reads.
    uint64_t q_full[kStagesQ][kConsumers], q_empty[kStagesQ][kConsumers];
    uint64_t k_full[kStages], k_empty[kStages];
    uint64_t v_full[kStages], v_empty[kStages];
  };
  static constexpr int kSmemBytes = static_cast<int>(sizeof(SharedStorage));
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_90 gives one CTA at most 227 KB of shared memory");
  static_assert(kTileBytesQ % (8 * kSwizzleBytes) == 0 && kTileBytesKV % (8 * kSwizzleBytes) == 0,
                "every tile starts where its swizzle does");

  // ---- MMA ----
  using MmaQK = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kBlockN>, Int<kHeadDim>>>()));
  using MmaPV = decltype(make_tiled_mma(
      GMMA::rs_op_selector<Element, Element, float, Shape<Int<kWarpgroupRows>, Int<kHeadDim>, Int<kBlockN>>,
                           GMMA::Major::K, GMMA::Major::MN>()));
  static_assert(size<1>(typename MmaQK::AtomShape_MNK{}) == kBlockN &&
                    size<1>(typename MmaPV::AtomShape_MNK{}) == kHeadDim,
                "one instruction covers a row of S or O: include target_sm90.hpp before CuTe");
};

// The rows of one consumer as a tile, for what asks how far a tile looks.
template <class Traits>
struct WarpgroupTile {
  using Params = typename Traits::Params;
  static constexpr int kBlockM = kWarpgroupRows;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr bool kMayBeCausal = Traits::kMayBeCausal;
  static constexpr bool kIsGeneral = Traits::kIsGeneral;
  static constexpr bool kMayHaveWindow = Traits::kMayHaveWindow;
  SDPA_DEVICE static int position(const Params &params, int row) { return Traits::position(params, row); }
};

// The rows of a cluster as a tile; what the scheduler deals out.
template <class Traits>
struct ClusterTile : Traits {
  static constexpr int kBlockM = Traits::kCluster * Traits::kBlockM;
};

// Of the tile at `m_block`, whose rows may all lie beyond those that attend.
template <class Tile>
SDPA_DEVICE KeyRange key_range(const typename Tile::Params &params, const Sequence &sequence, int m_block) {
  if (Tile::kIsGeneral && m_block * Tile::kBlockM >= sequence.seqlen_q) return {0, 0, 0, 0};
  return KeyRange::make<Tile>(params, sequence, m_block);
}

// A CTA's share of the keys of the tile at `m_block`.
template <class Traits>
SDPA_DEVICE KeySplit key_split(const typename Traits::Params &params, const Sequence &sequence, int m_block) {
  const int index = params.num_splits.rem(Traits::Arch::block_idx_again());
  return KeySplit::make(index, params.num_splits.divisor, key_range<Traits>(params, sequence, m_block));
}

// The lengths that a CTA works on; of a split, as if its share of the keys were all there are.
template <class Traits>
SDPA_DEVICE Sequence sequence_of(const typename Traits::Params &params, const WorkTile &tile) {
  const Sequence sequence = Sequence::make(params, tile.bidb);
  if constexpr (Traits::kIsSplit)
    return key_split<Traits>(params, sequence, tile.m_block).template of<Traits>(sequence);
  return sequence;
}

// Accumulator of a wgmma ((2, 2, N / 8), 1, 1) → (rows, cols) = (2, (2, N / 8))
template <class Layout_>
SDPA_HOST_DEVICE auto wgmma_rows_cols(const Layout_ &acc) {
  return make_layout(get<0, 1>(acc), make_layout(get<0, 0>(acc), get<0, 2>(acc)));
}

// Accumulator of a wgmma ((2, 2, N / 8), 1, 1) → A operand in registers ((2, 2, 2), 1, N / 16), same registers
template <class Layout_>
SDPA_HOST_DEVICE auto wgmma_as_operand_a(const Layout_ &acc) {
  const auto l = logical_divide(get<0, 2>(acc), Layout<_2>{});  // (2, N / 16)
  return make_layout(make_layout(get<0, 0>(acc), get<0, 1>(acc), get<0>(l)), get<1>(acc), get<1>(l));
}

}  // namespace sdpa::fmha_fwd_sm90
