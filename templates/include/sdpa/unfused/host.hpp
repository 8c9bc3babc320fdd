// The baseline on the host target: CUTLASS's host reference GEMM -> softmax in plain C++ -> reference GEMM, with the
// same strides, causal rule, LSE and roundings as the kernels: logits are rounded to the workspace's type, P to fp16,
// and bf16 values of V to fp16. It checks the pipeline's arithmetic and interface, not the CUDA kernels' code, and its
// speed means nothing. Heads run on as many OS threads as the fiber engine is set to use.
#pragma once

#include <cuda_fp16.h>

// CUTLASS's conversions name these intrinsics in templates that are never instantiated here; only nvcc declares them.
int __dp4a(int a, int b, int c);
unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector);
__half2 __hfma2(__half2 a, __half2 b, __half2 c);

#include <cutlass/numeric_types.h>
#include <cutlass/util/reference/host/gett.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cute/tensor.hpp>
#include <new>
#include <system_error>
#include <thread>
#include <type_traits>
#include <vector>

#include "sdpa/arch/simt/launch.hpp"
#include "sdpa/unfused/problem.hpp"

namespace sdpa::unfused::host {

// CUDA's conversion: on the host, that of cutlass::half_t rounds subnormals twice and shifts past the sign bit.
inline cutlass::half_t to_half(float x) { return cutlass::half_t(__float2half_rn(x)); }

// [rows, cols, 1] in the layout that CUTLASS's reference expects.
template <class Element>
auto matrix(Element *data, int rows, int cols, int64_t row_stride, int64_t col_stride) {
  return cute::make_tensor(
      data, cute::make_layout(cute::make_shape(rows, cols, 1), cute::make_stride(row_stride, col_stride, int64_t{0})));
}

// D [m, n] = alpha * A [m, k] B [n, k]ᵀ. There is no C: its null pointer keeps D's old contents, NaN maybe, out.
template <class TensorA, class TensorB, class TensorD>
void gemm(float alpha, const TensorA &a, const TensorB &b, const TensorD &d) {
  namespace reference = cutlass::reference::host;
  const TensorD no_c = cute::make_tensor(typename TensorD::iterator(nullptr), d.layout());
  const reference::GettMainloopParams<float, TensorA, TensorB> mainloop(a, b);
  const reference::GettEpilogueParams<float, float, float, float, TensorD, TensorD> epilogue(alpha, 0.f, no_c, d);
  reference::Gett(mainloop, epilogue);
}

// Works on one head after another; each OS thread has its own.
template <class Element, class Logit>
class HeadWorker {
 public:
  explicit HeadWorker(const sdpa_params &p)
      : p_(p),
        keys_(key_range(p)),
        num_keys_(keys_.keys_seen_before(p.seqlen_q)),
        ld_(logits_ld(p)),
        row_(size_t(num_keys_)),
        v_(size_t(num_keys_) * p.head_dim) {}

  void run(int64_t bidbh) {
    const int64_t bidb = bidbh / p_.num_heads_q;
    const int64_t bidh = bidbh % p_.num_heads_q;
    const int64_t bidh_kv = bidh / (p_.num_heads_q / p_.num_heads_kv);
    const int m = p_.seqlen_q;
    const int d = p_.head_dim;
    auto *const q = head<Element>(p_.q, p_.q_stride, bidb, bidh);
    auto *const k = head<Element>(p_.k, p_.k_stride, bidb, bidh_kv);
    auto *const out = head<Element>(p_.out, p_.out_stride, bidb, bidh);
    Logit *const logits = static_cast<Logit *>(p_.workspace) + bidbh * m * ld_;
    auto *const probs = reinterpret_cast<cutlass::half_t *>(logits);
    const int64_t probs_ld = ld_ * int64_t(sizeof(Logit) / sizeof(cutlass::half_t));

    gemm(p_.softmax_scale, matrix(q, m, d, p_.q_stride[2], 1), matrix(k, num_keys_, d, p_.k_stride[2], 1),
         matrix(logits, m, num_keys_, ld_, 1));
    for (int row = 0; row < m; ++row) {
      const float lse = softmax(logits + row * ld_, keys_.keys_seen_by(row), probs + row * probs_ld);
      if (p_.softmax_lse != nullptr) p_.softmax_lse[bidb * p_.lse_stride[0] + bidh * p_.lse_stride[1] + row] = lse;
    }
    const auto *const v = head<Element>(p_.v, p_.v_stride, bidb, bidh_kv);
    for (int j = 0; j < num_keys_; ++j) {
      for (int i = 0; i < d; ++i) v_[size_t(j) * d + i] = to_half(float(v[j * p_.v_stride[2] + i]));
    }
    gemm(1.f / kProbsScale, matrix(probs, m, num_keys_, probs_ld, 1), matrix(v_.data(), d, num_keys_, 1, d),
         matrix(out, m, d, p_.out_stride[2], 1));
  }

 private:
  template <class T>
  static T *head(const void *data, const int64_t *stride, int64_t bidb, int64_t bidh) {
    return static_cast<T *>(const_cast<void *>(data)) + bidb * stride[0] + bidh * stride[1];
  }

  // One row of logits becomes one row of P, which may lie where the logits do. Returns the row's LSE.
  float softmax(const Logit *logits, int seen, cutlass::half_t *probs) {
    float row_max = -INFINITY;
    for (int j = 0; j < seen; ++j) {
      float x = float(logits[j]);
      if (std::is_same_v<Logit, cutlass::half_t> && std::isinf(x)) x = std::copysign(kMaxHalf, x);
      row_[size_t(j)] = x;
      row_max = std::max(row_max, x);
    }
    if (row_max == -INFINITY) row_max = 0.f;
    float row_sum = 0.f;
    for (int j = 0; j < seen; ++j) {
      row_[size_t(j)] = std::exp(row_[size_t(j)] - row_max);
      row_sum += row_[size_t(j)];
    }
    const float factor = row_sum == 0.f ? 0.f : kProbsScale / row_sum;
    for (int j = 0; j < num_keys_; ++j) probs[j] = to_half(j < seen ? row_[size_t(j)] * factor : 0.f);
    return row_sum == 0.f ? -INFINITY : row_max + std::log(row_sum);
  }

  const sdpa_params &p_;
  KeyRange keys_;
  int num_keys_;  // that at least one query sees
  int64_t ld_;
  std::vector<float> row_;          // [num_keys]
  std::vector<cutlass::half_t> v_;  // [num_keys, head_dim]
};

template <class Element, class Logit>
Status run(const sdpa_params &p) {
  const int64_t num_heads = int64_t{p.batch} * p.num_heads_q;
  std::atomic<int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto work = [&] {
    try {
      HeadWorker<Element, Logit> worker(p);
      for (int64_t bidbh = next++; bidbh < num_heads; bidbh = next++) worker.run(bidbh);
    } catch (const std::bad_alloc &) {
      out_of_memory = true;
    }
  };
  const int set = simt::settings.num_threads.load();
  const int64_t threads = std::min<int64_t>(set > 0 ? set : int64_t{std::thread::hardware_concurrency()}, num_heads);
  std::vector<std::thread> helpers;
  try {
    for (int64_t i = 1; i < threads; ++i) helpers.emplace_back(work);
  } catch (const std::system_error &) {
    // Fewer helpers then; the calling thread always works.
  }
  work();
  for (std::thread &helper : helpers) helper.join();
  if (out_of_memory)
    return make_status(SDPA_NOT_SUPPORTED, "the unfused baseline is out of memory for seqlen_k %d, head_dim %d",
                       p.seqlen_k, p.head_dim);
  return {};
}

template <class Element>
Status launch(const sdpa_params &p, void * /*stream*/) {
  const Status status = check_workspace(p);
  if (!status.ok()) return status;
  return has_wide_logits(p) ? run<Element, float>(p) : run<Element, cutlass::half_t>(p);
}

}  // namespace sdpa::unfused::host
