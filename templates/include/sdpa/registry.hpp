// The registry: what every kernel of the library offers, whatever its family. Generated units define arrays of rows;
// the generated registry lists those arrays; src/c_api.cpp serves them through the C ABI.
// This file knows nothing about how a kernel works.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sdpa/c_api.h"

namespace sdpa {

// A status with its reason. `message` is only set when something failed.
struct Status {
  sdpa_status code = SDPA_OK;
  char message[640];

  Status() { message[0] = '\0'; }  // the rest costs time in every launch

  bool ok() const { return code == SDPA_OK; }
};

// printf-style. Long texts are cut, never overrun.
Status make_status(sdpa_status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

inline constexpr int kMaxFunctions = 5;  // of a row

// What the generator says of a kernel, for its row.
struct KernelFacts {
  const char *name;
  const char *family;
  sdpa_op op;
  sdpa_accuracy accuracy;
  int32_t arch;
  const char *code;
  sdpa_dtype dtype;
  int32_t head_dim;
  uint64_t takes;
};

struct KernelRow {
  sdpa_kernel_info info;

  // Of rows with SDPA_OP_FORWARD; null in others.
  // The arguments were checked for null, struct size, dtype and head_dim against `info` before these are called.
  Status (*can_implement)(const sdpa_params &params);
  uint64_t (*workspace_bytes)(const sdpa_params &params);
  bool is_workspace_optional;  // without one, which is null then, results are the same and may take longer
  // `stream` is a cudaStream_t (unused on the host). The device is already current.
  Status (*launch)(const sdpa_params &params, void *stream);

  // Of rows with SDPA_OP_MERGE; null in others. The arguments were checked for null and struct size.
  Status (*check_merge)(const sdpa_merge_params &params);
  Status (*merge)(const sdpa_merge_params &params, void *stream);

  // Of rows with SDPA_OP_BACKWARD; null in others. The arguments were checked as for those of SDPA_OP_FORWARD.
  Status (*check_backward)(const sdpa_bwd_params &params);
  uint64_t (*backward_workspace_bytes)(const sdpa_bwd_params &params);
  Status (*backward)(const sdpa_bwd_params &params, void *stream);

  // The __global__ functions of which a launch takes one, or one and what prepares for it, for attributes and
  // occupancy; the rest is null, and all of it for rows that launch several kernels.
  const void *functions[kMaxFunctions];
  int32_t threads;
};

template <int kNumDetails>
constexpr KernelRow make_row(const KernelFacts &facts, const sdpa_detail (&details)[kNumDetails]) {
  KernelRow row = {};
  row.info.struct_size = sizeof(sdpa_kernel_info);
  row.info.dtype = facts.dtype;
  row.info.name = facts.name;
  row.info.family = facts.family;
  row.info.code = facts.code;
  row.info.op = facts.op;
  row.info.accuracy = facts.accuracy;
  row.info.arch = facts.arch;
  row.info.head_dim = facts.head_dim;
  row.info.takes = facts.takes;
  row.info.details = details;
  row.info.num_details = kNumDetails;
  return row;
}

struct RowSpan {
  const KernelRow *rows;
  int count;
};

// Defined by the generated registry.
extern const RowSpan kRowSpans[];
extern const int kNumRowSpans;
extern const char *const kGeneratorDigest;
extern const char *const kSpaceName;

}  // namespace sdpa
