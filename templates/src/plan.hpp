// An sdpa_plan: a problem that was checked against a row, and what the addresses of its launches have to be.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "checks.hpp"

namespace sdpa {

// What is optional and given: a bit each.
template <class Fields>
uint32_t given_options(const Fields &fields) {
  uint32_t bits = 0;
  for (const void *const pointer :
       {static_cast<const void *>(fields.softmax_lse), fields.mask, static_cast<const void *>(fields.seqlens_q),
        static_cast<const void *>(fields.seqlens_k), static_cast<const void *>(fields.cu_seqlens_q),
        static_cast<const void *>(fields.cu_seqlens_k), fields.sinks})
    bits = bits << 1 | (pointer != nullptr);
  return bits;
}

}  // namespace sdpa

struct sdpa_plan {
  int index;
  const sdpa::KernelRow *row;
  int device;
  sdpa_params params;  // its addresses are those of no launch
  uint64_t workspace_bytes;
  uint32_t given;  // given_options
};

namespace sdpa {

inline sdpa_params with_addresses(sdpa_params params, const sdpa_addresses &addresses) {
  params.q = addresses.q;
  params.k = addresses.k;
  params.v = addresses.v;
  params.out = addresses.out;
  params.softmax_lse = addresses.softmax_lse;
  params.workspace = addresses.workspace;
  params.workspace_bytes = addresses.workspace_bytes;
  params.split_arrivals = addresses.split_arrivals;
  params.mask = addresses.mask;
  params.philox_seed = addresses.philox_seed;
  params.philox_offset = addresses.philox_offset;
  params.philox_state = addresses.philox_state;
  params.seqlens_q = addresses.seqlens_q;
  params.seqlens_k = addresses.seqlens_k;
  params.cu_seqlens_q = addresses.cu_seqlens_q;
  params.cu_seqlens_k = addresses.cu_seqlens_k;
  params.sinks = addresses.sinks;
  return params;
}

// Whether nothing is wrong with the addresses: one look at all of them. check_addresses says what is.
inline bool are_fine(const sdpa_plan &plan, const sdpa_addresses &given) {
  const auto bits = [](auto... pointers) { return (reinterpret_cast<uintptr_t>(pointers) | ...); };
  const bool is_there = given.q != nullptr && given.k != nullptr && given.v != nullptr && given.out != nullptr;
  const uintptr_t tensors = bits(given.q, given.k, given.v, given.out) % 16;
  const uintptr_t words = bits(given.softmax_lse, given.split_arrivals, given.seqlens_q, given.seqlens_k,
                               given.cu_seqlens_q, given.cu_seqlens_k) %
                          4;
  const uintptr_t others = bits(given.philox_state) % 8 | bits(given.mask) % kMaskBytes[plan.params.mask_type] |
                           bits(given.sinks) % kMaskBytes[plan.params.sinks_type];
  const bool has_room =
      plan.workspace_bytes == 0 || (given.workspace != nullptr && given.workspace_bytes >= plan.workspace_bytes &&
                                    bits(given.workspace) % kWorkspaceAlignment == 0);
  return is_there && has_room && (tensors | words | others) == 0 && given_options(given) == plan.given;
}

inline Status check_addresses(const sdpa_plan &plan, const sdpa_params &params) {
  Status status = check_problem(*plan.row, params);
  if (status.ok()) status = check_pointers(*plan.row, params);
  if (!status.ok() || given_options(params) == plan.given) return status;
  return make_status(
      SDPA_INVALID_ARGUMENT,
      "addresses: softmax_lse, mask, sinks, seqlens and cu_seqlens must be null exactly where they were when "
      "the plan was made");
}

}  // namespace sdpa
