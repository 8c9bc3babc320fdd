"""Random problems for random general and split kernels, against float64.

Hypothesis draws a `Recipe`, shrinks one that fails to the simplest that still does, and keeps it in
.hypothesis/ so that the next run starts with it. With CI in the environment the draws are always the same.
SDPA_FUZZ_EXAMPLES sets how many recipes are tried.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sdpa_cutlass.dropout import PhiloxState
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo, Op, Takes
from sdpa_cutlass.problem import Causal
from sdpa_cutlass.public.api import kernels
from tests.kernels.general import Case, Lengths, random_qkv, random_sinks
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.masks import LAYOUTS, MASK_SHAPES, mask_dtypes, random_mask

EXAMPLES = int(os.environ.get("SDPA_FUZZ_EXAMPLES", "1000"))
_CI = "CI" in os.environ


@dataclass(frozen=True, kw_only=True)
class MaskRecipe:
    dtype: torch.dtype
    shape: str
    layout: str
    density: float
    block: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a Case is made from, small enough to read."""

    kernel: KernelInfo
    num_splits: int
    heads_kv: int
    heads_per_group: int
    rows: tuple[int, ...]  # of each sequence
    keys: tuple[int, ...]
    packed: bool
    seqlens_q: tuple[int, ...] | None
    seqlens_k: tuple[int, ...] | None
    spare_rows: int  # before and behind packed sequences
    head_dim: int
    head_dim_v: int
    bshd: bool
    spare_columns: int
    causal: Causal | None
    scale: float | None
    mask: MaskRecipe | None
    p_dropout: float
    philox: PhiloxState
    philox_on_device: bool
    window: tuple[int, int] | None
    sinks: tuple[torch.dtype, float] | None  # and how far they lie from each other
    with_lse: bool
    seed: int  # of the values, and of the host's schedule

    def case(self, kernel: TestedKernel) -> Case:
        batch, heads = len(self.rows), self.heads_kv * self.heads_per_group
        sums = [list(itertools.accumulate(s, initial=self.spare_rows)) for s in (self.rows, self.keys)]
        packed_sizes = [s[-1] + self.spare_rows for s in sums]
        inputs = random_qkv(
            kernel,
            *(packed_sizes if self.packed else (max(self.rows), max(self.keys))),
            batch=1 if self.packed else batch,
            heads=heads,
            heads_kv=self.heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            bshd=self.bshd,
            spare_columns=self.spare_columns,
            seed=self.seed,
        )
        mask = None
        if self.mask is not None:
            shape = MASK_SHAPES[self.mask.shape](batch, heads, max(self.rows), max(self.keys))
            mask = random_mask(
                self.mask.dtype,
                shape,
                kernel.device,
                seed=self.seed,
                density=self.mask.density,
                layout=self.mask.layout,
                block=self.mask.block,
            )
        lengths = [
            Lengths(seqlens=seqlens, cu_seqlens=tuple(ends) if self.packed else None)
            for seqlens, ends in zip((self.seqlens_q, self.seqlens_k), sums, strict=True)
        ]
        return Case(
            **inputs,
            causal=self.causal,
            scale=self.scale,
            mask=mask,
            lengths_q=lengths[0],
            lengths_k=lengths[1],
            p_dropout=self.p_dropout,
            philox=self.philox,
            philox_on_device=self.philox_on_device,
            window=self.window,
            sinks=None if self.sinks is None else random_sinks(kernel, heads, *self.sinks, seed=self.seed),
        )


def limits(size: int) -> st.SearchStrategy[int]:
    """Of a window: none, a few keys, about as many as there are, any number."""
    return st.integers(-1, 20) | st.integers(0, size + 3) | st.integers(-1, 2**31 - 1)


@st.composite
def recipes(draw: st.DrawFn, rows_of_registry: list[KernelInfo]) -> Recipe:
    kernel = draw(st.sampled_from(rows_of_registry))
    batch = draw(st.integers(1, 3))
    packed = draw(st.booleans())
    shortest = 0 if packed else 1

    def sizes(block: int, *others: st.SearchStrategy[int]) -> tuple[int, ...]:
        size = st.one_of(st.integers(shortest, 20), st.integers(shortest, 2 * block + 20), *others)
        drawn = [draw(size) for _ in range(batch)] if packed else [draw(size)] * batch
        return tuple(drawn) if any(drawn) else (1, *drawn[1:])

    num_splits = draw(st.integers(1, 9)) if kernel.is_split else 0
    rows = sizes(kernel.block_m)
    if kernel.family is Family.FMHA_FWD_SM90 and kernel.mask_types:  # enough to find what a mask hides ahead
        keys = sizes(kernel.block_n, st.integers(4, 6).map(lambda blocks: blocks * kernel.block_n))
    else:
        keys = sizes(kernel.block_n * max(num_splits // 2, 1))

    def seqlens(of: tuple[int, ...]) -> tuple[int, ...] | None:
        return draw(st.none() | st.tuples(*(st.integers(-1, size + 3) for size in of)))

    dims = st.integers(1, kernel.head_dim // 8).map(lambda eighths: 8 * eighths)
    head_dim = draw(dims)
    words = st.integers(0, 2**64 - 1)
    p_dropout = st.floats(1e-3, 0.99) | st.sampled_from([0.5, 0.1])
    return Recipe(
        kernel=kernel,
        num_splits=num_splits,
        heads_kv=draw(st.integers(1, 2)),
        heads_per_group=draw(st.integers(1, 9 if kernel.is_split else 3)),
        rows=rows,
        keys=keys,
        packed=packed,
        seqlens_q=seqlens(rows),
        seqlens_k=seqlens(keys),
        spare_rows=draw(st.integers(0, 5)) if packed else 0,
        head_dim=head_dim,
        head_dim_v=draw(st.just(head_dim) | dims),
        bshd=draw(st.booleans()),
        spare_columns=draw(st.sampled_from([0, 8])),
        causal=draw(st.none() | st.sampled_from(Causal)),
        scale=draw(st.none() | st.sampled_from([0.0, -0.3, 1.0, 5.0])),
        mask=None
        if not kernel.mask_types
        else draw(
            st.none()
            | st.builds(
                MaskRecipe,
                dtype=st.sampled_from(mask_dtypes(kernel)),
                shape=st.sampled_from(sorted(MASK_SHAPES)),
                layout=st.sampled_from(sorted(LAYOUTS)),
                density=st.sampled_from([1.0, 0.7, 0.2, 0.02]),
                block=st.sampled_from([1, 32, 128]),
            )
        ),
        p_dropout=draw(p_dropout) if kernel.has_dropout else 0.0,
        philox=PhiloxState(draw(words), draw(words)) if kernel.has_dropout else PhiloxState(0, 0),
        philox_on_device=draw(st.booleans()) if kernel.has_dropout else False,
        window=draw(st.none() | st.tuples(limits(max(keys)), limits(max(rows))))
        if Takes.WINDOW in kernel.takes
        else None,
        sinks=draw(
            st.none()
            | st.tuples(
                st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
                st.sampled_from([0.0, 1.0, 30.0]),
            )
        ),
        with_lse=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.slow
def test_random_problems(device: str) -> None:
    found = kernels(Target.CUDA if device == "cuda" else Target.HOST)
    rows = [row for row in found if row.op is Op.FORWARD and row.is_general]
    rows = [row for row in rows if row.accuracy is Accuracy.EXACT]
    assert rows

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=_CI,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(recipe=recipes(rows))
    def check(recipe: Recipe) -> None:
        kernel = TestedKernel(device, recipe.kernel, recipe.num_splits)
        if device == "cpu":
            kernel.library.host_configure(schedule_seed=recipe.seed, num_threads=HOST_THREADS)
        check_case(
            kernel,
            recipe.case(kernel),
            with_lse=recipe.with_lse,
            bshd=recipe.bshd,
            spare_columns=recipe.spare_columns,
        )

    try:
        check()
    finally:
        if device == "cpu":
            TestedKernel(device, rows[0]).library.host_configure(num_threads=HOST_THREADS)
