// From the C ABI to a fused backward kernel: may it run this problem, with which Params, and the registry row that says
// so. The only header that generated units of this family include.
#pragma once

#include "sdpa/fmha_bwd/launch.cuh"
#include "sdpa/fmha_bwd_fused/dq_convert.cuh"
#include "sdpa/fmha_bwd_fused/kernel.cuh"

namespace sdpa::fmha_bwd_fused {

// The sums of dQ take 4 bytes an element, twice as many as dQ itself, and of packed sequences as many for each as for the
// longest one. What would take more than this is left to fmha_bwd.
inline constexpr uint64_t kMaxWorkspaceBytes = uint64_t{8} << 30;

// | row statistics | sums of dQ, where it is asked for | turns | tickets |, each a multiple of 16 bytes but the last.
template <class Traits>
struct Workspace {
  uint64_t sums;  // where it begins, in bytes
  uint64_t turns;
  uint64_t tickets;
  uint64_t bytes;

  explicit Workspace(const sdpa_bwd_params &p) {
    const uint64_t rows =
        static_cast<uint64_t>(fmha_bwd::padded_rows(p.forward)) * p.forward.batch * p.forward.num_heads_q;
    sums = rows * sizeof(float2);
    turns = sums + (p.dq == nullptr ? 0 : rows * Traits::kHeadDim * sizeof(float));
    tickets = turns + rows / Traits::kBlockM * sizeof(uint32_t);
    bytes = tickets + sizeof(uint32_t);
  }
};

template <class Traits>
uint64_t workspace_bytes(const sdpa_bwd_params &p) {
  return Workspace<Traits>(p).bytes;
}

template <class Traits>
int64_t num_key_tiles(const sdpa_bwd_params &p) {
  return fmha_bwd::num_blocks(p.forward.seqlen_k, Traits::kBlockN) * p.forward.batch * p.forward.num_heads_kv;
}

template <class Traits>
int64_t num_row_tiles(const sdpa_bwd_params &p) {
  return fmha_bwd::padded_rows(p.forward) / Traits::kBlockM * p.forward.batch * p.forward.num_heads_q;
}

template <class Traits>
Status check(const sdpa_bwd_params &params) {
  const Status status = fmha_bwd::check<Traits>(params);
  if (!status.ok()) return status;
  const uint64_t bytes = workspace_bytes<Traits>(params);
  if (bytes > kMaxWorkspaceBytes)
    return make_status(SDPA_NOT_SUPPORTED, "the workspace has %llu bytes; a fused backward kernel takes at most %llu",
                       static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(kMaxWorkspaceBytes));
  const int64_t ctas = std::max(num_key_tiles<Traits>(params), num_row_tiles<Traits>(params));
  if (ctas > INT_MAX)
    return make_status(SDPA_NOT_SUPPORTED, "the problem makes %lld CTAs; one launch has at most %d",
                       static_cast<long long>(ctas), INT_MAX);
  return {};
}

template <class Traits>
Params to_params(const sdpa_bwd_params &given) {
  const sdpa_params &p = given.forward;
  Params params = {};
  static_cast<fmha_bwd::Params &>(params) = fmha_bwd::to_params<Traits>(given);
  const Workspace<Traits> workspace(given);
  char *const base = static_cast<char *>(p.workspace);
  params.dq_sums = reinterpret_cast<float4 *>(base + workspace.sums);
  params.turns = reinterpret_cast<uint32_t *>(base + workspace.turns);
  params.tickets = reinterpret_cast<uint32_t *>(base + workspace.tickets);
  params.num_m_blocks = params.padded_rows / Traits::kBlockM;
  params.m_blocks = cutlass::FastDivmod(params.num_m_blocks);
  // Heads take turns whose Q, dO and sums of dQ fit the L2 cache together.
  const int64_t row_bytes = Traits::kHeadDim * static_cast<int64_t>(4 + sizeof(float));
  params.key_scheduler =
      TileScheduler::make(static_cast<int>(fmha_bwd::num_blocks(p.seqlen_k, Traits::kBlockN)), p.batch, p.num_heads_kv,
                          p.num_heads_kv, row_bytes * p.seqlen_q * params.heads_per_kv);
  return params;
}

// A compiled function and what it was compiled for.
template <class Traits_, void (*kKernel_)(Params)>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
};

// Prepare's kernel, then Main's and, where dQ is asked for, Convert's.
template <class Main, class Convert, class Prepare>
Status launch(const sdpa_bwd_params &p, void *stream) {
  using Traits = typename Main::Traits;
  using Arch = typename Traits::Arch;
  const Params params = to_params<Traits>(p);
  const char *const name = Traits::kFacts.name;
  const int64_t heads = int64_t{p.forward.batch} * p.forward.num_heads_q;
  Status status = Arch::launch(Prepare::kKernel, name, heads * params.statistics_ctas.divisor, Traits::kThreads,
                               /*smem_bytes=*/0, params, stream);
  if (status.ok())
    status = Arch::launch(Main::kKernel, name, num_key_tiles<Traits>(p), Traits::kThreads, Traits::kSmemBytes, params,
                          stream);
  if (status.ok() && p.dq != nullptr)
    status = Arch::launch(Convert::kKernel, name, num_row_tiles<Traits>(p), Traits::kThreads,
                          DqConvert<Traits>::kSmemBytes, params, stream);
  return status;
}

// What a kernel takes that has these Traits: the same that the generator says of it.
template <class Traits>
constexpr uint64_t takes() {
  return (Traits::kHasDropout ? SDPA_TAKES_DROPOUT : SDPA_TAKES_UNDROPPED) | SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL |
         SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED | SDPA_TAKES_SMALLER_HEAD_DIM | SDPA_TAKES_WINDOW | SDPA_TAKES_SINKS;
}

template <class Main, class Convert, class Prepare, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename Main::Traits;
  static_assert(Traits::kFacts.op == SDPA_OP_BACKWARD);
  static_assert(Traits::kFacts.takes == takes<Traits>(), "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.check_backward = check<Traits>;
  row.backward_workspace_bytes = workspace_bytes<Traits>;
  row.backward = launch<Main, Convert, Prepare>;
  row.functions[0] = reinterpret_cast<const void *>(Main::kKernel);
  row.functions[1] = reinterpret_cast<const void *>(Convert::kKernel);
  row.functions[2] = reinterpret_cast<const void *>(Prepare::kKernel);
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_bwd_fused
