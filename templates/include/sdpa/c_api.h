/* The C ABI of libsdpa_cutlass and libsdpa_cutlass_host: seventeen functions and eight plain structs.
 *
 *   O = dropout(softmax(Q Kᵀ · softmax_scale + mask, sinks)) V
 *   Q [B, Hq, Sq, D]   K [B, Hkv, Sk, D]   V [B, Hkv, Sk, Dv]   O [B, Hq, Sq, Dv]
 *
 * Every kernel of the library is a row of one registry, whatever its family; a row is named by its index, found by
 * its name. Nothing here picks a kernel: callers read the rows and choose (sdpa_cutlass/choice/select.py does).
 * Every function that can fail returns an sdpa_status; sdpa_last_error() explains the calling thread's last failure.
 * All pointers are device pointers in the CUDA library and ordinary ones in the host library. Every launch can be
 * captured in a CUDA graph. Device memory is allocated for split_arrivals alone: 1 MiB a time, at most 16 a device.
 * Any thread may call any function at any time; only sdpa_plan_free must be the last call with its plan.
 */
#ifndef SDPA_C_API_H_
#define SDPA_C_API_H_

#include <stdint.h>

#if defined(__GNUC__)
#define SDPA_API __attribute__((visibility("default")))
#else
#define SDPA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or a function of this file changes meaning. */
#define SDPA_ABI_VERSION 11

/* Tiles of query rows that can each be split over several CTAs: see split_arrivals. */
#define SDPA_MAX_SPLIT_TILES 1024

typedef enum sdpa_status {
  SDPA_OK = 0,
  SDPA_INVALID_ARGUMENT = 1, /* a null pointer, a bad index, a struct of another size, a misaligned address */
  SDPA_NOT_SUPPORTED = 2,    /* this kernel cannot run this problem */
  SDPA_CUDA_ERROR = 3,       /* the CUDA runtime refused; the message holds its name and text */
  SDPA_HOST_CHECK = 4        /* host library: the kernel broke a rule of the machine model (race, divergence, ...) */
} sdpa_status;

/* Attention takes the first two. */
typedef enum sdpa_dtype { SDPA_DTYPE_F16 = 0, SDPA_DTYPE_BF16 = 1, SDPA_DTYPE_F32 = 2 } sdpa_dtype;

typedef enum sdpa_target { SDPA_BUILT_FOR_CUDA = 0, SDPA_BUILT_FOR_HOST = 1 } sdpa_target;

/* A boolean mask has one byte an element, 0 or 1 (1: attend); the others are added to the scaled scores. */
typedef enum sdpa_mask_type {
  SDPA_MASK_NONE = 0,
  SDPA_MASK_BOOL = 1,
  SDPA_MASK_F16 = 2,
  SDPA_MASK_BF16 = 3,
  SDPA_MASK_F32 = 4
} sdpa_mask_type;

/* One attention problem and where its tensors lie. Strides count elements; the head dimension is contiguous.
 * Everything from `mask` on is optional, and means nothing when zero. */
typedef struct sdpa_params {
  uint32_t struct_size; /* sizeof(sdpa_params) */
  int32_t dtype;        /* sdpa_dtype of q, k, v and out */
  int32_t batch;
  int32_t num_heads_q;
  int32_t num_heads_kv; /* divides num_heads_q */
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t head_dim;      /* of q and k */
  int32_t head_dim_v;    /* of v and out */
  int32_t is_causal;     /* 0 or 1 */
  int32_t causal_offset; /* key column j is seen by row i when j <= i + causal_offset; top_left 0, bottom_right Sk-Sq.
                          * A window counts from it too; it means nothing with neither. */
  float softmax_scale;
  const void *q; /* null, and out: a quantised kernel's first launch alone, which makes bytes of k and v; see total_k */
  const void *k; /* null: its second one alone; see quantized */
  const void *v;
  void *out;
  float *softmax_lse; /* natural log, [batch, num_heads_q, seqlen_q], rows contiguous; may be null */
  void *workspace;    /* at least sdpa_workspace_bytes(), 256-byte aligned; may be null when that is 0, and for a
                       * row of fmha_fwd_sm90, which may take longer without */
  uint64_t workspace_bytes;
  /* Counters at which the CTAs of a tile meet. Null: the library's, shared by no launch that may overlap this one. Else
   * SDPA_MAX_SPLIT_TILES zeros that nothing else uses meanwhile; every launch leaves them zero, a failed one too. */
  uint32_t *split_arrivals;
  int64_t q_stride[3]; /* batch, head, row */
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t out_stride[3];
  int64_t lse_stride[2]; /* batch, head */

  const void *mask; /* broadcasts to [batch, num_heads_q, seqlen_q, seqlen_k] through strides of 0 */
  int64_t mask_stride[4];
  int32_t mask_type; /* sdpa_mask_type */

  float p_dropout; /* probability to drop, less than 1; the mask is a function of seed, offset and element only */
  uint64_t philox_seed;
  uint64_t philox_offset;
  const uint64_t *philox_state; /* {seed, offset} where the kernel runs, read instead of the two fields; or null */

  /* Lengths per sequence, int32 where the kernel runs; values beyond the sizes above are cut to them. Rows at or
   * beyond seqlens_q[b] become 0 and -inf, keys at or beyond seqlens_k[b] are never read. [batch], or null. */
  const int32_t *seqlens_q;
  const int32_t *seqlens_k;
  /* Packed sequences: sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 of [total, heads, head_dim];
   * the batch stride is not used, seqlen_q and seqlen_k are upper bounds. [batch + 1], or null. */
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_k;
  int32_t total_q; /* rows of packed q and out; softmax_lse then lies at head * lse_stride[1] + row */
  int32_t total_k; /* or the keys that a quantised kernel's first launch makes room for; above 0, q or k may be null */
  int32_t causal_bottom_right; /* 1: causal_offset is each sequence's own seqlen_k - seqlen_q; needs is_causal or
                                * has_window */
  int32_t num_splits;          /* split kernels: CTAs that share the keys of a tile, from 1 on; 0 for all others */

  /* 1: row i sees the keys i + causal_offset - window_left to i + causal_offset + window_right, both included; -1 is no
   * limit, and is_causal sets window_right to 0. With has_window 0, both mean nothing. */
  int32_t has_window;
  int32_t window_left;
  int32_t window_right;
  /* One logit of each query head that joins the denominator of its rows and no sum, in natural units: softmax_lse is
   * log(sum exp S + exp sink). [num_heads_q], neighbours; or null. */
  int32_t sinks_type; /* sdpa_mask_type of an element: F16, BF16 or F32; NONE without sinks */
  const void *sinks;

  /* A quantised kernel's second launch alone: the workspace that its first one filled, and the bytes that it had. It is
   * read, and k is not; nor is v but in int8_qk. `workspace` is what this launch needs next to it. Or null. */
  const void *quantized;
  uint64_t quantized_bytes;
} sdpa_params;

/* What may differ between the launches of a plan: the fields of sdpa_params with these names. */
typedef struct sdpa_addresses {
  uint32_t struct_size; /* sizeof(sdpa_addresses) */
  uint32_t reserved;    /* 0 */
  const void *q;
  const void *k;
  const void *v;
  void *out;
  float *softmax_lse;
  void *workspace;
  uint64_t workspace_bytes;
  uint32_t *split_arrivals;
  const void *mask;
  uint64_t philox_seed;
  uint64_t philox_offset;
  const uint64_t *philox_state;
  const int32_t *seqlens_q;
  const int32_t *seqlens_k;
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_k;
  const void *sinks;
} sdpa_addresses;

/* A kernel, a problem and a device that fit each other. */
typedef struct sdpa_plan sdpa_plan;

/* What a kernel computes. */
typedef enum sdpa_op {
  SDPA_OP_FORWARD = 0, /* attention: sdpa_launch and plans */
  SDPA_OP_MERGE = 1,   /* sdpa_merge_states */
  SDPA_OP_BACKWARD = 2 /* gradients of attention: sdpa_bwd_launch */
} sdpa_op;

/* How near to the mathematics. A choice among kernels crosses no line of these unasked; later versions append. */
typedef enum sdpa_accuracy {
  SDPA_ACCURACY_EXACT = 0,          /* logits in float32, roundings to the element type in P and in the result alone */
  SDPA_ACCURACY_ROUNDED_LOGITS = 1, /* logits may be rounded to 16 bits */
  SDPA_ACCURACY_INT8_QK = 2,        /* Q and K are rounded to 8 bits: docs/quantised.md has the bounds */
  SDPA_ACCURACY_INT8 = 3            /* and so are V and P */
} sdpa_accuracy;

/* What a problem may need of a kernel, one bit each; later versions append. Every problem needs one of FULL and CAUSAL,
 * and one of UNDROPPED and DROPOUT. generator/core/kernel.py has the same. */
typedef enum sdpa_takes {
  SDPA_TAKES_FULL = 1 << 0, /* every query sees every key */
  SDPA_TAKES_CAUSAL = 1 << 1,
  SDPA_TAKES_BOOL = 1 << 2,   /* a boolean mask */
  SDPA_TAKES_BIAS16 = 1 << 3, /* a mask to add, 16 bits an element */
  SDPA_TAKES_BIAS32 = 1 << 4,
  SDPA_TAKES_LENGTHS = 1 << 5, /* a length for each sequence, causal aligned to it */
  SDPA_TAKES_PACKED = 1 << 6,  /* sequences one after another, without padding */
  SDPA_TAKES_UNDROPPED = 1 << 7,
  SDPA_TAKES_DROPOUT = 1 << 8,
  SDPA_TAKES_SMALLER_HEAD_DIM = 1 << 9, /* than the kernel's, and another one for the values */
  SDPA_TAKES_SPLITS = 1 << 10,          /* several CTAs share the keys of a tile: num_splits */
  SDPA_TAKES_WINDOW = 1 << 11,          /* a first and a last key for each row */
  SDPA_TAKES_SINKS = 1 << 12            /* a logit for each head in the denominator */
} sdpa_takes;

/* One of a family's own choices, for choosing among its kernels and for printing. */
typedef struct sdpa_detail {
  const char *name; /* such as "block_m" */
  int32_t value;
} sdpa_detail;

/* One registry row. What it points to lives as long as the library. */
typedef struct sdpa_kernel_info {
  uint32_t struct_size; /* sizeof(sdpa_kernel_info), set by the caller */
  int32_t dtype;
  const char *name;   /* the kernel's symbol, the manifest's key, the tuned tables' value */
  const char *family; /* "fmha_fwd" or "unfused" */
  const char *code;   /* what its unit is compiled for, as CMake writes it: "89" is sm_89 code and PTX, "90a-real" code
                       * for sm_90a alone. Code without a letter is built for sdpa_build_info.archs instead */
  int32_t op;         /* sdpa_op */
  int32_t accuracy;   /* sdpa_accuracy */
  int32_t arch;       /* the compute capability that it is tuned for, times ten */
  int32_t head_dim;   /* its own, and with SMALLER_HEAD_DIM the largest */
  int32_t num_details;
  uint64_t takes; /* of sdpa_takes */
  const sdpa_detail *details;
  int32_t smem_bytes;  /* dynamic shared memory of one CTA */
  int32_t ctas_per_sm; /* CTAs per SM that the launch bounds promise on `arch` */
} sdpa_kernel_info;

typedef struct sdpa_build_info {
  uint32_t struct_size; /* sizeof(sdpa_build_info), set by the caller */
  int32_t abi_version;
  int32_t target;               /* sdpa_target */
  int32_t cuda_runtime_version; /* as CUDART_VERSION, e.g. 13000; 0 in the host library */
  uint32_t params_size;         /* sizeof(sdpa_params) */
  int32_t cutlass_version;      /* as CUTLASS_VERSION, e.g. 420 for 4.2.0 */
  const char *version;          /* of the package, e.g. "0.1.0" */
  const char *digest;           /* of everything that the library was generated and compiled from */
  const char *space;            /* the generator's space, e.g. "release" */
  const char *archs;            /* CMake's list, e.g. "89"; empty in the host library */
  const char *sanitizers;       /* e.g. "address;undefined"; empty otherwise */
} sdpa_build_info;

SDPA_API const char *sdpa_last_error(void);
SDPA_API int sdpa_build_info_get(sdpa_build_info *info);
SDPA_API int sdpa_kernel_count(void);
SDPA_API int sdpa_kernel_info_get(int index, sdpa_kernel_info *info);

/* SDPA_OK, or SDPA_NOT_SUPPORTED / SDPA_INVALID_ARGUMENT with the reason as the thread's message. Looks at shapes,
 * strides, alignment and flags; reads no tensor, touches no device. */
SDPA_API int sdpa_can_implement(int index, const sdpa_params *params);
SDPA_API int sdpa_workspace_bytes(int index, const sdpa_params *params, uint64_t *bytes);

/* Queues the kernel on `stream` (a cudaStream_t; ignored by the host library, which returns when it is done) of the
 * CUDA device `device`, which is made current for the call and restored after it. Checks can_implement first. */
SDPA_API int sdpa_launch(int index, const sdpa_params *params, int device, void *stream);

/* Checks can_implement, once for all launches of the plan, and loads the kernel as sdpa_prepare does. What `params`
 * gives beyond its addresses holds for every launch, and so does which of softmax_lse, mask, sinks and the four arrays
 * of lengths are null. Nothing is kept of `params` itself. `workspace_bytes`: what sdpa_workspace_bytes says. */
SDPA_API int sdpa_plan_make(int index, const sdpa_params *params, int device, sdpa_plan **plan,
                            uint64_t *workspace_bytes);

/* sdpa_launch with these addresses. Allocates nothing and takes no lock. */
SDPA_API int sdpa_plan_launch(const sdpa_plan *plan, const sdpa_addresses *addresses, void *stream);

/* Launches under way go on. Null is allowed. */
SDPA_API void sdpa_plan_free(sdpa_plan *plan);

/* Registers, local memory (spills) and CTAs per SM of the code loaded on `device`, as the CUDA runtime reports them.
 * Of a kernel with a function for each kind of mask, the most and the fewest CTAs of any.
 * SDPA_NOT_SUPPORTED in the host library and for rows that launch several kernels. */
SDPA_API int sdpa_kernel_occupancy(int index, int device, int32_t *registers, int32_t *local_bytes,
                                   int32_t *ctas_per_sm);

/* Loads a row onto the device, so that a later launch neither compiles nor sets attributes, and allocates counters. */
SDPA_API int sdpa_prepare(int index, int device);

/* Host library: seed of the schedule that orders warps and threads (0: program order), and OS threads that run
 * blocks (0: all cores). For the whole process. SDPA_NOT_SUPPORTED in the CUDA library. */
SDPA_API int sdpa_host_configure(uint64_t schedule_seed, int32_t num_threads);

/* Parts that sdpa_merge_params can list; more lie at equal distances. */
#define SDPA_MAX_LISTED_PARTS 32

/* Attention of some queries over some of their keys. Strides count elements; the head dimension is contiguous. */
typedef struct sdpa_merge_part {
  const void *out;       /* [batch, num_heads, seqlen_q, head_dim] */
  const float *lse;      /* natural log, [batch, num_heads, seqlen_q] */
  int64_t out_stride[3]; /* batch, head, row */
  int64_t lse_stride[3];
} sdpa_merge_part;

/* What sdpa_merge_states merges: the same queries over disjoint sets of keys. */
typedef struct sdpa_merge_params {
  uint32_t struct_size; /* sizeof(sdpa_merge_params) */
  int32_t dtype;        /* sdpa_dtype of the parts */
  int32_t out_dtype;    /* and of out: any of the three */
  int32_t num_parts;    /* at least 1 */
  int32_t num_listed;   /* entries of `parts`: num_parts; or 1, and part i lies i part strides behind it */
  int32_t batch;
  int32_t num_heads;
  int32_t seqlen_q;
  int32_t head_dim;
  int32_t reserved;             /* 0 */
  const sdpa_merge_part *parts; /* in ordinary memory; read before sdpa_merge_states returns */
  int64_t out_part_stride;
  int64_t lse_part_stride;
  const float *sinks; /* a logit for each head that joins the sum and has no value: [num_heads], or null */
  int64_t sink_stride;
  void *out;
  float *lse; /* [batch, num_heads, seqlen_q] without gaps; may be null */
  int64_t out_stride[3];
} sdpa_merge_params;

/* lse = log(sum_i exp(lse_i) + exp(sink)), out = sum_i exp(lse_i - lse) out_i, in float32 and in the order of the parts.
 * A row whose lse_i are all -inf becomes 0. What a part holds where its lse is -inf is not read. `index`: a row with
 * SDPA_OP_MERGE; checks what it is given first. Device and stream are those of sdpa_launch. */
SDPA_API int sdpa_merge_states(int index, const sdpa_merge_params *params, int device, void *stream);

/* The gradients of one attention problem. `forward` is what the forward was launched with: `out` and `softmax_lse` hold
 * its results and are read; `softmax_lse` must be there. `workspace` and `workspace_bytes` are those of the backward;
 * num_splits and split_arrivals mean nothing and must be 0. Strides count elements; the head dimension is contiguous. */
typedef struct sdpa_bwd_params {
  uint32_t struct_size; /* sizeof(sdpa_bwd_params) */
  uint32_t reserved;    /* 0 */
  sdpa_params forward;
  const void *dout;  /* the gradient of out, and like it */
  const float *dlse; /* the gradient of softmax_lse, with its strides; or null: zero */
  void *dq;          /* like q; or null: not asked for. Sums are in float32, in an order that the problem decides */
  void *dk;          /* like k */
  void *dv;          /* like v */
  int64_t dout_stride[3]; /* batch, head, row */
  int64_t dq_stride[3];
  int64_t dk_stride[3];
  int64_t dv_stride[3];
  /* The gradient of a mask that is added; or null. Of a dimension whose stride is 0 it has one element, which is the sum
   * over that dimension; forward.mask_stride has to be 0 there, or the dimension's size 1. Every element is written, those
   * of rows and keys at or beyond a length as 0. Not with cu_seqlens. */
  void *dbias;
  int64_t dbias_stride[4]; /* batch, head, row, key */
  int32_t dbias_type;      /* sdpa_mask_type of an element: F16, BF16 or F32; NONE without dbias */
  int32_t reserved_end;    /* 0 */
} sdpa_bwd_params;

/* As sdpa_can_implement, sdpa_workspace_bytes and sdpa_launch, for a row with SDPA_OP_BACKWARD. Rows at or beyond a
 * length become 0 in dq, dk and dv. The bits depend on the problem and the kernel alone. */
SDPA_API int sdpa_bwd_can_implement(int index, const sdpa_bwd_params *params);
SDPA_API int sdpa_bwd_workspace_bytes(int index, const sdpa_bwd_params *params, uint64_t *bytes);
SDPA_API int sdpa_bwd_launch(int index, const sdpa_bwd_params *params, int device, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* SDPA_C_API_H_ */
