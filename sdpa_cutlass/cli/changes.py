"""What changed between two result files: times problem by problem, with the noise of both respected.

A ratio is the later GPU time over the earlier one, so more than 1 means slower. A change counts when it is
larger than the noise: the spreads of both times (gpu_us_spread), which say what differs within a run, and a
share of the earlier time, which stands for what differs between runs. That share is BETWEEN_RUNS of the
problem's suite. It was set by one library's two runs on two H200s (2026-11-22): beyond the spreads, its times
differed by 0.6 % at most in `mission`, 0.5 % in `small`, 1.1 % in `long`, and 2.1 % in `masks`, `decode` and
`real`. tests/cli/test_changes.py holds the rule against those two files. A row of this library
that became slower, or that could be trusted before and cannot now, is a regression; what others lost is
shown, but is none. Only GPU times are compared: those of the host library mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sdpa_cutlass.cli import FAILED, OK, CommandError, results, summary
from sdpa_cutlass.cli.results import Results, Row

BETWEEN_RUNS = {"mission": 0.01, "small": 0.01, "long": 0.02}  # of the earlier time, by suite
ELSEWHERE_BETWEEN_RUNS = 0.03
MACHINE_KEYS = ("gpu", "sm", "driver", "cuda", "torch", "package", "library", "compiled_launcher", "python")


class Verdict(enum.Enum):
    """What became of one row."""

    FASTER = "faster"
    SAME = "same"
    SLOWER = "slower"
    BROKEN = "broken"  # could be trusted before and cannot now
    MENDED = "mended"
    NOT_TIMED = "not timed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One problem and provider in both files; times and their noise together in microseconds."""

    before: Row
    after: Row
    ratio: float | None
    noise_us: float
    verdict: Verdict

    @property
    def is_regression(self) -> bool:
        """True for what this library lost."""
        is_ours = self.after.provider in (*summary.OURS, *summary.OWN_CALLS)
        return is_ours and self.verdict in (Verdict.SLOWER, Verdict.BROKEN)

    @property
    def label(self) -> str:
        """Suite, problem, dtype and provider."""
        problem = summary.Comparison({self.after.provider: self.after}).label
        return f"{self.after.suite}, {problem}, {self.after.dtype}, {self.after.provider}"

    def to_json(self) -> dict[str, Any]:
        """The change as plain values."""
        problem = dict(zip(results.PROBLEM_KEYS, self.after.problem, strict=True))
        return problem | {
            "provider": self.after.provider,
            "before_us": self.before.gpu_us,
            "after_us": self.after.gpu_us,
            "ratio": self.ratio,
            "noise_us": self.noise_us,
            "verdict": self.verdict.value,
            "is_regression": self.is_regression,
            "kernel_before": self.before.kernel,
            "kernel_after": self.after.kernel,
            "status_after": self.after.status,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Changes:
    """All rows that two files share, how many only one has, and what differs between their machines."""

    rows: Sequence[Change]
    only_before: int
    only_after: int
    machine: dict[str, tuple[Any, Any]]

    @property
    def regressions(self) -> list[Change]:
        """What this library lost, the greatest loss first."""
        lost = [change for change in self.rows if change.is_regression]
        return sorted(lost, key=lambda change: -(change.ratio or math.inf))

    def means(self) -> dict[tuple[str, str], tuple[int, float]]:
        """(suite, provider) → number of timed problems, geometric mean of their ratios."""
        logs: dict[tuple[str, str], list[float]] = {}
        for change in self.rows:
            if change.ratio is not None:
                logs.setdefault((change.after.suite, change.after.provider), []).append(
                    math.log(change.ratio)
                )
        return {key: (len(values), math.exp(sum(values) / len(values))) for key, values in logs.items()}

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "machine": {key: list(values) for key, values in self.machine.items()},
            "only_before": self.only_before,
            "only_after": self.only_after,
            "regressions": len(self.regressions),
            "means": [
                {"suite": suite, "provider": provider, "problems": count, "ratio": mean}
                for (suite, provider), (count, mean) in self.means().items()
            ],
            "rows": [change.to_json() for change in self.rows],
        }


def find(before: Results, after: Results) -> Changes:
    """Compares two results."""
    old, new = _by_key(before.rows), _by_key(after.rows)
    return Changes(
        rows=[_change(old[key], row) for key, row in new.items() if key in old],
        only_before=len(old.keys() - new.keys()),
        only_after=len(new.keys() - old.keys()),
        machine={
            key: (before.env.get(key), after.env.get(key))
            for key in MACHINE_KEYS
            if before.env.get(key) != after.env.get(key)
        },
    )


def _by_key(rows: Iterable[Row]) -> dict[tuple[Any, ...], Row]:
    return {(*row.problem, row.provider): row for row in rows}


def _change(before: Row, after: Row) -> Change:
    share = BETWEEN_RUNS.get(after.suite, ELSEWHERE_BETWEEN_RUNS)
    noise_us = (before.gpu_us_spread or 0.0) + (after.gpu_us_spread or 0.0) + share * (before.gpu_us or 0.0)
    ratio = None
    if before.ok != after.ok:
        verdict = Verdict.BROKEN if before.ok else Verdict.MENDED
    elif not after.ok or not before.gpu_us or not after.gpu_us:
        verdict = Verdict.NOT_TIMED
    else:
        ratio = after.gpu_us / before.gpu_us
        if abs(after.gpu_us - before.gpu_us) <= noise_us:
            verdict = Verdict.SAME
        else:
            verdict = Verdict.SLOWER if ratio > 1 else Verdict.FASTER
    return Change(before=before, after=after, ratio=ratio, noise_us=noise_us, verdict=verdict)


def load(path: Path) -> Results:
    """Reads a result file. Raises CommandError when it cannot be read or is none."""
    try:
        return results.load(path)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
    except (results.ResultFormatError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} is no result file: {error}") from error


def to_text(found: Changes) -> str:
    """The comparison for people: machines, every change that counts, means, and regressions at the end."""
    lines = [f"{key} differs: {old} → {new}" for key, (old, new) in found.machine.items()]
    for change in found.rows:
        if change.ratio is not None:
            times = f"{change.before.gpu_us:.4g} → {change.after.gpu_us:.4g} us, noise {change.noise_us:.2g}"
            lines.append(f"{change.ratio:.3f}  {change.verdict.value:7} {change.label}: {times}")
        elif change.verdict is not Verdict.NOT_TIMED:
            lines.append(f"-      {change.verdict.value:7} {change.label}: {change.after.status}")
    for (suite, provider), (count, mean) in found.means().items():
        lines.append(f"mean of {suite}, {provider}: {mean:.3f} over {count} problems")
    lines.append(
        f"rows in both: {len(found.rows)}, only before: {found.only_before}, only after: {found.only_after}"
    )
    lines.append(f"regressions: {len(found.regressions)}")
    lines += [f"  {change.label}: {change.verdict.value}" for change in found.regressions]
    return "\n".join(lines)


def report(found: Changes, *, as_json: bool = False) -> int:
    """Prints the comparison; returns the exit status, FAILED with regressions."""
    if not found.rows:
        raise CommandError("the two results share no problem and provider: nothing can be compared")
    print(json.dumps(found.to_json(), indent=1) if as_json else to_text(found))
    return FAILED if found.regressions else OK


def run(options: argparse.Namespace) -> int:
    """Runs the command `changes BEFORE AFTER`; returns the exit status."""
    return report(find(load(options.before), load(options.after)), as_json=options.json)
