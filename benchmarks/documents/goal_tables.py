"""The project's goals for speed on an H200 beside what result files say: one line a goal, one column a file.

A goal that holds for many problems shows the worst of them. `x` is a peer's time over fused's, as everywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sdpa_cutlass.cli import decode_tables, mask_tables, wall_tables
from sdpa_cutlass.cli.cells import MISSING, overhead, ratio
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.summary import Comparison, compare, overall

HEAD_DIMS = (64, 80, 96, 128)
Measure = Callable[[Sequence[Comparison], Mapping[str, Any]], "Reached | None"]
Choice = Callable[[Comparison], bool]
Value = Callable[[Comparison, Mapping[str, Any]], "float | None"]


@dataclasses.dataclass(frozen=True)
class Reached:
    """What was measured, as text, and whether it is enough."""

    value: str
    is_met: bool

    @property
    def cell(self) -> str:
        return f"{self.value}: {'met' if self.is_met else '**not met**'}"


@dataclasses.dataclass(frozen=True)
class Goal:
    """One line: `reached` is None where a file did not measure it."""

    what: str
    wanted: str
    reached: Measure


def table(files: Mapping[str, Results]) -> list[str]:
    """The lines of the table, for {name: results}."""
    headers = ("what", "goal", *files)
    lines = ["| " + " | ".join(headers) + " |", "|---|---|" + "---|" * len(files)]
    found = {name: (compare(results.rows), results.env) for name, results in files.items()}
    for goal in GOALS:
        reached = [goal.reached(comparisons, env) for comparisons, env in found.values()]
        cells = [MISSING if one is None else one.cell for one in reached]
        lines.append("| " + " | ".join([goal.what, goal.wanted, *cells]) + " |")
    return lines


# ---- which problems ----


def _mission(*, causal: bool) -> Choice:
    return lambda one: one.problem.suite == "mission" and one.problem.causal == causal


def _small(one: Comparison) -> bool:
    return one.problem.suite == "small"


def _small_and_short(one: Comparison) -> bool:
    return _small(one) and one.problem.seqlen_q <= 256


def _long(one: Comparison) -> bool:
    row = one.problem
    return row.suite == "long" and row.seqlen_q >= 1024 and row.head_dim in HEAD_DIMS


def _long_of(head_dim: int) -> Choice:
    return lambda one: _long(one) and one.problem.head_dim == head_dim


def _plain(one: Comparison) -> bool:
    return one.problem.suite in ("mission", "small", "long")


def _masked(*kinds: str, head_dims: Sequence[int] = HEAD_DIMS) -> Choice:
    def is_one(one: Comparison) -> bool:
        row = one.problem
        is_long = row.seqlen_k >= mask_tables.LONG and row.head_dim in head_dims
        return row.suite == "masks" and is_long and mask_tables.kind_of(row) in kinds

    return is_one


def _decode(one: Comparison) -> bool:
    return one.problem.suite == decode_tables.SUITE and one.problem.seqlen_k >= 4096


# ---- what is measured ----


def _time(choice: Choice, below: float) -> Measure:
    def reached(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> Reached | None:
        times = [time for one in comparisons if choice(one) and (time := one.time_us("fused")) is not None]
        return Reached(f"{max(times):.4g} µs", max(times) < below) if times else None

    return reached


def _wall(call: str, at_most: float) -> Measure:
    def reached(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> Reached | None:
        rows = [one.row(call) for one in comparisons if one.problem.suite == wall_tables.SUITE]
        times = [row.wall_us for row in rows if row is not None and row.wall_us is not None]
        return Reached(f"{max(times):.4g} µs", max(times) <= at_most) if times else None

    return reached


def _every(
    choice: Choice, value: Value, show: Callable[[float], str], bound: float, *, is_floor: bool
) -> Measure:
    """`bound` holds for each problem that `value` knows; the one furthest from it is shown."""

    def is_enough(measured: float) -> bool:
        return measured >= bound if is_floor else measured <= bound

    def reached(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> Reached | None:
        chosen = [(value(one, env), one.label) for one in comparisons if choice(one)]
        found = [(measured, label) for measured, label in chosen if measured is not None]
        if not found:
            return None
        worst, where = (min if is_floor else max)(found)
        enough = sum(is_enough(measured) for measured, _ in found)
        word = "least" if is_floor else "at most"
        return Reached(f"{enough} of {len(found)}, {word} {show(worst)} ({where})", is_enough(worst))

    return reached


def _least(choice: Choice, peer: str | None, bound: float) -> Measure:
    """Over `peer`, or over the fastest torch backend where it is None."""
    return _every(choice, lambda one, env: one.speedup(peer or one.best_torch), ratio, bound, is_floor=True)


def _cost(choice: Choice, at_most: float) -> Measure:
    return _every(choice, lambda one, env: mask_tables.slowdown(one), overhead, 1 + at_most, is_floor=False)


def _bandwidth(choice: Choice, at_least: float) -> Measure:
    return _every(choice, decode_tables.share_of_copy, decode_tables.percent, at_least, is_floor=True)


def _mean(choice: Choice, peer: str, bound: float) -> Measure:
    def reached(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> Reached | None:
        found = overall([one for one in comparisons if choice(one)], peer)
        return Reached(ratio(found.mean), found.mean >= bound) if found else None

    return reached


def _highest(peer: str, bound: float) -> Measure:
    def reached(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> Reached | None:
        found = overall(comparisons, peer)
        if found is None:
            return None
        return Reached(f"{ratio(found.greatest)} ({found.greatest_at})", found.greatest >= bound)

    return reached


_DENSE = ("padding", "dense", "bias_f16")
_DROPOUT = ("dropout", "causal dropout")
_FASTER = math.nextafter(1.0, 2.0)

GOALS = (
    Goal("B1 H8 S512 D64, GPU time in a graph", "< 5 µs", _time(_mission(causal=False), 5)),
    Goal("the same, causal", "< 5 µs", _time(_mission(causal=True), 5)),
    Goal("the same from Python, `plan` made before", "< 5 µs", _wall("plan_run", math.nextafter(5, 0))),
    Goal("the same, `scaled_dot_product_attention`", "≤ 8 µs", _wall("sdpa", 8)),
    Goal("small problems over torch flash", "every one ≥ 1.2x", _least(_small, "torch_flash", 1.2)),
    Goal("", "mean ≥ 1.4x", _mean(_small, "torch_flash", 1.4)),
    Goal("S ≤ 256 over every torch backend", "every one > 1x", _least(_small_and_short, None, _FASTER)),
    Goal("S ≥ 1024 over torch flash", "every one ≥ 1x", _least(_long, "torch_flash", 1.0)),
    Goal("", "mean ≥ 1.2x", _mean(_long, "torch_flash", 1.2)),
    Goal("head_dim 80, S ≥ 1024, over torch flash", "≥ 1.3x", _least(_long_of(80), "torch_flash", 1.3)),
    Goal("over piped", "every one > 1x", _least(_plain, "piped", _FASTER)),
    Goal("S ≥ 1024, head_dim 64, over piped", "≥ 6x", _least(_long_of(64), "piped", 6.0)),
    Goal("over the naive chain, anywhere", "≥ 60x", _highest("naive", 60.0)),
    Goal("padding masks over none, S ≥ 2048", "≤ +10 %", _cost(_masked("padding"), 0.10)),
    Goal("dense masks over none, S ≥ 2048", "≤ +25 %", _cost(_masked("dense"), 0.25)),
    Goal("masks and biases over mem-efficient", "≥ 2.5x", _least(_masked(*_DENSE), "torch_efficient", 2.5)),
    Goal(
        "the same at head_dim 64 over cuDNN",
        "> 1x",
        _least(_masked(*_DENSE, head_dims=(64,)), "torch_cudnn", _FASTER),
    ),
    Goal("dropout over torch flash with dropout", "≥ 1.1x", _least(_masked(*_DROPOUT), "torch_flash", 1.1)),
    Goal("decoding, K ≥ 4096, of the copy bandwidth", "≥ 80 %", _bandwidth(_decode, 0.8)),
    Goal("decoding over torch flash", "> 1x", _least(_decode, "torch_flash", _FASTER)),
    Goal("decoding over cuDNN", "> 1x", _least(_decode, "torch_cudnn", _FASTER)),
)
