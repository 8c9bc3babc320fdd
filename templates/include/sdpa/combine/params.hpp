// What the kernel that merges partial results is launched with. Strides count bytes.
#pragma once

#include <cstdint>

#include <cutlass/fast_math.h>

#include "sdpa/c_api.h"

namespace sdpa::combine {

inline constexpr int kVector = 8;  // columns of a thread

// One partial result. Offsets are those of batch, head and row.
struct Part {
  const char *out;
  const char *lse;
  int64_t out_stride[3];
  int64_t lse_stride[3];
};

struct Params {
  int32_t num_parts;
  int32_t step;  // part i is parts[i * step], moved by i part strides: one of both is 0
  int64_t out_part_stride;
  int64_t lse_part_stride;
  const float *sinks;  // or null
  int64_t sink_stride;
  char *out;
  float *lse;  // [num_rows], or null
  int64_t out_stride[3];
  int32_t out_dtype;  // sdpa_dtype
  int32_t num_rows;   // batch * num_heads * seqlen_q
  int32_t rows_per_cta;
  cutlass::FastDivmod vectors;  // of a row
  cutlass::FastDivmod seqlen_q;
  cutlass::FastDivmod num_heads;
  Part parts[SDPA_MAX_LISTED_PARTS];
};

}  // namespace sdpa::combine
