// What every family asks of a tensor before it launches anything. A refusal names the tensor, what it was and what is
// allowed. What a family asks of sizes is in its can_implement.
#pragma once

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

}  // namespace sdpa
