"""Whether two runs of the same problems agree: differences of their times, provider by provider.

Two files make a pair when they share problems: same suites, same dtype. A difference is |a - b| / min(a, b)
of one provider's times at one problem. Peers are the control: their code is the same in both runs, so what
they differ by is what measuring on another day or machine does; our own may differ in version as well, which
the heading says.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_cutlass.cli.cells import MISSING
from sdpa_cutlass.cli.results import PEERS, PROVIDERS, WALL_PROVIDERS, Results, Row
from sdpa_cutlass.cli.summary import Comparison

HEADERS = ("provider", "problems", "median difference", "worst difference", "worst at")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One provider over all problems that two files share."""

    provider: str
    count: int
    median: float
    worst: float
    worst_at: str


def pairs(files: Mapping[str, Results]) -> list[tuple[str, str]]:
    """The names of files that measured the same problems, in order, each pair once."""
    return [
        (first, second)
        for first, second in itertools.combinations(files, 2)
        if files[first].env.get("gpu") == files[second].env.get("gpu")
        and differences(files[first], files[second])
    ]


def differences(first: Results, second: Results) -> list[Difference]:
    """The difference of every provider that both files timed; empty when they share no problem."""
    others = {(row.problem, row.provider): row for row in second.rows}
    found: dict[str, list[tuple[float, str]]] = {}
    for row in first.rows:
        other = others.get((row.problem, row.provider))
        times = [_time(row), _time(other)] if other is not None else [None]
        a, b = times[0], times[-1]
        if other is None or a is None or b is None:
            continue
        label = Comparison({row.provider: row}).label
        found.setdefault(row.provider, []).append((abs(a - b) / min(a, b), label))
    order = (*PROVIDERS, *PEERS, *WALL_PROVIDERS)
    return [
        Difference(name, len(all_), statistics.median(share for share, _ in all_), *max(all_))
        for name in order
        if (all_ := found.get(name))
    ]


def _time(row: Row) -> float | None:
    return row.time_us if row.ok else None


def relation(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """What the two records say of their machines, times and libraries."""
    uuids = [env.get("gpu_uuid") for env in (first, second)]
    if None in uuids:
        machines = "GPU UUIDs not recorded"
    else:
        machines = "the same GPU" if uuids[0] == uuids[1] else "two GPUs (by UUID)"
    days = [str(env.get("date", ""))[:16].replace("T", " ") for env in (first, second)]
    digests = [str((env.get("library") or {}).get("digest"))[:12] for env in (first, second)]
    same = digests[0] == digests[1]
    libraries = "the same library" if same else f"libraries {digests[0]} and {digests[1]}"
    return f"{machines}; {days[0]} and {days[1]}; {libraries}"


def section(files: Mapping[str, Results], names: tuple[str, str]) -> list[str]:
    """The lines of a document about one pair."""
    first, second = (files[name] for name in names)
    lines = [f"**{names[0]}** and **{names[1]}**: {relation(first.env, second.env)}", ""]
    lines += ["| " + " | ".join(HEADERS) + " |", "|---|---:|---:|---:|---|"]
    lines += [_line(difference) for difference in differences(first, second)]
    return [*lines, ""]


def _line(found: Difference) -> str:
    shares = [f"{100 * share:.1f} %" for share in (found.median, found.worst)]
    return "| " + " | ".join([found.provider, str(found.count), *shares, found.worst_at or MISSING]) + " |"


def sections(files: Mapping[str, Results]) -> Sequence[str]:
    """The lines of all pairs."""
    return [line for names in pairs(files) for line in section(files, names)]
