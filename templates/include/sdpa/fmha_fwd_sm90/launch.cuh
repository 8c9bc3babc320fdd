// From the C ABI to an sm_90 kernel: may it run this problem, with which Params, and the registry row that says so.
// The only header that generated units of this family include.
#pragma once

#include <climits>
#include <numeric>

#include "sdpa/arch/target_sm90.hpp"
#include "sdpa/attention/checks.hpp"
#include "sdpa/attention/set_params.hpp"
#include "sdpa/fmha_fwd/launch.cuh"
#include "sdpa/fmha_fwd_sm90/kernel.cuh"
#include "sdpa/registry.hpp"

namespace sdpa::fmha_fwd_sm90 {

// A cluster computes one at a time.
template <class Traits>
int64_t num_tiles(const sdpa_params &p) {
  constexpr int kRows = ClusterTile<Traits>::kBlockM;
  return (int64_t{p.seqlen_q} + kRows - 1) / kRows * p.batch * p.num_heads_q;
}

// What a tensor map can say of a tensor: strides are positive, but for heads and batches of inputs that are broadcast.
inline Status check_tensor_map(const char *name, const void *data, const int64_t (&stride)[3], const int (&extent)[3],
                               bool is_input = true) {
  const Status status = check_tensor(name, data, stride, extent);
  if (!status.ok()) return status;
  static const char *const kAxis[3] = {"batch", "head", "row"};
  constexpr int64_t kMaxStride = int64_t{1} << 39;  // elements: 2^40 bytes
  for (int i = 0; i < 3; ++i) {
    const bool may_be_0 = is_input && i < 2;
    if (extent[i] > 1 && (stride[i] < (may_be_0 ? 0 : 1) || stride[i] >= kMaxStride))
      return make_status(
          SDPA_NOT_SUPPORTED,
          "%s: %s stride %lld; this kernel takes positive strides below 2^39 elements, and of q, k and v 0 "
          "for heads and batches",
          name, kAxis[i], static_cast<long long>(stride[i]));
  }
  return {};
}

// Bytes of a step of a ragged map's fourth dimension, and of a row; those of axes of extent 1 do not count.
struct RaggedBytes {
  int64_t step;
  int64_t row;
  int64_t batch;

  RaggedBytes(const int64_t (&stride)[3], const int (&extent)[3], int64_t element_bytes)
      : row(extent[2] > 1 ? stride[2] * element_bytes : kVectorBytes),
        batch(extent[0] > 1 ? stride[0] * element_bytes : 0) {
    step = std::gcd(row, batch);
  }
  // Steps to the end of the last sequence.
  int64_t last(const int (&extent)[3]) const { return extent[2] * (row / step) + (extent[0] - 1) * (batch / step); }
};

inline Status check_ragged_map(const char *name, const int64_t (&stride)[3], const int (&extent)[3],
                               int64_t element_bytes) {
  const RaggedBytes bytes(stride, extent, element_bytes);
  if (bytes.row < kRaggedWrap && bytes.last(extent) < INT_MAX) return {};
  return make_status(
      SDPA_NOT_SUPPORTED,
      "%s: strides %lld of batches and %lld of rows; a general kernel of this family takes rows below 2^34 "
      "elements, and fewer than 2^31 steps of their common divisor in all",
      name, static_cast<long long>(stride[0]), static_cast<long long>(stride[2]));
}

template <class Traits>
Status can_implement(const sdpa_params &p) {
  if (p.seqlen_q > INT_MAX - 2 * Traits::kBlockM || p.seqlen_k > INT_MAX - 2 * Traits::kBlockN)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d must be below 2^31 - 512", p.seqlen_q,
                       p.seqlen_k);
  if constexpr (Traits::kIsSplit) {
    const Status status = check_split(p, num_tiles<Traits>(p));
    if (!status.ok()) return status;
  }
  if (num_tiles<Traits>(p) > INT_MAX / Traits::kCluster)
    return make_status(
        SDPA_NOT_SUPPORTED, "batch %d, num_heads_q %d and seqlen_q %d make %lld CTAs; one launch has at most %d",
        p.batch, p.num_heads_q, p.seqlen_q, static_cast<long long>(num_tiles<Traits>(p) * Traits::kCluster), INT_MAX);
  if (Traits::kIsGeneral && int64_t{p.seqlen_q} + p.seqlen_k > kRaggedRows - 2 * Traits::kBlockM)
    return make_status(SDPA_NOT_SUPPORTED, "seqlen_q %d and seqlen_k %d: a general kernel takes sums below 2^30 - 384",
                       p.seqlen_q, p.seqlen_k);
  const Extents extents(p);
  Status status = check_tensor_map("q", p.q, p.q_stride, extents.q);
  if (status.ok()) status = check_tensor_map("k", p.k, p.k_stride, extents.kv);
  if (status.ok()) status = check_tensor_map("v", p.v, p.v_stride, extents.kv);
  if (status.ok()) status = check_tensor_map("out", p.out, p.out_stride, extents.q, /*is_input=*/false);
  if constexpr (Traits::kIsGeneral) {
    constexpr int64_t kBytes = sizeof(typename Traits::Element);
    if (status.ok()) status = check_ragged_map("q", p.q_stride, extents.q, kBytes);
    if (status.ok()) status = check_ragged_map("k", p.k_stride, extents.kv, kBytes);
    if (status.ok()) status = check_ragged_map("v", p.v_stride, extents.kv, kBytes);
    if (status.ok()) status = check_ragged_map("out", p.out_stride, extents.q, kBytes);
  }
  return status;
}

// Boxes of kSmemCols columns and `rows` rows.
template <class Traits>
Status make_map(typename Traits::Arch::TensorMap &map, Steps &steps, const char *name, const void *data, int head_dim,
                const int64_t (&stride)[3], const int (&extent)[3], int rows) {
  constexpr uint64_t kBytes = sizeof(typename Traits::Element);
  steps = {stride[1] != 0, stride[0] != 0};
  // A map has no empty axis; what is never loaded may have any extent.
  const auto at_least_1 = [](int value) { return static_cast<uint64_t>(value > 1 ? value : 1); };
  const uint64_t extents[4] = {at_least_1(head_dim), at_least_1(extent[2]), steps.head ? at_least_1(extent[1]) : 1,
                               steps.batch ? at_least_1(extent[0]) : 1};
  uint64_t strides[3];
  for (int i = 0; i < 3; ++i)
    strides[i] = extents[i + 1] > 1 ? static_cast<uint64_t>(stride[2 - i]) * kBytes : kVectorBytes;
  const uint32_t box[4] = {Traits::kSmemCols, static_cast<uint32_t>(rows), 1, 1};
  constexpr bool kIsBf16 = std::is_same_v<typename Traits::Element, cutlass::bfloat16_t>;
  return Traits::Arch::make_tensor_map(map, name, kBytes, kIsBf16, data, 4, extents, strides, box,
                                       Traits::kSwizzleBytes);
}

inline bool has_left_end(const sdpa_params &p) { return p.has_window && p.window_left >= 0; }

// Whether CTAs of a general kernel may take tiles in turn: how long these are is known, and a window is short. Next to
// the end of the keys it is cut, and longer ones are dealt out better by the hardware.
template <class Traits>
bool takes_turns(const sdpa_params &p) {
  constexpr int64_t kShortWindow = 2048;
  if (!Traits::kTakesTurns || p.seqlens_q || p.seqlens_k || p.cu_seqlens_q || p.cu_seqlens_k) return false;
  if (!has_left_end(p)) return p.is_causal || !p.has_window || p.window_right < 0;
  if (!p.is_causal && p.window_right < 0) return false;
  return int64_t{p.window_left} + (p.is_causal ? 0 : p.window_right) + Traits::kBlockM <= kShortWindow;
}

// Which CTAs, or clusters, take which tiles, of `at_once` that run together. Causal kernels of either kind take heads by
// sections.
template <class Traits>
void set_grid(typename Traits::Params &params, const sdpa_params &p, int64_t at_once) {
  const int64_t heads = int64_t{p.batch} * p.num_heads_q;
  const int64_t heads_per_kv = p.num_heads_q / p.num_heads_kv;
  const int64_t kv_bytes_per_head = int64_t{4} * params.seqlen_k * Traits::kHeadDim;
  params.num_tiles = params.num_ctas = static_cast<uint32_t>(num_tiles<Traits>(p));
  params.num_tiles_of_whole_heads = 0;
  if (Traits::kIsCausal && takes_whole_heads(heads, heads_per_kv, kv_bytes_per_head, params.seqlen_k, at_once)) {
    params.num_ctas = static_cast<uint32_t>(at_once);
    set_sections(params.scheduler, heads, at_once);
    params.num_tiles_of_whole_heads =
        static_cast<uint32_t>(heads / at_once * at_once) * static_cast<uint32_t>(params.scheduler.num_m_blocks);
    return;
  }
  if constexpr (Traits::kMayBeCausal) make_sections(params.scheduler, heads, heads_per_kv, kv_bytes_per_head, at_once);
  if (!Traits::kIsGeneral || takes_turns<Traits>(p)) {
    const bool is_triangle = Traits::kIsCausal || (Traits::kIsGeneral && p.is_causal && !has_left_end(p));
    params.num_ctas = num_ctas<Traits>(params.num_tiles, static_cast<uint32_t>(at_once), params.seqlen_k, is_triangle);
  }
}

// A ragged one: see GeneralParams.
template <class Traits>
Status make_ragged_map(typename Traits::Arch::TensorMap &map, Steps &steps, RaggedSteps &ragged, const char *name,
                       const void *data, int head_dim, const int64_t (&stride)[3], const int (&extent)[3],
                       int box_rows) {
  constexpr uint64_t kBytes = sizeof(typename Traits::Element);
  const RaggedBytes bytes(stride, extent, kBytes);
  steps = {extent[1] > 1 && stride[1] != 0, 0};
  ragged = {static_cast<int32_t>(bytes.row / bytes.step), static_cast<int32_t>(bytes.batch / bytes.step)};
  const uint64_t extents[5] = {static_cast<uint64_t>(head_dim), kRaggedRows,
                               steps.head ? static_cast<uint64_t>(extent[1]) : 1,
                               static_cast<uint64_t>(bytes.last(extent)) + 1, uint64_t{kRaggedRows} + 1};
  const uint64_t strides[4] = {static_cast<uint64_t>(bytes.row),
                               steps.head ? static_cast<uint64_t>(stride[1]) * kBytes : kVectorBytes,
                               static_cast<uint64_t>(bytes.step), static_cast<uint64_t>(kRaggedWrap - bytes.row)};
  const uint32_t box[5] = {Traits::kSmemCols, static_cast<uint32_t>(box_rows), 1, 1, 1};
  constexpr bool kIsBf16 = std::is_same_v<typename Traits::Element, cutlass::bfloat16_t>;
  return Traits::Arch::make_tensor_map(map, name, kBytes, kIsBf16, data, 5, extents, strides, box,
                                       Traits::kSwizzleBytes);
}

// ---- what is found of a boolean mask ahead of the kernel ----

// It pays where several heads share a mask of more than a few blocks, which 16 bytes at a time can be read of.
template <class Traits>
bool may_find_mask_blocks(const sdpa_params &p) {
  constexpr int kMinKeys = 4 * Traits::kBlockN;
  const bool is_shared = p.num_heads_q > 1 && p.mask_stride[1] == 0;
  const int64_t strides = (p.batch > 1 ? p.mask_stride[0] : 0) | (p.seqlen_q > 1 ? p.mask_stride[2] : 0);
  return static_cast<MaskType>(p.mask_type) == MaskType::kBool && is_shared && p.seqlen_k >= kMinKeys &&
         p.mask_stride[3] == 1 && (strides | p.seqlen_k) % 16 == 0;
}

template <class Traits>
MaskBlocksRef mask_blocks(const sdpa_params &p) {
  MaskBlocksRef ref = {};
  ref.words = static_cast<uint4 *>(p.workspace);
  ref.groups = ceil_div(ceil_div(p.seqlen_k, Traits::kBlockN), kBlocksOfAGroup);
  ref.tiles_per_mask = ceil_div(p.seqlen_q, Traits::kBlockM);
  ref.tiles_per_batch = p.batch > 1 && p.mask_stride[0] != 0 ? ref.tiles_per_mask : 0;
  return ref;
}

// A CTA finds those of one.
inline int64_t num_mask_groups(const MaskBlocksRef &ref, int batch) {
  return int64_t{ref.groups} * ref.tiles_per_mask * (ref.tiles_per_batch > 0 ? batch : 1);
}

template <class Traits>
uint64_t workspace_bytes(const sdpa_params &p) {
  if (!may_find_mask_blocks<Traits>(p)) return 0;
  return static_cast<uint64_t>(num_mask_groups(mask_blocks<Traits>(p), p.batch)) * sizeof(uint4);
}

// ---- parts of a split kernel ----

template <class Traits>
int64_t num_part_rows(const sdpa_params &p) {
  return num_tiles<Traits>(p) * p.num_splits * Traits::kBlockM;
}

template <class Traits>
uint64_t split_workspace_bytes(const sdpa_params &p) {
  if (p.num_splits <= 1) return 0;
  return static_cast<uint64_t>(num_part_rows<Traits>(p)) * (Traits::kHeadDim * sizeof(float) + sizeof(float2));
}

template <class Traits>
void set_splits(typename Traits::Params &params, const sdpa_params &p) {
  params.num_splits = cutlass::FastDivmod(p.num_splits);
  params.num_tiles = params.num_ctas = params.num_tiles * static_cast<uint32_t>(p.num_splits);
  params.partial_out = static_cast<float *>(p.workspace);
  params.partial_stats = reinterpret_cast<float2 *>(params.partial_out + num_part_rows<Traits>(p) * Traits::kHeadDim);
}

template <class Traits>
Status to_general_params(typename Traits::Params &params, const sdpa_params &p) {
  set_general_params<Traits>(params, p);
  if constexpr (Traits::kHasMask) params.mask = to_mask(p, Traits::kMaskRun);
  if constexpr (Traits::kLeavesBlocksOut) {
    const bool is_aligned = reinterpret_cast<uintptr_t>(p.mask) % 16 == 0;
    if (p.workspace != nullptr && is_aligned && may_find_mask_blocks<Traits>(p))
      params.mask_blocks = mask_blocks<Traits>(p);
  }
  if constexpr (Traits::kHasBias) {  // it meets scores that were scaled, with their sign
    params.softmax_scale_log2 = kLog2e;
    params.mask.scores_scale = p.softmax_scale;
    params.negate_q = 0;
  }
  if constexpr (Traits::kHasDropout) params.dropout = to_dropout(p);
  const Extents extents(p);
  Steps step_out;
  Status status = make_ragged_map<Traits>(params.map_q, params.step_q, params.ragged_q, "q", p.q, p.head_dim,
                                          p.q_stride, extents.q, kWarpgroupRows);
  if (status.ok())
    status = make_ragged_map<Traits>(params.map_k, params.step_k, params.ragged_k, "k", p.k, p.head_dim, p.k_stride,
                                     extents.kv, Traits::kBlockN);
  if (status.ok())
    status = make_ragged_map<Traits>(params.map_v, params.step_v, params.ragged_v, "v", p.v, p.head_dim_v, p.v_stride,
                                     extents.kv, Traits::kBlockN);
  if (status.ok())
    status = make_ragged_map<Traits>(params.map_out, step_out, params.ragged_out, "out", p.out, p.head_dim_v,
                                     p.out_stride, extents.q, kWarpRows);
  set_grid<Traits>(params, p, Traits::Arch::num_sms());
  if constexpr (Traits::kIsSplit) set_splits<Traits>(params, p);
  if (Traits::kHasMask && p.mask_stride[0] == 0 && p.mask_stride[1] != 0) params.scheduler.take_batches_first(p.batch);
  return status;
}

template <class Traits>
Status to_params(typename Traits::Params &params, const sdpa_params &p) {
  set_params<ClusterTile<Traits>>(params, p);
  const int extent_q[3] = {p.batch, p.num_heads_q, p.seqlen_q};
  // Keys that no row sees are outside of their maps: 0 times the NaN that they may hold would be NaN.
  const int extent_kv[3] = {p.batch, p.num_heads_kv, params.seqlen_k};
  Steps step_out;
  Status status =
      make_map<Traits>(params.map_q, params.step_q, "q", p.q, p.head_dim, p.q_stride, extent_q, kWarpgroupRows);
  if (status.ok())
    status =
        make_map<Traits>(params.map_k, params.step_k, "k", p.k, p.head_dim, p.k_stride, extent_kv, Traits::kRowsOfLoad);
  if (status.ok())
    status = make_map<Traits>(params.map_v, params.step_v, "v", p.v, p.head_dim_v, p.v_stride, extent_kv,
                              Traits::kRowsOfLoad);
  if (status.ok())
    status = make_map<Traits>(params.map_out, step_out, "out", p.out, p.head_dim_v, p.out_stride, extent_q, kWarpRows);
  const int64_t at_once = int64_t{Traits::Arch::num_sms()} * Traits::kCtasPerSm / Traits::kCluster;
  set_grid<Traits>(params, p, std::max<int64_t>(at_once, 1));
  return status;
}

// A compiled function, what it was compiled for, and another one that the problem may ask for: ahead of a kernel for
// boolean masks the one that finds their blocks, behind a split kernel the one that merges parts.
template <class Traits_, void (*kKernel_)(typename Traits_::Params),
          void (*kOther_)(typename Traits_::Params) = nullptr>
struct Function {
  using Traits = Traits_;
  static constexpr auto kKernel = kKernel_;
  static constexpr auto kOther = kOther_;
};

template <class Function>
Status launch_function(const sdpa_params &p, void *stream) {
  using Traits = typename Function::Traits;
  typename Traits::Params params;
  Status status;
  if constexpr (Traits::kIsGeneral) {
    params = {};
    status = to_general_params<Traits>(params, p);
  } else {
    status = to_params<Traits>(params, p);
  }
  if constexpr (Traits::kLeavesBlocksOut) {
    if (status.ok() && params.mask_blocks.words != nullptr)
      status =
          Traits::Arch::launch(Function::kOther, Traits::kFacts.name, num_mask_groups(params.mask_blocks, p.batch),
                               Traits::kThreads, sizeof(typename MaskBlocks<Traits>::SharedStorage), params, stream);
  }
  if (!status.ok()) return status;
  status = Traits::Arch::template launch_clusters<Traits::kCluster>(
      Function::kKernel, Traits::kFacts.name, params.num_ctas, Traits::kThreads, Traits::kSmemBytes, params, stream);
  if constexpr (Traits::kIsSplit) {
    if (status.ok() && p.num_splits > 1)
      status = Traits::Arch::launch_early(Function::kOther, Traits::kFacts.name,
                                          num_tiles<Traits>(p) * SplitMerge<Traits>::kCtasPerTile, Traits::kThreads,
                                          params, stream);
  }
  return status;
}

// Launches the function for the problem's kind of mask.
template <class Function, class... Others>
Status launch(const sdpa_params &p, void *stream) {
  if (mask_kind(static_cast<MaskType>(p.mask_type)) == Function::Traits::kMask)
    return launch_function<Function>(p, stream);
  if constexpr (sizeof...(Others) > 0) {
    return launch<Others...>(p, stream);
  } else {
    return make_status(SDPA_NOT_SUPPORTED, "mask_type %d: %s takes no such mask", p.mask_type,
                       Function::Traits::kFacts.name);
  }
}

// What a kernel of these functions takes: the same that the generator says of it.
template <class Traits, class... Others>
constexpr uint64_t takes() {
  uint64_t bits = SDPA_TAKES_SMALLER_HEAD_DIM | (Traits::kHasDropout ? SDPA_TAKES_DROPOUT : SDPA_TAKES_UNDROPPED);
  if constexpr (!Traits::kIsGeneral) return bits | (Traits::kIsCausal ? SDPA_TAKES_CAUSAL : SDPA_TAKES_FULL);
  bits |= SDPA_TAKES_FULL | SDPA_TAKES_CAUSAL | SDPA_TAKES_LENGTHS | SDPA_TAKES_PACKED | SDPA_TAKES_WINDOW |
          SDPA_TAKES_SINKS;
  if (Traits::kIsSplit) bits |= SDPA_TAKES_SPLITS;
  for (const MaskKind mask : {Traits::kMask, Others::Traits::kMask...}) {
    if (mask == MaskKind::kBool) bits |= SDPA_TAKES_BOOL;
    if (mask == MaskKind::kBias16) bits |= SDPA_TAKES_BIAS16;
    if (mask == MaskKind::kBias32) bits |= SDPA_TAKES_BIAS32;
  }
  return bits;
}

// One function for each kind of mask that the kernel takes, no mask first; their Traits differ in kMask alone, and add
// kFacts to KernelTraits.
template <class First, class... Others, int kNumDetails>
KernelRow make_row(const sdpa_detail (&details)[kNumDetails]) {
  using Traits = typename First::Traits;
  static_assert(sizeof...(Others) + (sizeof...(Others) > 0 || Traits::kIsSplit) < kMaxFunctions);
  static_assert(Traits::kFacts.takes == takes<Traits, Others...>(),
                "the generator and the kernel disagree on what it takes");
  static_assert(Traits::kFacts.head_dim == Traits::kHeadDim);
  KernelRow row = sdpa::make_row(Traits::kFacts, details);
  row.info.smem_bytes = Traits::kSmemBytes;
  row.info.ctas_per_sm = Traits::kCtasPerSm;
  row.can_implement = can_implement<Traits>;
  row.workspace_bytes = Traits::kIsSplit ? split_workspace_bytes<Traits> : workspace_bytes<Traits>;
  row.is_workspace_optional = !Traits::kIsSplit;
  row.launch = launch<First, Others...>;
  row.functions[0] = reinterpret_cast<const void *>(First::kKernel);
  int index = 1;
  ((row.functions[index++] = reinterpret_cast<const void *>(Others::kKernel)), ...);
  const void *const others[] = {reinterpret_cast<const void *>(First::kOther),
                                reinterpret_cast<const void *>(Others::kOther)...};
  for (const void *function : others)
    if (function != nullptr) row.functions[index++] = function;
  row.threads = Traits::kThreads;
  return row;
}

}  // namespace sdpa::fmha_fwd_sm90
