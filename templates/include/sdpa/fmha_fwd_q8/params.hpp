// What the two launches of one quantised problem receive: what general kernels of attention do, and where the workspace
// holds the quantised keys and values. `Workspace` divides it; the kernels know nothing else of its layout.
//
//   blocks     [heads, blocks]: what `BlockLayout` says of 64 keys
//   k_scale    f32 [heads, blocks, 4]: of the keys 16 i + 4 l + {0, 1, 2, 3} of a block, l = 0 ... 3
//   k_mean     f32 [batch, num_heads_kv, kHeadDim]: what was subtracted from every key
//
// `heads` counts batch and key heads, `blocks` those that seqlen_k takes, or total_k where a workspace is kept for later
// launches and has room for more keys. Packed sequences share one batch, and sequence b starts at block
// first_row_k / 64 + b: so none overlaps another, whatever the lengths are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sdpa/arch/target.hpp"
#include "sdpa/attention/params.hpp"
#include "sdpa/attention/sequence.cuh"
#include "sdpa/c_api.h"

namespace sdpa::fmha_fwd_q8 {

inline constexpr int kBlock = 64;  // keys that share a block: of the attention's loop, of groups, of zero tokens

// int8_qk: Q Kᵀ of bytes, P V of the input type. int8: both of bytes.
enum class Math { kInt8Qk, kInt8 };

// A block of keys in the workspace, as a stage of attention's shared memory holds it, but not swizzled:
//
//   K̂          s8 [kHeadDim / kCols, 64, kCols]: row r is key KeyOrder(r) of the block (kernel_traits.cuh)
//   V̂          s8 [kHeadDim, 64], transposed; this and all below for int8 alone
//   log2 st    f32 [64]: of a token's scale st
//   1 / st     f32 [64]: times kInverseUnit; negative where the 16 tokens 16 i + 4 l + {0, 1, 2, 3} share one st, for each l
template <Math kMath, int kHeadDim>
struct BlockLayout {
  static constexpr int kCols = kHeadDim % 128 == 0 ? 128 : kHeadDim % 64 == 0 ? 64 : 32;
  static constexpr int kTile = kBlock * kHeadDim;  // bytes, like all below
  static constexpr int kV = kTile;
  static constexpr int kLog2 = 2 * kTile;
  static constexpr int kInverse = kLog2 + kBlock * static_cast<int>(sizeof(float));
  static constexpr int kBytes = kMath == Math::kInt8 ? kInverse + kBlock * static_cast<int>(sizeof(float)) : kTile;
};

struct QuantizedParams : GeneralParams {
  char *blocks;
  float *k_scale;
  float *k_mean;
  int32_t blocks_per_head;
  int32_t num_heads_kv;
  int32_t key_blocks;  // that seqlen_k has at most

  SDPA_DEVICE bool is_packed() const { return lengths_k.cu_seqlens != nullptr; }

  // Of all heads in the workspace, the one that holds a sequence's keys, and the block of it where they start.
  SDPA_DEVICE int head(int bidb, int bidh_kv) const { return is_packed() ? bidh_kv : bidb * num_heads_kv + bidh_kv; }
  SDPA_DEVICE int first_block(const Sequence &sequence, int bidb) const {
    return is_packed() ? static_cast<int>(sequence.first_row_k / kBlock) + bidb : 0;
  }

  // Counted over all heads.
  SDPA_DEVICE int64_t block(int head, int block) const { return int64_t{head} * blocks_per_head + block; }
};

// Where the CTAs that share a tile's keys meet: as SplitParams, by fmha_fwd/split.cuh.
struct SplitQuantizedParams : QuantizedParams {
  cutlass::FastDivmod heads_per_kv;
  cutlass::FastDivmod m_blocks;  // the scheduler counts m_blocks of all splits
  int32_t num_splits;
  float *partial_out;     // [tiles][num_splits][kBlockM][kHeadDim]
  float2 *partial_stats;  // [tiles][num_splits][kBlockM]: row_max in log2 units, row_sum
  uint32_t *arrivals;     // [tiles], zero before and after a launch
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Offsets of the parts of the workspace, in bytes, and its size.
struct Workspace {
  int32_t blocks_per_head;
  uint64_t k_scale, k_mean, bytes;

  template <Math kMath, int kHeadDim>
  static Workspace make(const sdpa_params &p) {
    constexpr uint64_t kAlignment = 256;
    const bool is_packed = p.cu_seqlens_k != nullptr;
    const int64_t blocks = is_packed ? int64_t{p.total_k} / kBlock + p.batch + 1
                                     : ceil_div(p.total_k > 0 ? p.total_k : p.seqlen_k, kBlock);
    const auto heads = static_cast<uint64_t>(is_packed ? p.num_heads_kv : int64_t{p.num_heads_kv} * p.batch);
    const uint64_t of_all = heads * static_cast<uint64_t>(blocks);
    Workspace w;
    w.blocks_per_head = static_cast<int32_t>(blocks);
    uint64_t end = 0;
    const auto take = [&](uint64_t bytes) {
      const uint64_t begin = end;
      end += (bytes + kAlignment - 1) / kAlignment * kAlignment;
      return begin;
    };
    take(of_all * BlockLayout<kMath, kHeadDim>::kBytes);
    w.k_scale = take(of_all * 4 * sizeof(float));
    w.k_mean = take(static_cast<uint64_t>(p.batch) * static_cast<uint64_t>(p.num_heads_kv) * kHeadDim * sizeof(float));
    w.bytes = end;
    return w;
  }
};

}  // namespace sdpa::fmha_fwd_q8
