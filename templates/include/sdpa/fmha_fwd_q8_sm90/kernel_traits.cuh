// Everything that a quantised kernel of sm_90 knows at compile time: one config in, every layout, MMA and barrier out.
//
// A CTA has one warpgroup that loads and kConsumers that compute, 64 query rows each. Shared memory, in bytes:
//
//   | K kStages x (64 x kHeadDim) | V kStages x (kHeadDim x 64) | O kBlockM x kHeadDim, two bytes an element
//   | scales of kStages blocks | barriers |
//
// K and V lie as the workspace has them, swizzled by TMA. Both are the K-major operand that wgmma of bytes asks for: V was
// transposed when it became bytes. Q and P are operands in registers, and lie there as those of m16n8k32 do, so
// fmha_fwd_q8/kernel_traits.cuh says why P needs no shuffle.
#pragma once

#include <cute/tensor.hpp>

#include <cutlass/numeric_types.h>

#include "sdpa/arch/target_sm90.hpp"
#include "sdpa/fmha_fwd_q8/kernel_traits.cuh"
#include "sdpa/fmha_fwd_q8_sm90/params.hpp"
#include "sdpa/fmha_fwd_sm90/kernel_traits.cuh"

namespace sdpa::fmha_fwd_q8_sm90 {

using namespace cute;
using fmha_fwd_sm90::kMaxSmemBytes;
using fmha_fwd_sm90::kWarpgroup;
using fmha_fwd_sm90::kWarpgroupRows;

// Config: Arch, Element, kHeadDim, kBlockM, kBlockN, kStages, kMath.
template <class Config>
struct KernelTraits : Config {
  using Config::kBlockM;
  using Config::kBlockN;
  using Config::kHeadDim;
  using Config::kMath;
  using Config::kStages;
  using typename Config::Arch;
  using typename Config::Element;
  using TensorMap = typename Arch::TensorMap;
  using Params = fmha_fwd_q8_sm90::Params<TensorMap>;
  using Block = fmha_fwd_q8::BlockLayout<kMath, kHeadDim>;

  static constexpr int kConsumers = kBlockM / kWarpgroupRows;  // warpgroups
  static constexpr int kThreads = kWarpgroup * (kConsumers + 1);
  static constexpr int kCtasPerSm = 1;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kLaunchRegisters = kConsumers == 3 ? 128 : 168;
  static_assert(kConsumers * kConsumerRegisters + kProducerRegisters <= (kConsumers + 1) * kLaunchRegisters);

  static_assert(sizeof(Element) == 2);
  static_assert(kMath == fmha_fwd_q8::Math::kInt8, "both products are of bytes");
  static_assert(kConsumers == 2 || kConsumers == 3, "2 or 3 consumer warpgroups");
  static_assert(kStages >= 2, "Q Kᵀ of a block is queued before P V of the one ahead has read its stage");
  static_assert(kBlockN == fmha_fwd_q8::kBlock, "what K and V have scales for goes by blocks of 64 keys");
  static_assert(kHeadDim == 64 || kHeadDim == 128, "a row of K or O is one box, and one instruction");

  // What the shared parts of attention/, fmha_fwd/ and fmha_fwd_q8/ ask.
  static constexpr bool kIsGeneral = true;
  static constexpr bool kIsSplit = false;
  static constexpr bool kQuantizesV = true;
  static constexpr bool kHasMask = false;
  static constexpr bool kHasBias = false;
  static constexpr bool kHasDropout = false;
  static constexpr bool kMayBeCausal = true;
  static constexpr bool kMayHaveWindow = true;
  static constexpr bool kShiftsO = false;
  static constexpr bool kSumsStartAtMagic = false;  // one instruction makes a float of a sum
  static constexpr bool kAddsLate = true;           // P V of a block meets O behind the softmax of the next one
  static constexpr int kMmaM = 1;
  static constexpr int kRowsPerThread = 2;
  static constexpr int kNWarps = kThreads / 32 - kWarpgroup / 32;  // that compute
  static constexpr int kWarpsM = kNWarps;
  SDPA_DEVICE static int head_dim_v(const Params &params) { return params.head_dim_v; }
  SDPA_DEVICE static int position(const Params &, int row) { return row; }
  SDPA_DEVICE static int64_t row_offset(const Params &, const TensorRef &tensor, int64_t row) {
    return row * tensor.row_stride;
  }
  SDPA_DEVICE static WorkTile work_tile(const Params &params, int block_idx) {
    if (params.is_causal) return params.scheduler.template tile<true, kHasMask, CausalOrder::kLongestFirst>(block_idx);
    return params.scheduler.template tile<false, kHasMask, CausalOrder::kLongestFirst>(block_idx);
  }
  // A thread's index among those that compute.
  SDPA_DEVICE static int row_thread_again() { return Arch::thread_idx_again() - kWarpgroup; }
  SDPA_DEVICE static void sync_before_out() {}  // O has room of its own

  using KeyOrder = fmha_fwd_q8::BlockKeyOrder;

  // ---- shared memory ----
  static constexpr int kTileBytes = Block::kTile;  // of K, and of V
  static constexpr int kSwizzleBytesK = Block::kCols;
  static constexpr int kSwizzleBytesV = kBlockN;
  template <int kBytes>
  using Atom = std::conditional_t<kBytes == 128, GMMA::Layout_K_SW128_Atom<int8_t>, GMMA::Layout_K_SW64_Atom<int8_t>>;
  using SmemLayoutK =
      decltype(tile_to_shape(Atom<kSwizzleBytesK>{}, Shape<Int<kBlockN>, Int<kHeadDim>, Int<kStages>>{}));
  using SmemLayoutVt =
      decltype(tile_to_shape(Atom<kSwizzleBytesV>{}, Shape<Int<kHeadDim>, Int<kBlockN>, Int<kStages>>{}));
  static constexpr int kSmemCols = 64;  // of an atom of O

  struct SharedStorage {
    alignas(1024) int8_t k[kStages][kTileBytes];
    int8_t v[kStages][kTileBytes];
    Element out[kBlockM * kHeadDim];
    struct alignas(128) {
      float v_log2[kBlockN], v_inverse[kBlockN];  // of tokens, as the workspace has them
      float k[4];                                 // of groups of keys
    } scales[kStages];
    // Of a block. full: one arrival and the bytes of the copies. empty: one arrival of every warp that reads.
    uint64_t full[kStages], empty[kStages];
  };
  static constexpr int kScaleBytesV = Block::kBytes - Block::kLog2;
  static constexpr int kScaleBytesK = 16;
  static constexpr int kOffsetO = 2 * kStages * kTileBytes;
  static constexpr int kSmemBytes = static_cast<int>(sizeof(SharedStorage));
  static_assert(kSmemBytes <= kMaxSmemBytes, "sm_90 gives one CTA at most 227 KB of shared memory");
  static_assert(kTileBytes % 1024 == 0, "every tile starts where its swizzle does");

  // ---- MMA ----
  using MmaQK = decltype(make_tiled_mma(SM90::GMMA::MMA_64x64x32_S32S8S8_RS_TN{}));
  using MmaPV = decltype(make_tiled_mma(std::conditional_t<kHeadDim == 64, SM90::GMMA::MMA_64x64x32_S32U8S8_RS_TN,
                                                           SM90::GMMA::MMA_64x128x32_S32U8S8_RS_TN>{}));
};

}  // namespace sdpa::fmha_fwd_q8_sm90
