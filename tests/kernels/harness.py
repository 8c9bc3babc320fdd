"""Runs one kernel on guarded tensors: NaNs around q, k and v, and a watch on what lies around the results.

Inputs get NaN rows behind every head's last row and NaN guards around the whole allocation, so that a value
read from beyond a tensor shows in the result. Outputs start as NaN with a recognisable payload, and every
element outside them has to keep it. General kernels have their own problems and their own run: general.py.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import torch

from sdpa_cutlass.call import checks
from sdpa_cutlass.call.launch import Plan, make_params
from sdpa_cutlass.choice.select import refusal
from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.problem import Causal, DType
from sdpa_cutlass.public.api import library_for

HOST_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 0  # 0: all cores
TORCH_DTYPES = {DType.F16: torch.float16, DType.BF16: torch.bfloat16}
_INTEGERS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
OUTPUT_POISON = {torch.float16: 0x7E57, torch.bfloat16: 0x7FD7, torch.float32: 0x7FC0BEEF}  # NaNs
INPUT_POISON = {
    torch.float16: 0x7E11,
    torch.bfloat16: 0x7FC1,
}  # others, to tell a NaN read from one left over
_GUARD = 4096  # elements in front of and behind a tensor: what a wrong stride reaches, too, in these sizes
SPARE_ROWS = 40  # NaN rows behind each head


@dataclass(frozen=True)
class TestedKernel:
    """A registry row and the torch device to run it on.

    `num_splits`: CTAs that share the keys of a tile, from 1 on in split kernels, 0 in all others.
    """

    __test__ = False
    device: str
    info: KernelInfo
    num_splits: int = 0

    def __str__(self) -> str:
        return f"{self.info.name}-{self.num_splits}" if self.num_splits > 1 else self.info.name

    def with_splits(self, num_splits: int) -> TestedKernel:
        return replace(self, num_splits=num_splits)

    @property
    def max_splits(self) -> int:
        """What launch.cuh allows."""
        return 1024

    @property
    def dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.info.dtype]

    @property
    def alignments(self) -> tuple[Causal | None, ...]:
        """The causal alignments that this kernel computes."""
        if self.info.is_general:
            return (None, *Causal)
        return tuple(Causal) if self.info.is_causal else (None,)

    @property
    def library(self) -> Library:
        return library_for(torch.empty(0, device=self.device))[0]


class Guarded:
    """A tensor [B, H, S, ...] inside a poisoned allocation.

    Behind the rows of each head lie `spare_rows` poisoned rows, behind each row `spare_columns` poisoned
    elements. The checks leave out the rows that are True in `unused` [S]: those count as outside.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: str,
        *,
        poison: int,
        spare_rows: int = 0,
        spare_columns: int = 0,
        bshd: bool = False,
        unused: torch.Tensor | None = None,
    ) -> None:
        self._poison = poison
        batch, heads, seqlen, *rest = shape
        width = math.prod(rest) + spare_columns
        rows = seqlen + spare_rows
        strides = (
            (rows * heads * width, width, heads * width)
            if bshd
            else (heads * rows * width, rows * width, width)
        )
        if rest:
            strides = (*strides, 1)
        size = batch * heads * rows * width + 2 * _GUARD
        self._storage = torch.full((size,), self._poison, dtype=_INTEGERS[dtype], device=device)
        self.tensor = self._storage.view(dtype).as_strided(shape, strides, _GUARD)
        self._unused = torch.zeros(seqlen, dtype=torch.bool) if unused is None else unused
        self._unused = self._unused.to(device).reshape(seqlen, *(1 for _ in rest)).expand(shape)
        self._outside = torch.ones(size, dtype=torch.bool, device=device)
        self._outside.as_strided(shape, strides, _GUARD).copy_(self._unused)

    def check_untouched(self, what: str) -> None:
        """Fails when anything outside the tensor was written."""
        changed = self._outside & (self._storage != self._poison)
        assert not changed.any(), f"{what}: {int(changed.sum())} elements outside the tensor were written"

    def check_written(self, what: str) -> None:
        """Fails when an element of the tensor still holds the poison."""
        integers = self.tensor.view(_INTEGERS[self.tensor.dtype])
        left = int(((integers == self._poison) & ~self._unused).sum())
        assert left == 0, f"{what}: {left} elements were never written"


@dataclass(frozen=True)
class Inputs:
    """q, k, v [B, H, S, D] on the device of a kernel."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def on(self, device: str) -> Inputs:
        return Inputs(self.q.to(device), self.k.to(device), self.v.to(device))


def random_inputs(
    kernel: TestedKernel,
    seqlen_q: int,
    seqlen_k: int,
    *,
    batch: int = 1,
    heads: int = 1,
    heads_kv: int | None = None,
    bshd: bool = False,
    seed: int = 0,
) -> Inputs:
    """Seeded normal values in guarded memory.

    bf16 values of V are scaled by 1/8: rounding P to bf16 alone may cost 2^-8·|v|, which the numerics
    rule's absolute bound of 1e-3 does not leave room for at |v| = 1. The scaling is exact, so the kernel is
    tested as strictly.
    """
    generator = torch.Generator().manual_seed(seed + 1000003 * seqlen_q + 1009 * seqlen_k)
    head_dim = kernel.info.head_dim
    heads_kv = heads if heads_kv is None else heads_kv
    tensors = []
    for shape in ((batch, heads, seqlen_q, head_dim), *((batch, heads_kv, seqlen_k, head_dim),) * 2):
        poison = INPUT_POISON[kernel.dtype]
        guarded = Guarded(shape, kernel.dtype, kernel.device, poison=poison, spare_rows=SPARE_ROWS, bshd=bshd)
        guarded.tensor.copy_(torch.randn(shape, generator=generator))
        tensors.append(guarded.tensor)
    if kernel.dtype is torch.bfloat16:
        tensors[2].mul_(0.125)
    return Inputs(*tensors)


def run_kernel(
    kernel: TestedKernel,
    inputs: Inputs,
    *,
    causal: Causal | None = None,
    scale: float | None = None,
    with_lse: bool = True,
    bshd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, softmax_lse) of this very kernel. Fails when it writes outside them or not all of them."""
    operands = checks.canonical_operands(inputs.q, inputs.k, inputs.v, enable_gqa=True)
    problem = checks.problem_of(operands, causal)
    shape = tuple(inputs.q.shape)
    poison = OUTPUT_POISON[kernel.dtype]
    out = Guarded(shape, kernel.dtype, kernel.device, poison=poison, spare_rows=SPARE_ROWS, bshd=bshd)
    lse = Guarded(shape[:3], torch.float32, kernel.device, poison=OUTPUT_POISON[torch.float32])
    library, device = library_for(inputs.q)
    scale = checks.softmax_scale(scale, problem.head_dim)
    q, k, v = operands.query, operands.key, operands.value
    target = lse.tensor if with_lse else None
    params = make_params(problem, scale, q, k, v, out.tensor, target)
    reason = refusal(library, kernel.info, problem, device, params)
    assert reason is None, f"{kernel} refuses {problem}: {reason}"
    plan = Plan(library, kernel.info, problem, params, device)
    plan.launch(q, k, v, out.tensor, target)
    if kernel.device == "cuda":
        torch.cuda.synchronize()
    out.check_untouched("out")
    out.check_written("out")
    lse.check_untouched("softmax_lse")
    if with_lse:
        lse.check_written("softmax_lse")
    return out.tensor, target
