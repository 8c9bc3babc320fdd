"""How well the cost models do where there are measurements: predictions of the very kernels that were timed.

A row of a result file counts when it is ok, was timed on a card of predictions.CARDS, or on an H100, which
the models know as they know an H200, and its kernel is still in the space `release`. Rows are grouped by the
kernel's family. Two figures a family:

    rank     Spearman's rank correlation of predicted and measured times over all its rows
    error    median of |predicted - measured| / measured

The suite `decode` is listed by itself: its kernels wait for DRAM, the others for their SMs.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.documents import kernel_rows
from benchmarks.tiles.model import spearman
from sdpa_cutlass.choice.cost import MODELS, estimate
from sdpa_cutlass.cli import decode_tables
from sdpa_cutlass.cli.predictions import CARDS, H200, Card, problem_with_masks
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.library.registry import KernelInfo

OURS = ("fused", "piped")
TIMED_ON = (*CARDS, dataclasses.replace(H200, name="H100 80GB HBM3"))
LEAST_RANK = 0.9
MOST_ERROR = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
    """One family's, or one suite's, predictions next to measurements."""

    what: str
    card: str
    rows: int
    rank: float | None
    error: float

    @property
    def is_good(self) -> bool:
        """Whether both figures are what the project wants."""
        return self.rank is not None and self.rank >= LEAST_RANK and self.error <= MOST_ERROR


def card_of(found: Results) -> Card | None:
    """The card that results were taken on, where the models are asked about it."""
    return next((card for card in TIMED_ON if f" {card.name} " in f" {found.env.get('gpu')} "), None)


def pairs(files: Iterable[Results]) -> dict[tuple[str, str, bool], list[tuple[float, float]]]:
    """(family, card, is of decode) → predicted and measured microseconds of every row that counts."""
    kernels: Mapping[str, KernelInfo] = {row.name: row for row in kernel_rows.release()}
    pairs: dict[tuple[str, str, bool], list[tuple[float, float]]] = {}
    for found in files:
        card = card_of(found)
        for row in found.rows if card else ():
            kernel = kernels.get(row.kernel or "")
            if card is None or kernel is None or row.provider not in OURS or not row.ok or not row.gpu_us:
                continue
            predicted = estimate(kernel, problem_with_masks(row), card.device).microseconds
            key = (kernel.family.value, card.name, row.suite == decode_tables.SUITE)
            pairs.setdefault(key, []).append((predicted, row.gpu_us))
    return pairs


def qualities(files: Sequence[Results]) -> list[Quality]:
    """One of every family that has a cost model and was measured, then those of decode."""
    order = [family.value for family in MODELS]
    return [
        _quality(family + ", decode" * is_decode, card, values)
        for (family, card, is_decode), values in sorted(
            pairs(files).items(), key=lambda item: (item[0][2], order.index(item[0][0]), item[0][1])
        )
    ]


def unmeasured(files: Sequence[Results]) -> list[str]:
    """The families of attention that have a cost model and no measurement."""
    measured = {family for family, _, is_decode in pairs(files) if not is_decode}
    return [family.value for family in MODELS if family.value not in measured]


def _quality(what: str, card: str, values: Sequence[tuple[float, float]]) -> Quality:
    predicted, measured = zip(*values, strict=True)
    return Quality(
        what=what,
        card=card,
        rows=len(values),
        rank=spearman(predicted, measured),
        error=statistics.median(abs(one - other) / other for one, other in values),
    )
