"""The structs of the C ABI as ctypes has them.

They mirror templates/include/sdpa/c_api.h; a test parses that header and compares field by field. abi.py has
the functions that take them. Pointers are plain integers here: what they point to is the caller's business.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

MAX_TILES = 1024  # SDPA_MAX_SPLIT_TILES: counters of a launch
MAX_LISTED_PARTS = 32  # SDPA_MAX_LISTED_PARTS
_Field = tuple[str, Any]
_TENSORS: list[_Field] = [
    ("q", c_void_p),
    ("k", c_void_p),
    ("v", c_void_p),
    ("out", c_void_p),
    ("softmax_lse", c_void_p),
    ("workspace", c_void_p),
    ("workspace_bytes", c_uint64),
    ("split_arrivals", c_void_p),
]
OPTIONS: list[_Field] = [
    ("philox_seed", c_uint64),
    ("philox_offset", c_uint64),
    ("philox_state", c_void_p),
    ("seqlens_q", c_void_p),
    ("seqlens_k", c_void_p),
    ("cu_seqlens_q", c_void_p),
    ("cu_seqlens_k", c_void_p),
]
"""Fields that sdpa_params and sdpa_addresses share, behind the mask of the latter."""


class Params(ctypes.Structure):
    """struct sdpa_params: one problem and where its tensors lie. Strides count elements."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("batch", c_int32),
        ("num_heads_q", c_int32),
        ("num_heads_kv", c_int32),
        ("seqlen_q", c_int32),
        ("seqlen_k", c_int32),
        ("head_dim", c_int32),
        ("head_dim_v", c_int32),
        ("is_causal", c_int32),
        ("causal_offset", c_int32),
        ("softmax_scale", c_float),
        *_TENSORS,
        ("q_stride", c_int64 * 3),
        ("k_stride", c_int64 * 3),
        ("v_stride", c_int64 * 3),
        ("out_stride", c_int64 * 3),
        ("lse_stride", c_int64 * 2),
        ("mask", c_void_p),
        ("mask_stride", c_int64 * 4),
        ("mask_type", c_int32),
        ("p_dropout", c_float),
        *OPTIONS,
        ("total_q", c_int32),
        ("total_k", c_int32),
        ("causal_bottom_right", c_int32),
        ("num_splits", c_int32),
        ("has_window", c_int32),
        ("window_left", c_int32),
        ("window_right", c_int32),
        ("sinks_type", c_int32),
        ("sinks", c_void_p),
        ("quantized", c_void_p),
        ("quantized_bytes", c_uint64),
    ]


class Addresses(ctypes.Structure):
    """struct sdpa_addresses: what the launches of a plan may differ in."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        *_TENSORS,
        ("mask", c_void_p),
        *OPTIONS,
        ("sinks", c_void_p),
    ]


class BwdParams(ctypes.Structure):
    """struct sdpa_bwd_params: the gradients of one problem, of which `forward` is all but those."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("forward", Params),
        ("dout", c_void_p),
        ("dlse", c_void_p),
        ("dq", c_void_p),
        ("dk", c_void_p),
        ("dv", c_void_p),
        ("dout_stride", c_int64 * 3),
        ("dq_stride", c_int64 * 3),
        ("dk_stride", c_int64 * 3),
        ("dv_stride", c_int64 * 3),
        ("dbias", c_void_p),
        ("dbias_stride", c_int64 * 4),
        ("dbias_type", c_int32),
        ("reserved_end", c_int32),
    ]


class Detail(ctypes.Structure):
    """struct sdpa_detail."""

    _fields_ = [("name", c_char_p), ("value", c_int32)]


class RawKernelInfo(ctypes.Structure):
    """struct sdpa_kernel_info; registry.KernelInfo is its Python face."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("name", c_char_p),
        ("family", c_char_p),
        ("code", c_char_p),
        ("op", c_int32),
        ("accuracy", c_int32),
        ("arch", c_int32),
        ("head_dim", c_int32),
        ("num_details", c_int32),
        ("takes", c_uint64),
        ("details", POINTER(Detail)),
        ("smem_bytes", c_int32),
        ("ctas_per_sm", c_int32),
    ]


class RawBuildInfo(ctypes.Structure):
    """struct sdpa_build_info; BuildInfo is its Python face."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("abi_version", c_int32),
        ("target", c_int32),
        ("cuda_runtime_version", c_int32),
        ("params_size", c_uint32),
        ("cutlass_version", c_int32),
        ("version", c_char_p),
        ("digest", c_char_p),
        ("space", c_char_p),
        ("archs", c_char_p),
        ("sanitizers", c_char_p),
    ]


class MergePart(ctypes.Structure):
    """struct sdpa_merge_part: one partial result. Strides count elements."""

    _fields_ = [
        ("out", c_void_p),
        ("lse", c_void_p),
        ("out_stride", c_int64 * 3),
        ("lse_stride", c_int64 * 3),
    ]


class MergeParams(ctypes.Structure):
    """struct sdpa_merge_params: partial results, and where their merged one goes."""

    _fields_ = [
        ("struct_size", c_uint32),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("num_parts", c_int32),
        ("num_listed", c_int32),
        ("batch", c_int32),
        ("num_heads", c_int32),
        ("seqlen_q", c_int32),
        ("head_dim", c_int32),
        ("reserved", c_int32),
        ("parts", POINTER(MergePart)),
        ("out_part_stride", c_int64),
        ("lse_part_stride", c_int64),
        ("sinks", c_void_p),
        ("sink_stride", c_int64),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("out_stride", c_int64 * 3),
    ]
