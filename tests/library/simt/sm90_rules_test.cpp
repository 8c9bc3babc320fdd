// Every rule of async_rules.hpp that a kernel can break ends its launch with the right message, in every schedule, and
// the block then runs what breaks none.
#include <type_traits>

#include "sm90_operands.hpp"

using namespace sdpa::simt;
using namespace simt_test;
using namespace simt_test::sm90;

namespace {

template <class Body>
void check_broken(const char *text, const Body &body) {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const Configured configured(seed);
    CHECK_BROKEN_RULE(run_kernel(1, kThreads, kSmemBytes, body), text);
    CHECK_OK(run_kernel(1, kThreads, kSmemBytes, [] {
      bring_operands();
      float d[kN / 2];
      wgmma_fence();
      multiply_operands(d);
      wgmma_commit();
      wgmma_wait<0>();
    }));
  }
}

}  // namespace

SIMT_CASE(an_accumulator_is_not_written_in_flight) {
  check_broken("an accumulator of lane 0 was written while it was in flight", [] {
    bring_operands();
    float d[kN / 2];
    wgmma_fence();
    multiply_operands(d);
    wgmma_commit();
    d[3] = 1.f;
    wgmma_wait<0>();
  });
}

SIMT_CASE(a_in_registers_is_not_written_in_flight) {
  check_broken("A was written in registers of lane 0 while it was in flight", [] {
    bring_operands();
    float d[kN / 2];
    uint32_t a[4] = {};
    wgmma_fence();
    wgmma<Half, false, kN>(d, a, descriptor(kOffsetB, 0, 256, 32), true);
    wgmma_commit();
    a[2] = 1;
    wgmma_wait<0>();
  });
}

SIMT_CASE(wgmma_needs_a_fence_behind_the_last_group) {
  check_broken("the warp has had no wgmma_fence since its last group", [] {
    bring_operands();
    float d[kN / 2];
    wgmma_fence();
    multiply_operands(d);
    wgmma_commit();
    multiply_operands(d, kOffsetB, false);
  });
}

// In program order copies land when nobody else can run, so what does not wait for them is always found.
SIMT_CASE(wgmma_waits_for_its_operands) {
  CHECK_BROKEN_RULE(run_kernel(1, kThreads, kSmemBytes,
                               [] {
                                 static const TensorMap map = kB.map(16, kN);
                                 bring_operands();
                                 if (thread_idx() == 0) {
                                   expect(barrier(1), kN * 32);
                                   load(map, dynamic_smem() + kOffsetB + 2048, 0, 0, barrier(1));
                                 }
                                 syncthreads();
                                 float d[kN / 2];
                                 wgmma_fence();
                                 multiply_operands(d, kOffsetB + 2048);
                                 wgmma_commit();
                                 wgmma_wait<0>();
                                 wait(barrier(1), 0);
                               }),
                    "where a tma_load has not landed");
}

SIMT_CASE(a_buffer_is_not_filled_while_wgmma_reads_it) {
  check_broken("which a wgmma of warp 0 in flight reads", [] {
    static const TensorMap map = kB.map(16, kN);
    bring_operands();
    float d[kN / 2];
    wgmma_fence();
    multiply_operands(d);
    wgmma_commit();
    if (thread_idx() == 0) {
      expect(barrier(1), kN * 32);
      load(map, dynamic_smem() + kOffsetB, 0, 0, barrier(1));
    }
    wgmma_wait<0>();
    wait(barrier(1), 0);
  });
}

SIMT_CASE(the_warps_of_a_warpgroup_issue_the_same) {
  check_broken("of a warpgroup issue different instructions", [] {
    bring_operands();
    float d[kN / 2];
    wgmma_fence();
    multiply_operands(d, thread_idx() < 96 ? kOffsetB : kOffsetB + 256);
    wgmma_commit();
    wgmma_wait<0>();
  });
}

SIMT_CASE(an_operand_starts_where_its_swizzle_does) {
  check_broken("an operand does not start at a multiple of 8 swizzled rows", [] {
    bring_operands();
    float d[kN / 2];
    wgmma_fence();
    multiply_operands(d, kOffsetB + 64);
    wgmma_commit();
    wgmma_wait<0>();
  });
}

SIMT_CASE(a_thread_does_not_exit_with_wgmma_in_flight) {
  check_broken("exits with 1 wgmma in flight", [] {
    bring_operands();
    float d[kN / 2];
    wgmma_fence();
    multiply_operands(d);
    wgmma_commit();
  });
}

SIMT_CASE(a_store_reads_what_was_fenced) {
  static uint16_t out[64 * 16];
  const uint64_t extent[2] = {16, 64}, stride[1] = {32};
  const uint32_t box[2] = {16, 8};
  static TensorMap map;
  CHECK_OK(make_tensor_map(map, "out", 2, out, 2, extent, stride, box, 32));
  const auto store = [](bool is_fenced, bool is_waited_for, bool writes_again) {
    return [=] {
      const int lane = thread_idx() % 32;
      char *const row = dynamic_smem() + thread_idx() / 32 * 512 + lane % 8 * 32 + lane / 8 % 2 * 16 + lane / 16 * 256;
      stmatrix({1, 2, 3, 4}, row);
      if (is_fenced) async().fence(thread_idx());
      syncwarp();
      if (lane == 0) {
        async().store(*current_block, map, dynamic_smem() + thread_idx() / 32 * 512, {0, thread_idx() / 4, 0, 0, 0});
        async().commit_stores(*current_block);
      }
      syncwarp();
      if (writes_again) stmatrix({5, 6, 7, 8}, row);
      if (lane == 0 && is_waited_for) async().wait_stores(*current_block, 0);
    };
  };
  CHECK_OK(run_kernel(1, kThreads, kSmemBytes, store(true, true, false)));
  check_broken("has had no fence_async_proxy since it wrote there", store(false, true, false));
  check_broken("exits before its TMA store has read byte", store(true, false, false));
  check_broken("has not read yet", store(true, true, true));
}

SIMT_CASE(an_mbarrier_counts_arrivals_and_bytes) {
  static const TensorMap map = kB.map(16, kN);
  check_broken("was not initialised", [] { wait(barrier(), 0); });
  check_broken("bytes more than it expects", [] {
    if (thread_idx() != 0) return;
    init(barrier(), 1);
    expect(barrier(), kN * 32 - 16);
    load(map, dynamic_smem());
    wait(barrier(), 0);
  });
  check_broken("has had all 1 arrivals of its phase", [] {
    if (thread_idx() != 0) return;
    init(barrier(), 1);
    expect(barrier(), 16);
    expect(barrier(), 0);
  });
  check_broken("which misses 0 arrivals and 16 bytes", [] {
    if (thread_idx() != 0) return;
    init(barrier(), 1);
    expect(barrier(), kN * 32 + 16);
    load(map, dynamic_smem());
    wait(barrier(), 0);
  });
  check_broken("which misses 1 arrivals and 0 bytes", [] {
    if (thread_idx() != 0) return;
    init(barrier(), 2);
    expect(barrier(), 0);
    wait(barrier(), 0);
  });
  CHECK_BROKEN_RULE(run_kernel(1, kThreads, kSmemBytes,
                               [] {
                                 if (thread_idx() != 0) return;
                                 init(barrier(), 1);
                                 expect(barrier(), kN * 32);
                                 load(map, dynamic_smem());
                               }),
                    "the block ends with 1 TMA loads in flight");
}

SIMT_CASE(registers_are_handed_on_within_what_the_launch_gave) {
  const auto kernel = [](auto producer, auto consumer) {
    return [=] {
      if (thread_idx() < 128) {
        set_registers<decltype(producer)::value>();
      } else {
        set_registers<decltype(consumer)::value>();
      }
    };
  };
  const auto number = [](auto value) { return value; };
  CHECK_OK(
      run_kernel(1, 512, 0, kernel(number(std::integral_constant<int, 32>{}), std::integral_constant<int, 160>{})));
  CHECK_OK(
      run_kernel(1, 384, 0, kernel(number(std::integral_constant<int, 24>{}), std::integral_constant<int, 240>{})));
  CHECK_BROKEN_RULE(
      run_kernel(1, 512, 0, kernel(std::integral_constant<int, 32>{}, std::integral_constant<int, 168>{})),
      "so one would wait for ever");
  CHECK_BROKEN_RULE(
      run_kernel(1, 512, 0, kernel(std::integral_constant<int, 32>{}, std::integral_constant<int, 156>{})),
      "a multiple of 8 from 24 to 256");
}
