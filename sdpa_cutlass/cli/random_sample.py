"""The other kernels at a random problem: what `tune` would measure there, and which of them is chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdpa_cutlass.choice.select import ranking
from sdpa_cutlass.cli.random_report import Sample
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.tuning import sweep
from sdpa_cutlass.cli.tuning.tasks import problem_of
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST, cuda_device
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import DType, Problem

if TYPE_CHECKING:
    import torch

BUDGET_S = 0.02  # of GPU time for each kernel
FASTEST = 3  # are measured again, next to the chosen one
LONGER = 4  # times BUDGET_S, and as many replays


@dataclasses.dataclass(frozen=True)
class Posed:
    """A case as sweep.py takes it."""

    case: Case
    dtype: DType

    @property
    def name(self) -> str:
        """Of the case."""
        return self.case.name

    @property
    def problem(self) -> Problem:
        """With its mask, lengths and dropout."""
        return problem_of(self.case, self.dtype)


def measure(case: Case, dtype: DType, device: torch.device, seed: int, repeats: int) -> Sample | None:
    """Times the kernels worth trying, then the chosen one and the fastest again, on inputs in another place.

    None where there is no kernel or the chosen one was not measured. The choice is the cost model's: what was
    tuned on this GPU is not asked.
    """
    posed = Posed(case, dtype)
    is_gpu = device.type == "cuda"
    native = library(Target.CUDA if is_gpu else Target.HOST)
    card = cuda_device(device.index or 0) if is_gpu else HOST
    kernels = sweep.candidates(native, posed, card)
    if not kernels:
        return None
    chosen = ranking(native, posed.problem, Family.FMHA_FWD, card)[0][0].name

    def measured(some: Sequence[KernelInfo], longer: int) -> dict[str, float]:
        measurer = sweep.Measurer(device, seed=seed, repeats=longer * repeats, budget_s=longer * BUDGET_S)
        found = measurer(posed, some)
        return {one.kernel: one.gpu_us for one in found if one.gpu_us is not None and one.status == "ok"}

    try:
        times = measured(kernels, 1)
        if chosen not in times:
            return None
        names = {chosen, *sorted(times, key=times.__getitem__)[:FASTEST]}
        again = measured([kernel for kernel in kernels if kernel.name in names], LONGER)
    except sweep.measuring_failures():
        return None
    return Sample(problem=posed.name, chosen=chosen, times=times, again=again)
