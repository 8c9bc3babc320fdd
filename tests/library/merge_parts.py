"""Partial results for tests of merge_states, and the C struct that says where they lie."""

from __future__ import annotations

import ctypes

import torch

from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.registry import KernelInfo, Op, read_kernels
from sdpa_cutlass.library.structs import MergeParams, MergePart
from sdpa_cutlass.problem import DType

Parts = tuple[list[torch.Tensor], list[torch.Tensor]]


def made(*shape: int, num_parts: int = 3, dtype: torch.dtype = torch.float16, device: str = "cpu") -> Parts:
    draw = torch.Generator().manual_seed(1)
    size = shape or (2, 3, 5, 32)
    outs = [torch.randn(size, generator=draw).to(device, dtype) for _ in range(num_parts)]
    return outs, [torch.randn(size[:-1], generator=draw).to(device) for _ in range(num_parts)]


def stacked(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack(parts[0]), torch.stack(parts[1])


def merging_row(native: Library, dtype: DType = DType.F16) -> KernelInfo:
    return next(row for row in read_kernels(native) if row.op is Op.MERGE and row.dtype is dtype)


def struct(outs: list[torch.Tensor], lses: list[torch.Tensor], out: torch.Tensor) -> MergeParams:
    """The C struct of fp16 parts without gaps."""
    batch, heads, rows, head_dim = outs[0].shape
    listed = (MergePart * len(outs))()
    for entry, part, lse in zip(listed, outs, lses, strict=True):
        entry.out, entry.lse = part.data_ptr(), lse.data_ptr()
        entry.out_stride, entry.lse_stride = part.stride()[:3], lse.stride()
    return MergeParams(
        struct_size=ctypes.sizeof(MergeParams), dtype=0, out_dtype=0, num_parts=len(outs),
        num_listed=len(outs), batch=batch, num_heads=heads, seqlen_q=rows, head_dim=head_dim, parts=listed,
        out=out.data_ptr(), out_stride=out.stride()[:3],
    )  # fmt: skip
