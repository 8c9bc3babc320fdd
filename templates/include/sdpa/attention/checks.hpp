// What every family asks of a tensor before it launches anything. A refusal names the tensor, what it was and what is
// allowed. What a family asks of sizes is in its can_implement.
#pragma once

#include <climits>
#include <cstdint>

#include "sdpa/registry.hpp"

namespace sdpa {

inline constexpr int kVectorBytes = 16;                   // what loads and stores move at a time
inline constexpr int kVectorElements = kVectorBytes / 2;  // of a 16-bit type

// Strides are in elements; that of an axis of extent 1 may be anything.
inline Status check_tensor(const char *name, const void *data, const int64_t (&stride)[3], const int (&extent)[3]) {
  if (reinterpret_cast<uintptr_t>(data) % kVectorBytes != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "%s: address %p must be a multiple of %d bytes", name, data,
                       kVectorBytes);
  static const char *const kAxis[3] = {"batch", "head", "row"};
  for (int i = 0; i < 3; ++i) {
    if (extent[i] > 1 && stride[i] % kVectorElements != 0)
      return make_status(SDPA_INVALID_ARGUMENT, "%s: %s stride %lld must be a multiple of %d elements", name, kAxis[i],
                         static_cast<long long>(stride[i]), kVectorElements);
  }
  return {};
}

// Batches, heads and rows of q and out, and of k and v. Packed sequences lie one behind the other in a single batch.
struct Extents {
  int q[3];
  int kv[3];

  explicit Extents(const sdpa_params &p)
      : q{p.cu_seqlens_q ? 1 : p.batch, p.num_heads_q, p.cu_seqlens_q ? p.total_q : p.seqlen_q},
        kv{p.cu_seqlens_k ? 1 : p.batch, p.num_heads_kv, p.cu_seqlens_k ? p.total_k : p.seqlen_k} {}
};

inline Status check_operands(const sdpa_params &p) {
  const Extents extents(p);
  Status status = check_tensor("q", p.q, p.q_stride, extents.q);
  if (status.ok()) status = check_tensor("k", p.k, p.k_stride, extents.kv);
  if (status.ok()) status = check_tensor("v", p.v, p.v_stride, extents.kv);
  if (status.ok()) status = check_tensor("out", p.out, p.out_stride, extents.q);
  return status;
}

inline constexpr int kMaxSplits = 1024;  // of a tile: many times what pays

// Of a split kernel, for which this problem makes `num_tiles`.
inline Status check_split(const sdpa_params &p, int64_t num_tiles) {
  if (p.num_splits < 1 || p.num_splits > kMaxSplits)
    return make_status(SDPA_INVALID_ARGUMENT, "num_splits is %d; this kernel takes 1 to %d", p.num_splits, kMaxSplits);
  if (p.num_splits > 1 && num_tiles > SDPA_MAX_SPLIT_TILES)
    return make_status(SDPA_NOT_SUPPORTED, "num_splits is %d with %lld tiles; more than 1 split takes at most %d tiles",
                       p.num_splits, static_cast<long long>(num_tiles), SDPA_MAX_SPLIT_TILES);
  return {};
}

// Of one whose tiles, of `block_m` rows, hold those of all query heads of a key head.
inline Status check_packed_heads(const sdpa_params &p, int block_m) {
  if (int64_t{p.seqlen_q} * (p.num_heads_q / p.num_heads_kv) > INT_MAX - 2 * block_m)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d times %d query heads to a key head must be below 2^31 - 256",
                       p.seqlen_q, p.num_heads_q / p.num_heads_kv);
  return {};
}

}  // namespace sdpa
