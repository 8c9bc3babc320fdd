"""Which constants of the exact kernels' prices lose least, at all problems at which kernels were timed.

The loss is that of corrections.py, whose factors are fitted at once. Each price is taken as linear in the
constants, all as logarithms, with slopes from prices whose constants are a twentieth larger, one by one. Far
steps cost a square penalty, and so does, a little, the fastest kernel's price where it is far from its time.
Problems are left out in five parts, by runs, for what held-out ones lose. What it prints is a proposal: steps
are long enough for a price to be linear no more, so take a part of them, fit the factors again and judge.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from benchmarks.tiles.corrections import DEVICE, FAR, Fit, Timed, prices_of
from sdpa_cutlass.choice.cost import ctas, fmha_fwd, fmha_fwd_sm90, model, splits
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ

MODULES = (ctas, fmha_fwd, fmha_fwd_sm90, splits)
# What data sheets, kernels or launches say.
KNOWN = frozenset(
    {
        "FEW_KEYS",
        "FEWEST_KEYS",
        "HARDLY_ANY_KEYS",
        "MAX_SPLIT_TILES",
        "MERGED_BY_LAST_CTA",
        "MOST_WAVES",
        "REGISTERS",
        "RUNS",
        "_REGISTERS_PER_SM",
        "_MAX_REGISTERS",
        "_EX2_PER_CLOCK",
        "_ALU_PER_CLOCK",
        "_WARPGROUP_ROWS",
        "_ROWS_OF_A_PRICE",
        "_SECTOR_COLUMNS",
        "_MASK_RUN_UNDER_DROPOUT",
        "MASK_ALIGNMENT",
        "_LONGEST_WINDOW_IN_TURN",
        "_LONGEST_CAUSAL_IN_TURN",
        "_ROOM_FOR_TWO_Q",
        "_WHOLE_HEADS_BYTES",
        "_MAX_SPLITS",
        "_MOST_SPLITS",
        "_PART_VECTOR_BYTES",
        "_PARTS_PER_TRIP",
    }
)
PARTS = 5
STEP = math.log(1.05)
PENALTY = 0.6
PULL = 0.05
_FAR_FROM_TIME = 0.15  # from here on the pull grows no more
_STEEPEST = 3.0  # slopes beyond are where another number of splits is chosen
_DRAM_SHARE = 0.7  # of a time: where the DRAM takes more, prices of the SMs say little


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number of a cost model, or one of those in a mapping of them."""

    module: ModuleType
    name: str
    key: Any = None

    @property
    def value(self) -> float:
        """As prices have it now."""
        held = getattr(self.module, self.name)
        value: float = held if self.key is None else held[self.key]
        return value

    def set(self, value: float) -> None:
        """For all prices from now on."""
        if self.key is None:
            setattr(self.module, self.name, value)
        else:
            getattr(self.module, self.name)[self.key] = value

    def __str__(self) -> str:
        where = self.module.__name__.rpartition(".")[2]
        return f"{where}.{self.name}" + ("" if self.key is None else f"[{self.key}]")


def constants() -> list[Constant]:
    """All that were fitted to times, but those of model.py, which other families share."""
    found = []
    for module in MODULES:
        for name, held in vars(module).items():
            if not name.isupper() or name in KNOWN or hasattr(model, name):
                continue
            if isinstance(held, int | float):
                found.append(Constant(module, name))
            elif isinstance(held, dict) and all(isinstance(value, int | float) for value in held.values()):
                found += [Constant(module, name, key) for key in held]
    return found


def slopes(problems: Sequence[Timed], constant: Constant) -> list[tuple[float, ...]]:
    """Of the logarithm of each price over that of the constant, which is left as it was."""
    before = constant.value
    constant.set(before * math.exp(STEP))
    try:
        moved = [prices_of(one.kernels, one.problem) for one in problems]
    finally:
        constant.set(before)
    return [
        tuple(
            max(-_STEEPEST, min((new - old) / STEP, _STEEPEST))
            for new, old in zip(prices, one.prices, strict=True)
        )
        for one, prices in zip(problems, moved, strict=True)
    ]


class ConstantsFit(Fit):
    """Steps of the constants and factors of the kernels at once."""

    def __init__(self, problems: Sequence[Timed], found: Sequence[Constant]) -> None:
        super().__init__(problems)
        self._slopes = torch.zeros(*self._prices.shape, len(found))
        for number, constant in enumerate(found):
            for row, of_one in enumerate(slopes(problems, constant)):
                self._slopes[row, : len(of_one), number] = torch.tensor(of_one)
        fastest = [min(range(len(one.times)), key=one.times.__getitem__) for one in problems]
        rows = torch.arange(len(problems))
        self._fastest_slopes = self._slopes[rows, torch.tensor(fastest)]
        self._wanted = torch.tensor(
            [
                math.log(one.times[at] * CLOCK_GHZ * 1e3) - one.prices[at]
                for one, at in zip(problems, fastest, strict=True)
            ]
        )
        self._is_pulled = torch.tensor(
            [
                DEVICE.dram_us(one.problem.bytes) < _DRAM_SHARE * one.times[at]
                for one, at in zip(problems, fastest, strict=True)
            ]
        )

    def steps(self, logs: torch.Tensor) -> torch.Tensor:
        """Of what `logarithms` found, those of the constants."""
        return logs[1 + len(self.factors) :]

    @property
    def _num_steps(self) -> int:
        return self._slopes.shape[2]

    def _corrected(self, logs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return super()._corrected(logs, chosen) + self._slopes[chosen] @ self.steps(logs)

    def _beside(self, logs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        counts, steps = chosen & self._is_pulled, self.steps(logs)
        off = self._wanted[counts] - self._fastest_slopes[counts] @ steps
        pull = torch.nn.functional.huber_loss(
            off, torch.zeros_like(off), delta=_FAR_FROM_TIME, reduction="sum"
        )
        return PENALTY * steps.square().sum() + PULL * pull


def parts(problems: Sequence[Timed]) -> list[set[str]]:
    """Of the runs whose fastest kernels were timed twice, with about as many problems each."""
    counts: dict[str, int] = {}
    for one in problems:
        if one.is_judged:
            counts[one.run] = counts.get(one.run, 0) + 1
    found: list[set[str]] = [set() for _ in range(PARTS)]
    for run in sorted(counts, key=lambda run: -counts[run]):
        min(found, key=lambda part: sum(counts[other] for other in part)).add(run)
    return [part for part in found if part]


def report(problems: Sequence[Timed]) -> Iterator[str]:
    """What held-out problems lose, and every constant whose step is worth taking."""
    found = constants()
    fit = ConstantsFit(problems, found)
    lost: list[float] = []
    for part in parts(problems):
        held = torch.tensor([one.run in part for one in problems])
        judged = held & torch.tensor([one.is_judged for one in problems])
        lost += fit.lost(fit.logarithms(~held), judged)
    mean = 100 * (statistics.geometric_mean(lost) - 1)
    yield f"{len(lost)} problems left out lose {mean:.2f} %, beyond {FAR} {sum(one > FAR for one in lost)}"
    every = fit.logarithms(torch.ones(len(problems), dtype=torch.bool))
    for constant, step in zip(found, fit.steps(every).tolist(), strict=True):
        if abs(step) >= 0.02:
            yield f"{constant!s:52} {constant.value:10.4g} -> {constant.value * math.exp(step):.4g}"
