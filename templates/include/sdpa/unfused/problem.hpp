// What both targets must agree on about one problem of the piped baseline: which keys a row sees, the workspace, the
// precision of what lies in it, and what is refused. No kernel and no launch here.
//
// Workspace: logits [batch * num_heads_q, seqlen_q, ld], ld = seqlen_k rounded up to 8; P overwrites them in place.
//   Logits are fp16 for both input types: half the traffic of fp32, eight times the precision of bf16. When the caller
//   wants softmax_lse they are fp32, because fp16 logits move an LSE by up to 2^-12 of the largest one, which is more
//   than its tolerance of 1e-4. Logits beyond fp16's range count as +-65504.
//   P is fp16 for both input types: rounding a probability to bf16 alone costs up to 2^-9 of the output, more than the
//   1e-3 that the project's numerics rule grants. So the second GEMM of bf16 inputs is an fp16 one: V becomes fp16 on
//   its way to the tensor cores (exact for 2^-14 <= |v| <= 65504; beyond 65504 the output is inf or NaN).
//   P is stored times 2^15, and the second GEMM multiplies by 2^-15: fp16 then keeps 11 bits down to p = 2e-9.
#pragma once

#include <cutlass/cutlass.h>

#include <climits>
#include <cstdint>

#include "sdpa/attention/checks.hpp"
#include "sdpa/registry.hpp"

namespace sdpa::unfused {

inline constexpr float kProbsScale = 32768.f;
inline constexpr float kMaxHalf = 65504.f;
inline constexpr int kMaxSeqlen = INT_MAX - 1024;

CUTLASS_HOST_DEVICE constexpr int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
CUTLASS_HOST_DEVICE constexpr int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Which keys the rows of one head see: always the first ones.
struct KeyRange {
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t is_causal;
  int32_t causal_offset;

  // Keys seen by at least one of the rows [0, row_end).
  CUTLASS_HOST_DEVICE int keys_seen_before(int row_end) const {
    if (!is_causal) return seqlen_k;
    const int64_t seen = int64_t{row_end} + causal_offset;
    return seen < 0 ? 0 : seen > seqlen_k ? seqlen_k : static_cast<int>(seen);
  }

  CUTLASS_HOST_DEVICE int keys_seen_by(int row) const { return keys_seen_before(row + 1); }

  // Depth of the second GEMM for a tile of block_m rows: what its last row sees, rounded up to whole steps, but never
  // a key that no query sees, whose V may hold NaN.
  CUTLASS_HOST_DEVICE int depth_of_tile(int m_block, int block_m, int block_k) const {
    const int row_end = (m_block + 1) * block_m < seqlen_q ? (m_block + 1) * block_m : seqlen_q;
    const int64_t depth = round_up(keys_seen_before(row_end), block_k);
    const int all = keys_seen_before(seqlen_q);
    return depth < all ? static_cast<int>(depth) : all;
  }
};

inline KeyRange key_range(const sdpa_params &p) { return {p.seqlen_q, p.seqlen_k, p.is_causal, p.causal_offset}; }

inline bool has_wide_logits(const sdpa_params &p) { return p.softmax_lse != nullptr; }

// Elements from one row of logits to the next.
inline int64_t logits_ld(const sdpa_params &p) { return round_up(p.seqlen_k, kVectorElements); }

// Bytes. Depends on whether softmax_lse is null.
inline uint64_t workspace_bytes(const sdpa_params &p) {
  const uint64_t rows = uint64_t(p.batch) * uint64_t(p.num_heads_q) * uint64_t(p.seqlen_q);
  return rows * uint64_t(logits_ld(p)) * (has_wide_logits(p) ? 4 : 2);
}

template <int kBlockM, int kBlockN>
Status can_implement(const sdpa_params &p) {
  struct {
    const char *name;
    int value;
    int most;
  } const sizes[] = {{"batch", p.batch, INT_MAX},
                     {"num_heads_q", p.num_heads_q, INT_MAX},
                     {"num_heads_kv", p.num_heads_kv, INT_MAX},
                     {"seqlen_q", p.seqlen_q, kMaxSeqlen},
                     {"seqlen_k", p.seqlen_k, kMaxSeqlen}};
  for (const auto &size : sizes) {
    if (size.value < 1 || size.value > size.most)
      return make_status(SDPA_INVALID_ARGUMENT, "%s is %d; it must be between 1 and %d", size.name, size.value,
                         size.most);
  }
  if (p.num_heads_q % p.num_heads_kv != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "num_heads_q is %d; it must be a multiple of num_heads_kv, %d",
                       p.num_heads_q, p.num_heads_kv);
  const double heads = double(p.batch) * p.num_heads_q;
  const double rows = heads * p.seqlen_q;
  const double tiles = heads * double(ceil_div(p.seqlen_q, kBlockM)) * double(ceil_div(p.seqlen_k, kBlockN));
  if (rows > INT_MAX || tiles > INT_MAX)
    return make_status(SDPA_NOT_SUPPORTED,
                       "batch %d, num_heads_q %d, seqlen_q %d, seqlen_k %d make %.0f rows and %.0f tiles of %dx%d; "
                       "the unfused baseline allows %d of each",
                       p.batch, p.num_heads_q, p.seqlen_q, p.seqlen_k, rows, tiles, kBlockM, kBlockN, INT_MAX);
  const int extent_q[3] = {p.batch, p.num_heads_q, p.seqlen_q};
  const int extent_kv[3] = {p.batch, p.num_heads_kv, p.seqlen_k};
  Status status = check_tensor("q", p.q, p.q_stride, extent_q);
  if (status.ok()) status = check_tensor("k", p.k, p.k_stride, extent_kv);
  if (status.ok()) status = check_tensor("v", p.v, p.v_stride, extent_kv);
  if (status.ok()) status = check_tensor("out", p.out, p.out_stride, extent_q);
  return status;
}

inline Status check_workspace(const sdpa_params &p) {
  const uint64_t needed = workspace_bytes(p);
  if (p.workspace == nullptr || p.workspace_bytes < needed)
    return make_status(SDPA_INVALID_ARGUMENT, "workspace: %llu bytes at %p; this problem needs %llu%s",
                       static_cast<unsigned long long>(p.workspace_bytes), p.workspace,
                       static_cast<unsigned long long>(needed),
                       has_wide_logits(p) ? " (softmax_lse doubles it: ask after setting that)" : "");
  if (reinterpret_cast<uintptr_t>(p.workspace) % 16 != 0)
    return make_status(SDPA_INVALID_ARGUMENT, "workspace: address %p must be a multiple of 16 bytes", p.workspace);
  return {};
}

}  // namespace sdpa::unfused
