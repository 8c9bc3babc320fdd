"""Journal → what each kernel needs at each bucket → tuned table.

Several problems can share a bucket: masks of several kinds, say. There, a kernel's time is the geometric mean
over all of them, and only kernels that were measured at each count. Kernels that failed anywhere are out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.choice.select import families_with_plain, order
from sdpa_cutlass.choice.tuned_table import CHECK_PASSED, Bucket, TunedRow, TunedTable
from sdpa_cutlass.cli.tuning.journal import Entry, Journal, Measured
from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.problem import Problem

_NANO = 1e9


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One bucket: microseconds of every kernel that is right at it, the fastest first."""

    bucket: Bucket
    cases: tuple[str, ...]
    problem: Problem  # of the first case
    times: tuple[tuple[str, float], ...]
    max_err_out: float  # of the fastest
    model_kernel: str  # the cost model's choice among `times`

    @property
    def kernel(self) -> str:
        """The fastest."""
        return self.times[0][0]

    @property
    def best_us(self) -> float:
        """Its time."""
        return self.times[0][1]

    @property
    def model_us(self) -> float:
        """The time of the cost model's choice."""
        return dict(self.times)[self.model_kernel]

    @property
    def regret(self) -> float:
        """How many times longer the cost model's choice takes."""
        return self.model_us / self.best_us


def choices(journals: Sequence[Journal]) -> list[Choice]:
    """One choice per bucket that some kernel was right at, in the order of the journals.

    A problem that several journals have is one problem: they measured different kernels, of the parts of a
    space that is too large for one library.
    """
    failed = {name for journal in journals for name in journal.failures}
    kernels = {name: kernel for journal in journals for name, kernel in journal.kernels.items()}
    merged = Journal(env={}, device=journals[0].device, seed=0, kernels=kernels)
    for journal in journals:
        for entry in journal.entries.values():
            merged.add(entry)
    by_bucket: dict[Bucket, list[Entry]] = {}
    for entry in merged.entries.values():
        by_bucket.setdefault(entry.bucket, []).append(entry)
    made = (_choice(bucket, entries, failed, merged) for bucket, entries in by_bucket.items())
    return [choice for choice in made if choice is not None]


def _choice(bucket: Bucket, entries: list[Entry], failed: set[str], journal: Journal) -> Choice | None:
    right = [
        {item.kernel: item for item in entry.measured if item.status == "ok" and item.kernel not in failed}
        for entry in entries
    ]
    right = [found for found in right if found]
    if not right:
        return None
    common = set(right[0]).intersection(*right[1:])
    if not common:
        return None
    times = [(_geometric_mean(_time(found[name]) for found in right), name) for name in common]
    fastest = sorted(times)  # of equal times, the first by name
    problem = entries[0].problem
    return Choice(
        bucket=bucket,
        cases=tuple(entry.case for entry in entries),
        problem=problem,
        times=tuple((name, microseconds) for microseconds, name in fastest),
        max_err_out=max(found[fastest[0][1]].max_err_out or 0.0 for found in right),
        model_kernel=model_choice([journal.kernels[name] for name in common], problem, journal.device),
    )


def _time(measured: Measured) -> float:
    assert measured.gpu_us is not None  # journal.py lets no "ok" pass without
    return measured.gpu_us


def model_choice(kernels: Iterable[KernelInfo], problem: Problem, device: DeviceInfo) -> str:
    """The one of `kernels` that select.py takes without a table."""
    rows = list(kernels)
    plain = families_with_plain(rows)
    return min(rows, key=lambda row: order(row, estimate(row, problem, device), problem, plain)).name


def _geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def geometric_mean(values: Iterable[float]) -> float:
    """Of positive values; 1 of none."""
    found = list(values)
    return _geometric_mean(found) if found else 1.0


def make_table(journal: Journal) -> TunedTable | None:
    """The tuned table of a journal, or None when it has no right kernel at any bucket."""
    rows = tuple(_row(choice) for choice in choices([journal]))
    if not rows:
        return None
    library = journal.env.get("library")
    library = library if isinstance(library, dict) else {}
    return TunedTable(
        gpu=journal.device.name,
        compute_capability=journal.device.compute_capability,
        sms=journal.device.sms,
        library=_text(library.get("version")),
        digest=str(library.get("digest") or "0" * 16),
        driver=_text(journal.env.get("driver")),
        torch=_text(journal.env.get("torch")),
        date=str(journal.env.get("date"))[:10],
        rows=rows,
    )


def _row(choice: Choice) -> TunedRow:
    runner_up, runner_up_us = choice.times[1] if len(choice.times) > 1 else (None, 0.0)
    return TunedRow(
        bucket=choice.bucket,
        kernel=choice.kernel,
        gpu_ns=max(1, round(1e3 * choice.best_us)),
        check=CHECK_PASSED,
        max_error_nano=round(_NANO * choice.max_err_out),
        runner_up=runner_up,
        runner_up_ns=max(1, round(1e3 * runner_up_us)) if runner_up else 0,
    )


def _text(value: Any) -> str:
    return str(value) if value else "unknown"
