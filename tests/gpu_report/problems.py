"""The problems of the report for any kernel: small and odd ones for every branch, and one of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.library.structs import MAX_TILES
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv
from tests.kernels.guard_pages import cases as general_cases
from tests.kernels.harness import TestedKernel
from tests.kernels.masks import mask_dtypes, random_mask

NUM_SPLITS = 3  # of every split kernel; the odd sizes have fewer blocks too


def num_splits(row: KernelInfo, case: Case) -> int:
    """What a launch of this kernel says in the field of that name."""
    if not row.is_split:
        return 0
    heads = case.q.shape[1] // case.k.shape[1] if row.packs_heads else 1  # in a tile
    tiles = -(-case.seqlen_q * heads // row.block_m) * case.batch * case.q.shape[1] // heads
    return NUM_SPLITS if tiles <= MAX_TILES else 1


def dense(case: Case) -> Case:
    """The same values with nothing between the rows, so that a tensor ends where its last row does."""
    return replace(case, q=case.q.contiguous(), k=case.k.contiguous(), v=case.v.contiguous())


def _plain(row: KernelInfo, rows: int, keys: int) -> Iterator[Case]:
    kernel = TestedKernel("cpu", row)
    inputs = random_qkv(kernel, rows, keys, batch=1, seed=rows + keys)
    for causal in kernel.alignments:
        yield dense(Case(**inputs, causal=causal))


def odd_cases(row: KernelInfo) -> Iterator[Case]:
    """Every option of the kernel at sizes that fill no tile, on the CPU."""
    if row.is_general:
        for case in general_cases(TestedKernel("cpu", row)):
            yield dense(case)
        return
    rows, keys = row.block_m + 5, (row.kv_groups + 1) * row.block_n + 9
    for size in ((1, 1), (rows, keys), (3, keys), (rows, 1)):
        yield from _plain(row, *size)


def few_cases(row: KernelInfo) -> Iterator[Case]:
    """What a tool that makes kernels a hundred times slower can be given: each code path once."""
    rows, keys = row.block_m + 5, (row.kv_groups + 1) * row.block_n + 9
    if not row.is_general:
        yield from _plain(row, rows, keys)
        yield next(iter(_plain(row, 1, 1)))
        return
    base = _general_base(row, rows, keys)
    yield base
    for dtype in mask_dtypes(row):
        yield replace(base, mask=random_mask(dtype, (rows, keys), "cpu"))
    yield replace(
        base,
        causal=TestedKernel("cpu", row).alignments[-1],
        lengths_q=Lengths(seqlens=(rows - 3,)),
        lengths_k=Lengths(seqlens=(keys - 20,)),
    )
    yield replace(
        base,
        lengths_q=Lengths(cu_seqlens=(0, 20, rows)),
        lengths_k=Lengths(cu_seqlens=(0, keys - 30, keys)),
        philox_on_device=row.has_dropout,
    )


def even_cases(row: KernelInfo) -> Iterator[Case]:
    """few_cases, but the KV groups of every CTA pass as many key blocks, and so as many barriers, as each
    other: racecheck takes whatever two threads do that met different numbers of barriers for unordered, even
    behind a barrier of the whole CTA (docs/trust.md). Groups of one warp have no barriers.
    """
    if row.kv_groups == 1 or row.warps == row.kv_groups:
        yield from few_cases(row)
        return
    step = row.kv_groups * row.block_n * (NUM_SPLITS if row.is_split else 1)
    rows, keys = row.block_m + 5, 2 * step - 7
    if not row.is_general:
        yield from (case for case in _plain(row, rows, keys) if case.causal is not Causal.TOP_LEFT)
        return
    base = _general_base(row, rows, keys)
    yield base
    for dtype in mask_dtypes(row):
        yield replace(base, mask=random_mask(dtype, (rows, keys), "cpu"))
    # The first tile of a split kernel ends many rows before the last one, which may be a block of few keys.
    yield replace(
        base,
        causal=None if row.is_split and row.block_n < row.block_m else Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(seqlens=(rows - 3,)),
        lengths_k=Lengths(seqlens=(keys - 2,)),
    )
    yield replace(
        base,
        lengths_q=Lengths(cu_seqlens=(0, 20, rows)),
        lengths_k=Lengths(cu_seqlens=(0, step - 3, keys)),
        philox_on_device=row.has_dropout,
    )


def sized_case(row: KernelInfo, *, heads: int, seqlen_q: int, seqlen_k: int, seed: int = 0) -> Case:
    """One case of any size: causal where the kernel is; a general kernel that takes masks also gets one."""
    kernel = TestedKernel("cpu", row)
    if not row.is_general:
        inputs = random_qkv(kernel, seqlen_q, seqlen_k, batch=1, heads=heads, seed=seed)
        return dense(Case(**inputs, causal=kernel.alignments[-1]))
    base = _general_base(row, seqlen_q, seqlen_k, heads=heads, seed=seed)
    if row.is_split or torch.bool not in mask_dtypes(row):
        return replace(base, causal=kernel.alignments[-1])
    mask = random_mask(torch.bool, (seqlen_q, seqlen_k), "cpu", seed=seed)
    return replace(base, causal=kernel.alignments[-1], mask=mask)


def _general_base(row: KernelInfo, rows: int, keys: int, *, heads: int = 2, seed: int = 0) -> Case:
    kernel = TestedKernel("cpu", row)
    inputs = random_qkv(kernel, rows, keys, batch=1, heads=heads, head_dim=row.head_dim - 8, seed=seed)
    p_dropout = 0.3 if row.has_dropout else 0.0
    return dense(Case(**inputs, p_dropout=p_dropout, philox=PhiloxState(seed + 1, 2)))
