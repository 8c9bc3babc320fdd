"""What a run without a GPU shows: each problem's kernels, their errors with the bounds, and a verdict.

The kernels run on a model of a GPU there, thread by thread, so no time is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdpa_cutlass.cli.accuracy import LSE_BOUND
from sdpa_cutlass.cli.cells import MISSING, error
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.summary import OURS, Comparison, kind, tile

HEADERS = (
    "problem",
    "fused kernel",
    "err O",
    "bound O",
    "err LSE",
    "bound LSE",
    "verdict",
    "piped err O",
    "piped verdict",
)
RIGHT = "right"
NOTE = (
    "No GPU was used: the kernels ran on a model of one, thread by thread, and were compared with float64. "
    "No times are shown: times and ratios on a CPU mean nothing."
)


def cells(comparison: Comparison) -> list[str]:
    """The cells of one line, in the order of HEADERS."""
    fused, piped = comparison.rows.get("fused"), comparison.rows.get("piped")
    return [
        comparison.label,
        tile(fused.kernel) if fused else MISSING,
        error(fused.max_err_out) if fused else MISSING,
        error(fused.bound_out) if fused else MISSING,
        error(fused.max_err_lse) if fused else MISSING,
        error(LSE_BOUND) if fused and fused.max_err_lse is not None else MISSING,
        verdict(fused),
        error(piped.max_err_out) if piped else MISSING,
        verdict(piped),
    ]


def verdict(row: Row | None) -> str:
    """`right` where every bound holds, else in one word what became of the problem."""
    if row is None:
        return MISSING
    if row.ok:
        return RIGHT if row.max_err_out is not None else MISSING
    return kind(row.status)


def conclusions(comparisons: Sequence[Comparison]) -> list[str]:
    """For each of this library's families that took part: how many problems it got right."""
    lines = []
    for name in OURS:
        verdicts = [verdict(one.rows[name]) for one in comparisons if name in one.rows]
        if verdicts:
            right = verdicts.count(RIGHT)
            lines.append(f"{name}: right on {right} of {len(verdicts)} problems")
    return lines
