"""The naive chain over the whole grid: how many times longer matmul, mask, softmax, matmul take than fused.

Problems are lines; files that measured the same problem are columns side by side. What has no ratio
says why: the chain needs all scores in memory at once, which is the first thing that large problems lack.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdpa_cutlass.cli.cells import MISSING, time_us
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.summary import Comparison, compare, kind

NAIVE = "naive"
SUITES_WITHOUT = ("wall",)  # no problems of their own


def comparisons_of(results: Results) -> list[Comparison]:
    """The problems of a file that the chain took part in."""
    found = compare(row for row in results.rows if row.suite not in SUITES_WITHOUT)
    return [comparison for comparison in found if NAIVE in comparison.rows]


def highest(files: Mapping[str, Results]) -> tuple[float, Comparison, str] | None:
    """The highest ratio of all files, its problem and its file."""
    found = [
        (speedup, name, comparison)
        for name, results in files.items()
        for comparison in comparisons_of(results)
        if (speedup := comparison.speedup(NAIVE)) is not None
    ]
    if not found:
        return None
    speedup, name, comparison = max(found, key=lambda one: one[0])
    return speedup, comparison, name


def sentence(files: Mapping[str, Results]) -> str:
    """What the grid's highest ratio is, and where."""
    found = highest(files)
    if found is None:
        return "The naive chain ran nowhere."
    speedup, comparison, name = found
    row, results = comparison.problem, files[name]
    every = {(one.problem.suite, one.label, one.problem.dtype): one for one in _all(files)}
    ran = [one for one in every.values() if one.speedup(NAIVE) is not None]
    return (
        f"Over the naive chain of matmul, mask, softmax and matmul, the highest ratio of {len(ran)} "
        f"problems is **{speedup:.2f}x**: {comparison.label}, {row.dtype}, suite `{row.suite}`, "
        f"{_us(comparison, NAIVE)} against {_us(comparison, 'fused')}, on {results.env.get('gpu')}."
        + _missing(list(every.values()))
    )


def _missing(comparisons: list[Comparison]) -> str:
    """A sentence about the problems on which the chain itself could not be timed, else nothing."""
    kinds = [kind(one.rows[NAIVE].status) for one in comparisons if one.row(NAIVE) is None]
    if not kinds:
        return ""
    reasons = ", ".join(f"{kinds.count(reason)} {reason}" for reason in dict.fromkeys(kinds))
    return f" Without a time of the chain: {reasons}."


def _us(comparison: Comparison, provider: str) -> str:
    return f"{time_us(comparison, provider)} µs"


def _all(files: Mapping[str, Results]) -> list[Comparison]:
    return [comparison for results in files.values() for comparison in comparisons_of(results)]


def table(files: Mapping[str, Results]) -> list[str]:
    """One line per problem: the ratio in every file that has it, and the times of the first."""
    columns = {name: _by_key(results) for name, results in files.items()}
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    headers = ["suite", "problem", "naive µs", "fused µs", *columns]
    lines = ["| " + " | ".join(headers) + " |", "|---|---|" + "---:|" * (len(headers) - 2)]
    for key in keys:
        first = next(column[key] for column in columns.values() if key in column)
        suite, label = key
        cells = [suite, label, time_us(first, NAIVE), time_us(first, "fused")]
        cells += [_ratio(column.get(key)) for column in columns.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _by_key(results: Results) -> dict[tuple[str, str], Comparison]:
    """Problems by suite and label, alike for both dtypes; a dtype that is not the file's is named."""
    found: dict[tuple[str, str], Comparison] = {}
    comparisons = comparisons_of(results)
    for comparison in comparisons:
        row = comparison.problem
        other = "" if row.dtype == comparisons[0].problem.dtype else f" {row.dtype}"
        found[row.suite, comparison.label + other] = comparison
    return found


def _ratio(comparison: Comparison | None) -> str:
    if comparison is None:
        return MISSING
    speedup = comparison.speedup(NAIVE)
    if speedup is not None:
        return f"{speedup:.2f}x"
    wanting = next((name for name in (NAIVE, "fused") if comparison.row(name) is None), NAIVE)
    return f"{wanting}: {time_us(comparison, wanting)}"
