"""What a run without a GPU shows: each problem's kernels, their errors with the bounds, and a verdict.

The kernels run on a model of a GPU there, thread by thread, so no measured time is shown. Next to the verdict
stand the cost models' predictions for cards that are not here (predictions.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from sdpa_cutlass.cli.accuracy import LSE_BOUND
from sdpa_cutlass.cli.cells import MISSING, error, number
from sdpa_cutlass.cli.predictions import CARDS, predict
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.summary import OURS, Comparison, kind, tile
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import read_kernels

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
    *(f"{card.name} µs, predicted" for card in CARDS),
)
RIGHT = "right"
REFUSED = "refused"
NOTE = (
    "No GPU was used: the kernels ran on a model of one, thread by thread, and were compared with float64. "
    "No measured times are shown: times and ratios on a CPU mean nothing. Times on an L4, an RTX 4090 and an "
    "H200 are predictions of the cost models by which kernels are chosen there, not measurements."
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
        *predictions(comparison.problem),
    ]


def predictions(row: Row) -> list[str]:
    """Microseconds that are predicted on each of CARDS with the kernels of the host library."""
    try:
        rows = read_kernels(library(Target.HOST))
    except SdpaError:
        return [MISSING] * len(CARDS)
    found = [predict(rows, row, card) for card in CARDS]
    return [MISSING if one is None else number(one.microseconds) for one in found]


def verdict(row: Row | None) -> str:
    """`right` where every bound holds, else in one word what became of the problem."""
    if row is None:
        return MISSING
    if row.ok:
        return RIGHT if row.max_err_out is not None else MISSING
    return kind(row.status)


def conclusions(comparisons: Sequence[Comparison]) -> list[str]:
    """For each of this library's families that took part: how many problems it got right, of those it ran."""
    lines = []
    for name in OURS:
        verdicts = [verdict(one.rows[name]) for one in comparisons if name in one.rows]
        refused = verdicts.count(REFUSED)
        said = []
        if len(verdicts) > refused:
            said.append(f"right on {verdicts.count(RIGHT)} of {len(verdicts) - refused} problems")
        if refused:
            said.append(f"refused {refused}")
        if said:
            lines.append(f"{name}: {'; '.join(said)}")
    return lines
