// The three launches of one call on the CUDA target: QkGemm -> softmax -> PvGemm, on the caller's stream. Nothing is
// allocated and nothing waits, so a call can be captured in a CUDA graph.
// The whole problem goes through each step at once. Pieces whose logits stay in L2 would not fill a large GPU: at
// seqlen 2048, 40 MB of fp16 logits are five heads, 80 CTAs of the second GEMM at block_m 128; an H200 has 132 SMs.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "sdpa/unfused/gemm.cuh"
#include "sdpa/unfused/softmax.cuh"

namespace sdpa::unfused {

inline Status cuda_status(const char *what, cudaError_t error) {
  return make_status(SDPA_CUDA_ERROR, "%s: %s: %s", what, cudaGetErrorName(error), cudaGetErrorString(error));
}

// Allows `kernel` its shared memory on the current device, once per device and per set of flags.
inline Status allow_smem(const void *kernel, int bytes, int device, std::atomic<uint64_t> &done) {
  const uint64_t flag = device < 64 ? uint64_t{1} << device : 0;
  if (bytes <= 48 * 1024 || (done.load(std::memory_order_relaxed) & flag) != 0) return {};
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return cuda_status("raising the unfused GEMM's shared memory limit", error);
  done.fetch_or(flag, std::memory_order_relaxed);
  return {};
}

template <class Gemm>
Status launch_gemm(const char *what, const GemmParams<Gemm> &params, int64_t num_heads_total, int device,
                   cudaStream_t stream) {
  static_assert(sizeof(GemmSharedStorage<Gemm>) == Gemm::kTile.smem_bytes(),
                "tile.hpp and CUTLASS disagree about shared memory");
  static std::atomic<uint64_t> smem_allowed{0};
  const int bytes = static_cast<int>(sizeof(GemmSharedStorage<Gemm>));
  const Status status = allow_smem(reinterpret_cast<const void *>(&unfused_gemm<Gemm>), bytes, device, smem_allowed);
  if (!status.ok()) return status;
  const int64_t grid = int64_t{params.m_tiles} * params.n_tiles * num_heads_total;
  unfused_gemm<Gemm><<<static_cast<unsigned>(grid), 32 * Gemm::kTile.warps(), bytes, stream>>>(params);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : cuda_status(what, error);
}

template <class Logit, int kThreadsPerRow, int kVectors>
void launch_softmax_rows(const SoftmaxParams &params, cudaStream_t stream) {
  constexpr int kThreads = softmax_cta_threads(kThreadsPerRow);
  const int64_t grid = ceil_div(params.num_rows, kThreads / kThreadsPerRow);
  unfused_softmax<Logit, kThreadsPerRow, kVectors><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(params);
}

template <class Logit>
Status launch_softmax(const SoftmaxParams &params, cudaStream_t stream) {
  const int longest = params.keys.keys_seen_before(params.keys.seqlen_q);
  if (longest <= 256) {
    launch_softmax_rows<Logit, 32, 1>(params, stream);
  } else if (longest <= 512) {
    launch_softmax_rows<Logit, 32, 2>(params, stream);
  } else if (longest <= 1024) {
    launch_softmax_rows<Logit, 32, 4>(params, stream);
  } else if (longest <= 2048) {
    launch_softmax_rows<Logit, 128, 2>(params, stream);
  } else if (longest <= 4096) {
    launch_softmax_rows<Logit, 256, 2>(params, stream);
  } else if (longest <= 8192) {
    launch_softmax_rows<Logit, 256, 4>(params, stream);
  } else {
    unfused_softmax_long<Logit><<<static_cast<unsigned>(params.num_rows), kLongRowThreads, 0, stream>>>(params);
  }
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status{} : cuda_status("launching the unfused softmax", error);
}

template <sdpa_dtype kDtype, int kHeadDim, int kBlockM, int kBlockN, int kStages, int kNWarps>
struct Pipeline {
  static BatchedMatrix matrix(const void *data, const int64_t (&stride)[3]) {
    return {const_cast<void *>(data), stride[0], stride[1], stride[2]};
  }

  // [batch, num_heads_q, seqlen_q, ld] in elements of `bytes` bytes: the workspace as logits, or as P at the start of
  // each row of logits.
  static BatchedMatrix workspace(const sdpa_params &p, int bytes) {
    const int64_t ld = logits_ld(p) * (has_wide_logits(p) ? 4 : 2) / bytes;
    return {p.workspace, int64_t{p.num_heads_q} * p.seqlen_q * ld, p.seqlen_q * ld, ld};
  }

  template <int kN>
  static Status launch_pv(const sdpa_params &p, int device, cudaStream_t stream) {
    using Gemm = PvGemm<kDtype, kBlockM, kN, kNWarps>;
    const GemmParams<Gemm> params(p, workspace(p, 2), matrix(p.v, p.v_stride), matrix(p.out, p.out_stride), kHeadDim,
                                  p.seqlen_k, 1.f / kProbsScale);
    return launch_gemm<Gemm>("launching the unfused P V", params, int64_t{p.batch} * p.num_heads_q, device, stream);
  }

  // Columns of the second GEMM's tile: all of head_dim, fewer when that leaves multiprocessors idle.
  static int choose_pv_n(const sdpa_params &p, int num_sms) {
    int n = widest_pv_n(kHeadDim);
    const int64_t row_tiles = ceil_div(p.seqlen_q, pv_tile(kBlockM, n, kNWarps).block_m) * p.batch * p.num_heads_q;
    while (n > 32 && row_tiles * ceil_div(kHeadDim, n) < num_sms) n /= 2;
    return n;
  }

  template <bool kWideLogits>
  static Status run(const sdpa_params &p, int device, int pv_n, cudaStream_t stream) {
    using Gemm = QkGemm<kDtype, kWideLogits, kBlockM, kBlockN, kStages, kNWarps>;
    const BatchedMatrix logits = workspace(p, kWideLogits ? 4 : 2);
    const GemmParams<Gemm> qk(p, matrix(p.q, p.q_stride), matrix(p.k, p.k_stride), logits, p.seqlen_k, kHeadDim,
                              p.softmax_scale);
    const int64_t num_heads_total = int64_t{p.batch} * p.num_heads_q;
    Status status = launch_gemm<Gemm>("launching the unfused Q K^T", qk, num_heads_total, device, stream);
    if (!status.ok()) return status;

    const GemmTile tile = pv_tile(kBlockM, pv_n, kNWarps);
    const SoftmaxParams softmax = {p.workspace,
                                   logits.ld,
                                   p.softmax_lse,
                                   p.lse_stride[0],
                                   p.lse_stride[1],
                                   key_range(p),
                                   static_cast<int32_t>(num_heads_total * p.seqlen_q),
                                   p.num_heads_q,
                                   tile.block_m,
                                   tile.block_k};
    status = launch_softmax<std::conditional_t<kWideLogits, float, __half>>(softmax, stream);
    if (!status.ok()) return status;

    if constexpr (widest_pv_n(kHeadDim) >= 128) {
      if (pv_n == 128) return launch_pv<128>(p, device, stream);
    }
    if constexpr (widest_pv_n(kHeadDim) >= 64) {
      if (pv_n == 64) return launch_pv<64>(p, device, stream);
    }
    return launch_pv<32>(p, device, stream);
  }

  static Status launch(const sdpa_params &p, void *stream) {
    const Status status = check_workspace(p);
    if (!status.ok()) return status;
    int device = 0;
    int num_sms = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return cuda_status("reading the current device", error);
    const int pv_n = choose_pv_n(p, num_sms);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    return has_wide_logits(p) ? run<true>(p, device, pv_n, cuda_stream) : run<false>(p, device, pv_n, cuda_stream);
  }
};

}  // namespace sdpa::unfused
