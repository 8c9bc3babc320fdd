// From the C ABI to the two launches of a quantised problem on sm_90: may this kernel run it, with which Params, and the
// registry row that says so. The only header that generated units of this family include.
#pragma once

#include <climits>

#include "sdpa/arch/target_sm90.hpp"
#include "sdpa/fmha_fwd_q8/launch.cuh"
#include "sdpa/fmha_fwd_q8_sm90/kernel.cuh"

namespace sdpa::fmha_fwd_q8_sm90 {

// All blocks of the workspace.
template <class Traits>
int64_t num_blocks(const sdpa_params &p) {
  const auto workspace = fmha_fwd_q8::Workspace::make<Traits::kMath, Traits::kHeadDim>(p);
  const int64_t heads = int64_t{p.num_heads_kv} * (p.cu_seqlens_k != nullptr ? 1 : p.batch);
  return heads * workspace.blocks_per_head;
}

template <class Traits>
Status can_implement(const sdpa_params &p) {
  const Status status = fmha_fwd_q8::can_implement<Traits>(p);
  if (!status.ok()) return status;
  if (const int64_t blocks = num_blocks<Traits>(p); blocks > INT_MAX)
    return make_status(SDPA_NOT_SUPPORTED,
                       "batch %d, num_heads_kv %d and seqlen_k %d make %lld blocks of %d keys; this kernel takes at "
                       "most %d",
                       p.batch, p.num_heads_kv, p.seqlen_k, static_cast<long long>(blocks), Traits::kBlockN, INT_MAX);
  return {};
}

// Boxes of a block's K or V: `rows` of `columns` bytes, from `offset` bytes behind the block's first on.
template <class Traits>
Status make_map(typename Traits::TensorMap &map, const char *name, const char *blocks, int64_t num_blocks, int offset,
                int columns, int rows) {
  constexpr uint64_t kBlockBytes = Traits::Block::kBytes;
  const uint64_t extents[4] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows),
                               static_cast<uint64_t>(num_blocks > 1 ? num_blocks : 1), 1};
  const uint64_t strides[3] = {static_cast<uint64_t>(columns), kBlockBytes, kBlockBytes};
  const uint32_t box[4] = {static_cast<uint32_t>(columns), static_cast<uint32_t>(rows), 1, 1};
  return Traits::Arch::make_tensor_map(map, name, 1, /*is_bf16=*/false, blocks + offset, 4, extents, strides, box,
                                       columns);
}

template <class Traits>
Status set_maps(typename Traits::Params &params, const sdpa_params &p) {
  const int64_t blocks = num_blocks<Traits>(p);
  const Status status =
      make_map<Traits>(params.map_k, "k", params.blocks, blocks, 0, Traits::kSwizzleBytesK, Traits::kBlockN);
  if (!status.ok()) return status;
  return make_map<Traits>(params.map_v, "v", params.blocks, blocks, Traits::Block::kV, Traits::kSwizzleBytesV,
                          Traits::kHeadDim);
}

// `Pass` makes the bytes of K and V, unless they are there already. Without q nothing attends to them yet.
template <class Pass, class Function>
Status launch(const sdpa_params &p, void *stream) {
  using Traits = typename Function::Traits;
  using Pre = fmha_fwd_q8::Quantize<Traits>;
  auto params = fmha_fwd_q8::to_params<Traits>(p);
  Status status;
  if (p.q != nullptr) status = set_maps<Traits>(params, p);
  if (status.ok() && p.quantized == nullptr)
    status = Traits::Arch::launch(Pass::kKernel, Traits::kFacts.name, fmha_fwd_q8::num_quantized_tiles<Traits>(p),
                                  Pre::kThreads, Pre::kSmemBytes, params, stream);
  if (!status.ok() || p.q == nullptr) return status;
  return Traits::Arch::launch(Function::kKernel, Traits::kFacts.name, fmha_fwd_q8::num_ctas<Traits>(p),
                              Traits::kThreads, Traits::kSmemBytes, params, stream);
}

// What a kernel of this family takes: the same that the generator says of it.
inline constexpr uint64_t kTakes = SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL | SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED |
                                   SDPA_TAKES_UNDROPPED | SDPA_TAKES_SMALLER_HEAD_DIM | SDPA_TAKES_WINDOW |
                                   SDPA_TAKES_SINKS;

template <class Pass, class Function, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename Function::Traits;
  using Pre = fmha_fwd_q8::Quantize<Traits>;
  static_assert(Traits::kFacts.takes == kTakes, "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  static_assert(Traits::kFacts.accuracy == SDPA_ACCURACY_INT8,
                "the generator and the kernel disagree on how exact it is");
  static_assert(Traits::kThreads >= Pre::kThreads && Traits::kSmemBytes >= Pre::kSmemBytes,
                "a row says one number of threads, and one of bytes");
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.can_implement = can_implement<Traits>;
  row.workspace_bytes = fmha_fwd_q8::workspace_bytes<Traits>;
  row.launch = launch<Pass, Function>;
  row.functions[0] = reinterpret_cast<const void *>(Function::kKernel);
  row.functions[1] = reinterpret_cast<const void *>(Pass::kKernel);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_fwd_q8_sm90
