"""What a call costs whose mask is copied first: a large or long one that kernels read element by element.

Which masks those are says mask_reads.py. The copy is torch's, of the elements that the mask has of its own;
the kernel then reads rows that begin where vectors may.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...problem import MASK_ALIGNMENT
from ..mask_reads import RUNS, copies_unaligned
from .model import CLOCK_GHZ, Model

if TYPE_CHECKING:
    from ...library.device import DeviceInfo
    from ...library.registry import KernelInfo
    from ...problem import Problem

_COPY_US = 3.0
_COPY_US_PER_ELEMENT = 2.1e-6

Build = Callable[["KernelInfo", "Problem", "DeviceInfo"], Model]


def with_copies(build: Build) -> Build:
    """`build`, for problems whose masks calls may copy."""

    @functools.wraps(build)
    def model(kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> Model:
        found = build(kernel, problem, device)
        if problem.reads_mask_by(RUNS[kernel.family.value]):
            return found
        aligned = dataclasses.replace(problem, mask_alignment=MASK_ALIGNMENT)
        return _CopiedMask(found, build(kernel, aligned, device))

    return model


class _CopiedMask(Model):
    """The price with the mask as it lies, or where calls copy it with its copy."""

    def __init__(self, as_it_lies: Model, aligned: Model) -> None:
        super().__init__(as_it_lies.kernel, as_it_lies.device)
        self._as_it_lies, self._aligned = as_it_lies, aligned
        self.keys_of_a_price, self.rows_of_a_price = aligned.keys_of_a_price, aligned.rows_of_a_price

    def cost(self, problem: Problem) -> tuple[float, int]:
        if not copies_unaligned(problem.scores, problem.seqlen_k):
            return self._as_it_lies.cost(problem)
        cycles, num_splits = self._aligned.cost(problem)
        copy_us = _COPY_US + _COPY_US_PER_ELEMENT * problem.mask_elements
        return cycles + copy_us * CLOCK_GHZ * 1e3, num_splits

    def may_split(self, rows: int, heads: int) -> bool:
        return self._aligned.may_split(rows, heads)

    def leaves_rows_out(self, seqlen_q: int) -> bool:
        return self._aligned.leaves_rows_out(seqlen_q)

    def grid(self, problem: Problem, num_splits: int) -> tuple[int, float]:
        return self._aligned.grid(problem, num_splits)
