"""The structs of sdpa_merge_states, as abi.py has those of attention."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_uint32, c_void_p


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
