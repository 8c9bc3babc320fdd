// The policy sdpa::arch::Host under CuTe: a tiled multiplication that uses every operation of the policy.
//
//   C[64, 64] = A[64, 64] B[64, 64]      A row major, B row major (read transposed) or column major (read plainly)
//
// The operands go through swizzled shared memory with predicated cp.async, ldmatrix with and without .trans, and mma.
// Rows of A from num_rows on are not read and count as zero.
#include <cmath>
#include <limits>
#include <random>

#include "harness.hpp"
#include "sdpa/arch/host.hpp"

using namespace cute;
using namespace simt_test;
using Arch = sdpa::arch::Host;

namespace {

template <class Element>
struct GemmParams {
  const Element *a;
  const Element *b;
  float *c;
  int num_rows;
};

template <class Element, bool kTransposeB>
void gemm_kernel(const GemmParams<Element> params) {
  constexpr int kSize = 64;
  constexpr int kNWarps = 4;
  using Tile = Shape<_64, _64>;
  const int thread = Arch::thread_idx();
  const auto layout_swizzled = composition(Swizzle<3, 3, 3>{}, Layout<Tile, Stride<_64, _1>>{});
  const auto layout_transposed = composition(layout_swizzled, make_layout(Tile{}, LayoutRight{}));

  Element *const smem = reinterpret_cast<Element *>(Arch::dynamic_smem());
  Tensor gA = make_tensor(make_gmem_ptr(params.a), Tile{}, LayoutRight{});           // (M, K)
  Tensor gB = make_tensor(make_gmem_ptr(params.b), Tile{}, LayoutRight{});           // (K, N) or (N, K)
  Tensor gC = make_tensor(make_gmem_ptr(params.c), Tile{}, LayoutRight{});           // (M, N)
  Tensor sA = make_tensor(make_smem_ptr(smem), layout_swizzled);                     // (M, K)
  Tensor sB = make_tensor(make_smem_ptr(smem + kSize * kSize), layout_swizzled);     // as gB
  Tensor sBt = make_tensor(make_smem_ptr(smem + kSize * kSize), layout_transposed);  // transposed gB

  const auto copy_g2s = make_tiled_copy(Copy_Atom<typename Arch::CpAsync, Element>{},
                                        Layout<Shape<_16, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{});
  const auto thr_g2s = copy_g2s.get_slice(thread);
  Tensor tAgA = thr_g2s.partition_S(gA);                            // (8, M/16, 1)
  Tensor tAsA = thr_g2s.partition_D(sA);                            // (8, M/16, 1)
  Tensor tAcA = thr_g2s.partition_S(make_identity_tensor(Tile{}));  // (8, M/16, 1)
  for (int i = 0; i < size<1>(tAgA); ++i) {
    copy(copy_g2s.with(get<0>(tAcA(0, i, 0)) < params.num_rows), tAgA(_, i, _), tAsA(_, i, _));
  }
  copy(copy_g2s.with(true), thr_g2s.partition_S(gB), thr_g2s.partition_D(sB));
  Arch::cp_async_fence();
  Arch::cp_async_wait<0>();
  Arch::syncthreads();

  const auto mma = make_tiled_mma(typename Arch::MmaOp<Element>{}, Layout<Shape<Int<kNWarps>, _1, _1>>{},
                                  cute::Tile<_64, _16, _16>{});
  const auto thr_mma = mma.get_slice(thread);
  Tensor tCrA = thr_mma.partition_fragment_A(sA);
  Tensor tCrC = partition_fragment_C(mma, Tile{});
  const auto copy_a = make_tiled_copy_A(Copy_Atom<typename Arch::LdsmN, Element>{}, mma);
  copy(copy_a, copy_a.get_slice(thread).partition_S(sA), copy_a.get_slice(thread).retile_D(tCrA));
  clear(tCrC);
  if constexpr (kTransposeB) {
    Tensor tCrB = thr_mma.partition_fragment_B(sBt);
    const auto copy_b = make_tiled_copy_B(Copy_Atom<typename Arch::LdsmT, Element>{}, mma);
    copy(copy_b, copy_b.get_slice(thread).partition_S(sBt), copy_b.get_slice(thread).retile_D(tCrB));
    gemm(mma, tCrA, tCrB, tCrC);
  } else {
    Tensor tCrB = thr_mma.partition_fragment_B(sB);
    const auto copy_b = make_tiled_copy_B(Copy_Atom<typename Arch::LdsmN, Element>{}, mma);
    copy(copy_b, copy_b.get_slice(thread).partition_S(sB), copy_b.get_slice(thread).retile_D(tCrB));
    gemm(mma, tCrA, tCrB, tCrC);
  }
  copy(tCrC, thr_mma.partition_C(gC));
}

template <class Element, bool kTransposeB>
void check_gemm() {
  constexpr int kSize = 64;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<Element> a(kSize * kSize), b(kSize * kSize);
  for (Element &x : a) x = Element(normal(random));
  for (Element &x : b) x = Element(normal(random));
  for (const int num_rows : {64, 37}) {
    std::vector<float> c(kSize * kSize, std::numeric_limits<float>::quiet_NaN());
    const GemmParams<Element> params{a.data(), b.data(), c.data(), num_rows};
    CHECK_OK(Arch::launch(&gemm_kernel<Element, kTransposeB>, "gemm", 1, 128, int(2 * kSize * kSize * sizeof(Element)),
                          params, nullptr));
    for (int m = 0; m < kSize; ++m) {
      for (int n = 0; n < kSize; ++n) {
        double sum = 0;
        for (int k = 0; k < kSize; ++k) {
          const Element &right = b[size_t(kTransposeB ? k * kSize + n : n * kSize + k)];
          sum += m < num_rows ? double(float(a[size_t(m * kSize + k)])) * double(float(right)) : 0;
        }
        CHECK(std::fabs(sum - double(c[size_t(m * kSize + n)])) < 1e-4);
      }
    }
  }
}

}  // namespace

SIMT_CASE(policy_multiplies_f16) {
  check_gemm<cutlass::half_t, false>();
  check_gemm<cutlass::half_t, true>();
}

SIMT_CASE(policy_multiplies_bf16) {
  check_gemm<cutlass::bfloat16_t, false>();
  check_gemm<cutlass::bfloat16_t, true>();
}

SIMT_CASE(policy_has_the_other_operations) {
  static_assert(Arch::kIsHost);
  int num_done = 0;
  const auto kernel = [&] {
    CHECK(Arch::shfl_xor(float(Arch::thread_idx()), 2) == float(Arch::thread_idx() ^ 2));
    CHECK(Arch::any(Arch::thread_idx() % 32 == 7));
    Arch::syncwarp();
    Arch::sync_group(1 + Arch::thread_idx() / 32, 32);
    num_done += 1 + Arch::block_idx();
  };
  const Configured configured(0, 1);
  CHECK_OK(run_kernel(2, 64, 0, kernel));
  CHECK(num_done == 3 * 64);
}

SIMT_CASE(policy_exp2_flushes_subnormal_results) {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(Arch::exp2(0.0f) == 1.0f);
  CHECK(Arch::exp2(-3.0f) == 0.125f);
  CHECK(Arch::exp2(-126.0f) == std::numeric_limits<float>::min());
  CHECK(Arch::exp2(-126.5f) == 0.0f);
  CHECK(Arch::exp2(-infinity) == 0.0f);
  CHECK(Arch::exp2(infinity) == infinity);
  CHECK(std::isnan(Arch::exp2(std::numeric_limits<float>::quiet_NaN())));
}
