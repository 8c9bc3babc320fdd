"""Rows → comparisons: the rows of one problem side by side, ratios between them, and the overall picture.

A speed-up is peer time / fused time, so more than 1 means that the fused kernel is faster. Only rows whose
status is ok take part. "best torch" is the fastest of torch's own backends, without the naive chain.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from sdpa_cutlass.cli.results import Results, Row

TORCH_BACKENDS = ("torch_flash", "torch_cudnn", "torch_efficient", "torch_math")
OURS = ("fused", "plain", "piped")
OWN_CALLS = ("plan_run", "attention_out", "sdpa", "plan_make")  # of suite `wall`


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One problem: its rows by provider, failed ones included."""

    rows: Mapping[str, Row]

    @property
    def problem(self) -> Row:
        """Any row: all share the problem's keys."""
        return next(iter(self.rows.values()))

    @property
    def label(self) -> str:
        """The problem in one cell, such as `B8 H32 S2048 D64 causal` or `B8 H32 S2048 D64 padding`."""
        row = self.problem
        heads = str(row.num_heads_q)
        if row.num_heads_kv != row.num_heads_q:
            heads += f"/{row.num_heads_kv}"
        seqlen = str(row.seqlen_q) if row.seqlen_q == row.seqlen_k else f"{row.seqlen_q}/{row.seqlen_k}"
        words = [f"B{row.batch} H{heads} S{seqlen} D{row.head_dim}"]
        words += ["causal"] * row.causal
        words += [row.alignment] * (row.causal and row.alignment != "top_left")
        words += [row.mask] * (row.mask != "none")
        words += [f"dropout {row.p_dropout:g}"] * (row.p_dropout > 0)
        return " ".join(words)

    def row(self, provider: str) -> Row | None:
        """The provider's row, if it can be trusted and was timed."""
        row = self.rows.get(provider)
        return row if row is not None and row.ok and row.time_us is not None else None

    def time_us(self, provider: str) -> float | None:
        """Microseconds per call of a provider, if known."""
        row = self.row(provider)
        return row.time_us if row else None

    @property
    def best_torch(self) -> str | None:
        """The fastest of torch's backends."""
        times = {name: time for name in TORCH_BACKENDS if (time := self.time_us(name)) is not None}
        return min(times, key=times.__getitem__) if times else None

    def speedup(self, peer: str | None) -> float | None:
        """Peer time / fused time."""
        fused, other = self.time_us("fused"), self.time_us(peer) if peer else None
        return other / fused if fused and other else None


def compare(rows: Iterable[Row]) -> list[Comparison]:
    """Groups rows by problem, in order of appearance."""
    groups: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault(row.problem, {})[row.provider] = row
    return [Comparison(group) for group in groups.values()]


def by_suite(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons of each suite, in order of appearance."""
    suites: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        suites.setdefault(comparison.problem.suite, []).append(comparison)
    return suites


def tile(kernel: str | None) -> str:
    """The part of a kernel's name that is not known from its problem: tile, stages, warps."""
    found = re.search(r"_d\d+_(.+?)_b?f16(_|$)", kernel or "")
    return found.group(1) if found else kernel or "-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overall:
    """Speed-ups over one peer: `count` problems, least, geometric mean and greatest with its problem."""

    peer: str
    count: int
    least: float
    mean: float
    greatest: float
    least_at: str
    greatest_at: str


def overall(comparisons: Sequence[Comparison], peer: str) -> Overall | None:
    """Speed-ups over `peer` (or "best torch"), or None when no problem has both."""
    found: list[tuple[float, str]] = []
    for comparison in comparisons:
        speedup = comparison.speedup(comparison.best_torch if peer == "best torch" else peer)
        if speedup is not None:
            found.append((speedup, comparison.label))
    if not found:
        return None
    least, greatest = min(found), max(found)
    mean = math.exp(sum(math.log(speedup) for speedup, _ in found) / len(found))
    return Overall(
        peer=peer,
        count=len(found),
        least=least[0],
        mean=mean,
        greatest=greatest[0],
        least_at=least[1],
        greatest_at=greatest[1],
    )


@dataclasses.dataclass(frozen=True)
class Failure:
    """Problems that a provider did not simply pass, for one kind of reason; `example` is a full status."""

    provider: str
    kind: str
    count: int
    example: str


def failures(comparisons: Iterable[Comparison]) -> list[Failure]:
    """What is not plainly ok, grouped by provider and kind (the part of a status before the colon)."""
    found: dict[tuple[str, str], list[str]] = {}
    for comparison in comparisons:
        for provider, row in comparison.rows.items():
            if row.status != "ok":
                found.setdefault((provider, kind(row.status)), []).append(row.status)
    return [Failure(provider, kind, len(all_), all_[0]) for (provider, kind), all_ in found.items()]


def kind(status: str) -> str:
    """`refused: no kernel ...` → `refused`."""
    return re.split(r"[:(]", status, maxsplit=1)[0].strip()


def unacceptable(rows: Iterable[Row]) -> list[Row]:
    """Rows of our own families that are wrong or failed; what a build has no kernel for is neither."""
    ours = (*OURS, *OWN_CALLS)
    return [row for row in rows if row.provider in ours and kind(row.status) in ("wrong", "error")]


def heading(results: Results) -> str:
    """One line that says what the numbers were taken on."""
    env = results.env
    library = env.get("library") or {}
    where = env.get("gpu") or f"CPU: {env.get('cpu')}"
    parts = [
        where,
        f"driver {env['driver']}" if env.get("driver") else "",
        f"torch {env.get('torch')}",
        f"CUDA {env['cuda']}" if env.get("cuda") else "",
        f"library {library.get('version')} ({library.get('space')}, {str(library.get('digest'))[:12]})"
        if library
        else "no library",
        str(env.get("date", ""))[:10],
    ]
    return ", ".join(part for part in parts if part)
