// What the C ABI asks of a problem before a row may run it: sizes, flags and options that make sense by themselves, what
// the row was compiled for, then the row's own can_implement. Every message names the argument, its value and what is
// allowed. Nothing here runs anything.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sdpa/registry.hpp"

namespace sdpa {

inline constexpr uintptr_t kWorkspaceAlignment = 256;
inline constexpr size_t kMaskBytes[] = {1, 1, 2, 2, 4};  // by sdpa_mask_type

Status null_argument(const char *name);

Status check_problem(const KernelRow &row, const sdpa_params &params);

// Pointers matter only once something runs: tensors, softmax_lse, the workspace.
Status check_pointers(const KernelRow &row, const sdpa_params &params);

// The same two for gradients.
Status check_backward(const KernelRow &row, const sdpa_bwd_params &params);
Status check_backward_pointers(const KernelRow &row, const sdpa_bwd_params &params);

// The row's own, and room for counters behind it.
uint64_t workspace_bytes(const KernelRow &row, const sdpa_params &params);

}  // namespace sdpa
