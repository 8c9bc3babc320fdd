"""How well the cost model predicts what was measured.

    regret            time of the model's choice over that of the fastest kernel, per bucket; 1 is perfect
    rank correlation  Spearman's ρ between predicted and measured times of a bucket's kernels; 1 is perfect.
                      Spearman, "The proof and measurement of association between two things" (1904)
    scale             geometric mean of predicted over measured times: absolute, so clocks count

Predictions are made anew from the registry rows in the journal, by the cost model as it is now: so constants
can be fitted to a journal on any machine. ρ needs at least LEAST_KERNELS kernels at a bucket.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.cli.tuning.derive import Choice, geometric_mean
from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.registry import KernelInfo

LEAST_KERNELS = 3


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The model's quality over some buckets. Without a bucket of LEAST_KERNELS kernels, the ρ are None."""

    what: str
    buckets: int
    mean_regret: float
    worst_regret: float
    worst: str  # the bucket of the worst regret
    hits: int  # buckets whose fastest kernel was the model's choice
    mean_rho: float | None
    least_rho: float | None
    scale: float


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Spearman's rank correlation of two equally long sequences; None when one of them is constant."""
    a, b = _ranks(xs), _ranks(ys)
    mean = (len(a) + 1) / 2
    spread_a = math.sqrt(sum((rank - mean) ** 2 for rank in a))
    spread_b = math.sqrt(sum((rank - mean) ** 2 for rank in b))
    if not spread_a or not spread_b:
        return None
    together = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    return together / (spread_a * spread_b)


def _ranks(values: Sequence[float]) -> list[float]:
    """1 for the least; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for i in order[start:end]:
            ranks[i] = (start + 1 + end) / 2
        start = end
    return ranks


def quality(
    what: str, found: Sequence[Choice], kernels: Mapping[str, KernelInfo], device: DeviceInfo
) -> Quality:
    """The model's quality over the buckets `found`, of which there is at least one."""
    rhos, scales = [], []
    for choice in found:
        predicted = [estimate(kernels[name], choice.problem, device).microseconds for name, _ in choice.times]
        measured = [microseconds for _, microseconds in choice.times]
        scales += [p / m for p, m in zip(predicted, measured, strict=True)]
        rho = spearman(predicted, measured) if len(measured) >= LEAST_KERNELS else None
        if rho is not None:
            rhos.append(rho)
    worst = max(found, key=lambda choice: choice.regret)
    return Quality(
        what=what,
        buckets=len(found),
        mean_regret=geometric_mean(choice.regret for choice in found),
        worst_regret=worst.regret,
        worst=str(worst.bucket),
        hits=sum(choice.kernel == choice.model_kernel for choice in found),
        mean_rho=statistics.fmean(rhos) if rhos else None,
        least_rho=min(rhos, default=None),
        scale=geometric_mean(scales),
    )


def by_groups(
    found: Sequence[Choice], kernels: Mapping[str, KernelInfo], device: DeviceInfo
) -> list[Quality]:
    """Over all buckets, then by head_dim, kind and causal, dtype and size."""
    groupings: list[Callable[[Choice], str]] = [
        lambda choice: f"head_dim {choice.bucket.head_dim:3}",
        lambda choice: f"{choice.bucket.kind}{', causal' if choice.bucket.causal else ''}",
        lambda choice: choice.bucket.dtype.value,
        _size,
    ]
    rows = [quality("all", found, kernels, device)]
    for group_of in groupings:
        groups = sorted({group_of(choice) for choice in found})
        if len(groups) > 1:
            for group in groups:
                some = [choice for choice in found if group_of(choice) == group]
                rows.append(quality(group, some, kernels, device))
    return rows


def _size(choice: Choice) -> str:
    """A name that sorts by size."""
    bucket = choice.bucket
    if bucket.seqlen_q <= 16:
        return "few queries"
    tiles = bucket.rows // 64
    return "fewer than 256 tiles of 64 rows" if tiles < 256 else "many tiles"
