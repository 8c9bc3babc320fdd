"""Which kernel would run, and why: every kernel with its refusal or its cost, and the one that is chosen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import checks
from .api import library_for
from .device import DeviceInfo
from .errors import ArgumentError
from .plan import make_params
from .problem import Causal, Problem
from .registry import Family
from .select import Candidate, Choice, candidates, choose, mismatches

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` found. `str()` is a table: legal kernels cheapest first, then the refused ones."""

    problem: Problem
    device: DeviceInfo
    library: Path
    choice: Choice
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.problem}",
            f"device   {self.device.name}, {self.device.sms} SMs",
            f"library  {self.library}",
            f"chosen   {self.choice.kernel.name} ({self.choice.reason})",
            "",
        ]
        width = max(len(candidate.kernel.name) for candidate in self.candidates)
        lines.append(f"  {'kernel':{width}}  {'CTAs':>7} {'waves':>7} {'useful':>7} {'model us':>9}  verdict")
        others: Counter[str] = Counter()
        for candidate in self.candidates:
            kernel = candidate.kernel
            found = mismatches(kernel, self.problem)
            if found:
                others[found[0]] += 1
                continue
            mark = "*" if kernel is self.choice.kernel else " "
            cost, verdict = candidate.estimate, candidate.refusal or "legal"
            numbers = " " * 33
            if cost:
                numbers = f"{cost.ctas:7} {cost.waves:7.2f} {cost.useful:7.0%} {cost.microseconds:9.2f}"
            lines.append(f"{mark} {kernel.name:{width}}  {numbers}  {verdict}")
        lines += [f"  {count} kernels refused: {reason}" for reason, count in others.items()]
        return "\n".join(lines)


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: Causal | str | None = None,
    scale: float | None = None,
    enable_gqa: bool = True,
    kernel: str | None = None,
    family: Family = Family.FMHA_FWD,
) -> Explanation:
    """The choice that `attention` (or, for Family.UNFUSED, `unfused_attention`) would make. Launches nothing.

    Takes their arguments and raises their errors; shapes as there. Not for problems without any score to
    compute.
    """
    operands = checks.canonical_operands(query, key, value, enable_gqa=enable_gqa)
    problem = checks.problem_of(operands, checks.causal_alignment(causal))
    if problem.is_empty:
        raise ArgumentError(f"{problem} runs no kernel: its result is empty or zero")
    native, device = library_for(operands.query)
    q, k, v = (checks.aligned(tensor) for tensor in (operands.query, operands.key, operands.value))
    params = make_params(problem, checks.softmax_scale(scale, problem.head_dim), q, k, v, q, None)
    choice = choose(native, problem, family, device, params, name=kernel)
    found = candidates(native, problem, family, device, params)
    return Explanation(problem, device, native.path, choice, tuple(found))
