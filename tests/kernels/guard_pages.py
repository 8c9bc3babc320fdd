"""Runs every general and split kernel on tensors that end, or begin, at an unmapped page.

    python -m tests.kernels.guard_pages

An access outside a tensor, even one whose value is thrown away, kills the process; the line printed last
says which kernel and case it was. Host library only; test_guard_pages.py runs this.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterator
from dataclasses import replace

import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Op
from sdpa_cutlass.library.structs import MAX_TILES, Params
from sdpa_cutlass.problem import Causal, MaskType
from sdpa_cutlass.public.api import kernels
from tests.kernels.general import WORKSPACE_ALIGNMENT, Case, Lengths, launch, make_case_params, random_qkv
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import mask_dtypes, random_mask

_PROT_NONE = 0


def fenced(tensor: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """A dense copy that ends right in front of an unmapped page, or begins right behind one."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.element_size()
    room = -(-size // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for fence in (address, address + page + room):
        if protect(ctypes.c_void_p(fence), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    offset = page + room - size if at_end else page
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return copy.view(tensor.shape).copy_(tensor)


def cases(kernel: TestedKernel) -> Iterator[Case]:
    """Odd sizes and every option; only rows and keys of the last tile lie beside a fence."""
    info = kernel.info
    rows, keys = info.block_m + 5, (info.kv_groups + 1) * info.block_n + 9
    inputs = random_qkv(kernel, rows, keys, batch=1, head_dim=info.head_dim - 8)
    base = Case(**inputs, p_dropout=0.3 if info.has_dropout else 0.0, philox=PhiloxState(1, 2))
    for causal in (None, *Causal):
        yield replace(base, causal=causal)
    for dtype in mask_dtypes(info):
        for size in (keys, keys - 1):  # a part of a block: single elements at its end, and whole vectors
            part = replace(base, k=base.k[:, :, :size], v=base.v[:, :, :size])
            for shape in ((size,), (rows, 1), (1, 2, rows, size)):
                yield replace(part, mask=random_mask(dtype, shape, "cpu"))
    if MaskType.BOOL in info.mask_types:  # shared by heads, over enough keys to look for what it hides ahead
        longer = random_qkv(kernel, rows, 5 * info.block_n + 16, batch=1)
        mask = random_mask(torch.bool, (1, 1, rows, 5 * info.block_n + 16), "cpu")
        yield replace(base, **longer, mask=mask)
    yield replace(
        base,
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(seqlens=(rows - 3,)),
        lengths_k=Lengths(seqlens=(keys + 100,)),
    )
    yield replace(
        base,
        lengths_q=Lengths(cu_seqlens=(0, 20, rows), longest=rows + 100),
        lengths_k=Lengths(cu_seqlens=(0, keys - 30, keys), longest=keys + 100),
    )
    one_key = replace(base, q=base.q[:, :, :1], k=base.k[:, :, :1], v=base.v[:, :, :1])
    yield (
        replace(one_key, mask=random_mask(torch.bool, (1, 1), "cpu", density=1))
        if info.mask_types
        else one_key
    )


def tested_kernels() -> Iterator[TestedKernel]:
    """Split ones with two numbers of splits."""
    for row in kernels(Target.HOST):
        if row.op is Op.FORWARD and row.is_general:
            for num_splits in (1, 4) if row.is_split else (0,):
                yield TestedKernel("cpu", row, num_splits)


def fence_room(kernel: TestedKernel, params: Params, *, at_end: bool) -> list[torch.Tensor]:
    """Gives a kernel its workspace and counters between fences: the memory that `params` refers to."""
    params.num_splits = kernel.num_splits
    params.workspace_bytes = kernel.library.workspace_bytes(kernel.info.index, params)
    if not params.workspace_bytes:
        return []
    room = -(-params.workspace_bytes // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    workspace = fenced(torch.full((room,), 0xFF, dtype=torch.uint8), at_end=at_end)
    counters = fenced(torch.zeros(MAX_TILES, dtype=torch.int32), at_end=at_end)
    params.workspace, params.split_arrivals = workspace.data_ptr(), counters.data_ptr()
    return [workspace, counters]


def main() -> None:
    for kernel in tested_kernels():
        for case in cases(kernel):
            for at_end in (True, False):
                print(
                    f"{kernel}, fence {'behind' if at_end else 'in front of'} the tensors: {case}", flush=True
                )
                tensors = {name: fenced(getattr(case, name), at_end=at_end) for name in ("q", "k", "v")}
                if case.mask is not None:
                    tensors["mask"] = fenced(case.mask, at_end=at_end)
                out = fenced(torch.full(case.out_shape, math.nan, dtype=kernel.dtype), at_end=at_end)
                lse = fenced(torch.full(case.out_shape[:3], math.nan), at_end=at_end)
                params, held = make_case_params(replace(case, **tensors), out, lse)
                held += fence_room(kernel, params, at_end=at_end)
                launch(kernel, params, held)
                assert not out.isnan().any()
                assert not lse.isnan().any()


if __name__ == "__main__":
    main()
