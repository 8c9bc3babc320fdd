"""The blocks of docs/predictions.md: times that the cost models predict, and how well they did elsewhere.

predictions      mission, long and decode on an L4 and an RTX 4090, with the physical floor
prediction_goal  what each card's arithmetic says of the mission's 5 µs
model_quality    predictions next to measurements of result files, a line a family (model_quality.py)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.documents import kernel_rows, model_quality
from benchmarks.documents.model_quality import LEAST_RANK, MOST_ERROR, Quality
from sdpa_cutlass.choice.cost.fmha_fwd import ENDS_CYCLES
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ, LAUNCH_CYCLES, ceil_div
from sdpa_cutlass.cli import suites
from sdpa_cutlass.cli.cells import number
from sdpa_cutlass.cli.predictions import L4, RTX_4090, Card, Prediction, predict, row_of
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.summary import tile

SUITES = ("mission", "long")
DECODE_SUITES = ("decode",)
ADA = (L4, RTX_4090)
GOAL_US = 5.0
MISSING = "–"


def tables() -> list[str]:
    """Two tables a card, in Markdown: squares, then decoding."""
    lines: list[str] = []
    for card in ADA:
        lines += [
            f"**{card.name}**, {card.device.sms} SMs, predicted",
            "",
            *_table(card, SUITES, _SQUARE),
            "",
        ]
        lines += [f"**{card.name}, decoding**, predicted", "", *_table(card, DECODE_SUITES, _DECODING), ""]
    return lines[:-1]


_SQUARE: Mapping[str, Callable[[Case], object]] = {
    "batch": lambda case: case.batch,
    "heads": lambda case: case.num_heads_q,
    "seqlen": lambda case: case.seqlen_q,
    "head_dim": lambda case: case.head_dim,
    "causal": lambda case: "yes" if case.causal else "no",
}
_DECODING: Mapping[str, Callable[[Case], object]] = {
    "batch": lambda case: case.batch,
    "heads": lambda case: case.num_heads_q,
    "key heads": lambda case: case.num_heads_kv,
    "queries": lambda case: case.seqlen_q,
    "keys": lambda case: case.seqlen_k,
    "head_dim": lambda case: case.head_dim,
}


def _table(card: Card, names: Sequence[str], sizes: Mapping[str, Callable[[Case], object]]) -> list[str]:
    times = [f"predicted at {CLOCK_GHZ} GHz, µs", f"predicted at {card.boost_ghz:.2f} GHz, µs", "floor, µs"]
    left = ["---" if head == "causal" else "---:" for head in sizes]
    lines = [_line([*sizes, "tile", *times]), _line([*left, "---", *["---:"] * len(times)])]
    for case in suites.cases_of(names):
        if case.dtype is None:
            found = predict(kernel_rows.release(), row_of(case), card)
            lines.append(_line([*(str(size(case)) for size in sizes.values()), *_cells(found)]))
    return lines


def _cells(found: Prediction | None) -> list[str]:
    if found is None:
        return [MISSING] * 4
    times = (found.microseconds, found.microseconds_at_boost, found.floor_us)
    return [f"`{tile(found.kernel.name)}`", *map(number, times)]


def goal() -> list[str]:
    """For each card and mission problem, a sentence: whether 5 µs can be reached, and why."""
    return [f"- {_sentence(card, case)}" for card in ADA for case in suites.mission()]


def _sentence(card: Card, case: Case) -> str:
    row = row_of(case)
    floor = card.floor_us(row)
    clocks = LAUNCH_CYCLES + ENDS_CYCLES
    ends = clocks / card.boost_ghz / 1e3
    found = predict(kernel_rows.release(), row, card)
    assert found is not None
    ctas, sms = found.estimate.ctas, card.device.sms
    is_reachable = floor + ends < GOAL_US
    return (
        f"**{card.name}{', causal' if case.causal else ''}**: {GOAL_US:g} µs "
        f"{'is not ruled out by this arithmetic' if is_reachable else 'is out of reach'}. "
        f"The products alone take {floor:.2f} µs at the peak of {card.peak_tflops:.0f} TFLOP/s. "
        f"A launch, a tile's first loads and its last stores take {ends:.2f} µs more in the model "
        f"({clocks} clocks at {card.boost_ghz:.2f} GHz), together {floor + ends:.2f} µs. "
        f"Predicted are {found.microseconds_at_boost:.1f} µs at that clock and {found.microseconds:.1f} µs "
        f"at {CLOCK_GHZ} GHz, with {ctas} CTAs on {sms} SMs, at most {ceil_div(ctas, sms)} on one."
    )


def quality(files: Sequence[Results]) -> list[str]:
    """A line a family, then those of decoding."""
    found = model_quality.qualities(files)
    head = ["family", "card", "kernels timed", "rank correlation", "median error", "goal"]
    lines = [_line(head), _line(["---"] * 2 + ["---:"] * 3 + ["---"])]
    lines += [_line(_quality_cells(one)) for one in found]
    lines += ["", f"The goal is a rank correlation of {LEAST_RANK} and a median error of {MOST_ERROR:.0%}."]
    missing = model_quality.unmeasured(files)
    if missing:
        lines.append(f"Families with a model and no measurement in these files: {', '.join(missing)}.")
    return lines


def _quality_cells(one: Quality) -> list[str]:
    rank = MISSING if one.rank is None else f"{one.rank:.3f}"
    verdict = "met" if one.is_good else "**not met**"
    return [one.what, one.card, str(one.rows), rank, f"{100 * one.error:.1f} %", verdict]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
