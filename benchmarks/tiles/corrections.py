"""The factors of sdpa_cutlass/choice/cost/corrections.py, from all problems at which kernels were timed.

What counts is what a choice loses, not how far a price is from a time. Which kernel is the cheapest is no
smooth function of the factors, so each kernel is chosen with a probability that falls with its price, and
what is lost on average is made small: a listwise loss, as in Cao et al., "Learning to rank: from pairwise
approach to listwise approach" (2007). A penalty keeps factors near 1 that few problems ask for. The same is
fitted to all runs but one and judged by that one, each in turn: what held-out problems lose is printed too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.changed_kernels import has_changed
from benchmarks.documents import kernel_rows
from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.choice.cost.corrections import (
    FEW_KEYS,
    FEWEST_KEYS,
    HARDLY_ANY_KEYS,
    OF_SIZES,
    TRAITS,
    factors,
    is_padded,
    name_of,
)
from sdpa_cutlass.choice.cost.model import ceil_div
from sdpa_cutlass.choice.select import families_with_plain, order
from sdpa_cutlass.cli import predictions, random_report, results, suites
from sdpa_cutlass.cli.tuning import journal
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import Causal, DType, Problem

DEVICE = predictions.H200.device
TEMPERATURE = 0.02  # of the choice: prices this share apart are chosen e times as often
PENALTY = 12.0
STEPS, RATE = 300, 0.004
LEAST = 0.005  # of a factor's logarithm: others are left out
FAR = 1.15
_BEHIND = 3.0  # added to the logarithm of a price that `order` puts behind all others
_MOST_LOST = 0.5
_WEIGHTS = {"random": 0.5, "problems": 0.5, "journal": 1.0, "splits": 1.0}  # of problems that were timed once


@dataclasses.dataclass(frozen=True)
class Timed:
    """A problem with the times of its kernels, and their prices without corrections, as logarithms."""

    run: str
    is_judged: bool  # the fastest kernels were timed twice
    weight: float
    problem: Problem
    kernels: tuple[KernelInfo, ...]
    times: tuple[float, ...]  # in microseconds
    prices: tuple[float, ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """Logarithms of the times over the least."""
        least = min(self.times)
        return tuple(math.log(time / least) for time in self.times)

    @property
    def traits(self) -> tuple[tuple[str, ...], ...]:
        """Of each kernel."""
        return tuple(_traits(kernel, self.problem) for kernel in self.kernels)


def read(folder: Path) -> list[Timed]:
    """Everything that is known below benchmarks/results: random runs, problems with all kernels, `tune`, and
    numbers of splits.
    """
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    found = [*_random(folder, kernels), *_problems(folder / "tuning", kernels)]
    found += _journals(folder / "tuning", kernels)
    return found + list(_splits(folder / "splits", kernels))


def _random(folder: Path, kernels: Mapping[str, KernelInfo]) -> Iterator[Timed]:
    for path in sorted([*folder.glob("*random*.json"), *folder.glob("tuning/*random-samples*.json")]):
        run = results.load(path)
        rows = random_report.rows_of_samples(run.rows)
        for sample in run.env.get("random", {}).get("samples", []):
            row = rows.get(sample["problem"])
            if row is not None:
                again = sample.get("again", {})
                problem = predictions.problem_with_masks(row)
                yield from _timed(
                    path.stem,
                    problem,
                    sample["times"] | again,
                    kernels,
                    run.env["date"],
                    "random",
                    bool(again),
                )


def _problems(folder: Path, kernels: Mapping[str, KernelInfo]) -> Iterator[Timed]:
    for path in sorted([*folder.glob("*random-kernels.json"), *folder.glob("*masked-kernels.json")]):
        found = json.loads(path.read_text())
        for row in found["rows"]:
            asked = row["problem"] | {"alignment": Causal(row["problem"]["alignment"])}
            problem = predictions.problem_with_masks(suites.Case(suite="random", dtype="f16", **asked))
            times = {found["kernels"][int(number)]: time for number, time in row["times"].items()}
            yield from _timed(path.stem, problem, times, kernels, path.stem, "problems")


def _journals(folder: Path, kernels: Mapping[str, KernelInfo]) -> Iterator[Timed]:
    for path in sorted(folder.glob("*tune-f16.jsonl")):
        item = journal.read(path)
        for entry in item.entries.values():
            times = {
                one.kernel: one.gpu_us
                for one in entry.measured
                if one.status == journal.OK and one.gpu_us is not None
            }
            yield from _timed(path.stem, entry.problem, times, kernels, path.stem, "journal")


def _splits(folder: Path, kernels: Mapping[str, KernelInfo]) -> Iterator[Timed]:
    """Of decoding problems, kernels that were timed with the number of splits that they have today, and whose
    code is still what was timed.
    """
    for path in sorted(folder.glob("*f16-decode*.json")):
        for row in json.loads(path.read_text())["rows"]:
            problem = problem_of_splits(row["sizes"])
            times = {}
            for (name, number), us in times_of_splits(row).items():
                if name in kernels and estimate(kernels[name], problem, DEVICE).num_splits == number:
                    times[name] = us
            yield from _timed(path.stem, problem, times, kernels, None, "splits")


def problem_of_splits(sizes: Sequence[int]) -> Problem:
    """In float16, of a row that `benchmarks.splits` wrote."""
    batch, heads, heads_kv, rows, keys, head_dim, is_causal = sizes
    return Problem(
        dtype=DType.F16, batch=batch, num_heads_q=heads, num_heads_kv=heads_kv, seqlen_q=rows, seqlen_k=keys,
        head_dim=head_dim, causal=Causal.BOTTOM_RIGHT if is_causal else None,
    )  # fmt: skip


def times_of_splits(row: Mapping[str, Any]) -> dict[tuple[str, int], float]:
    """Microseconds by kernel and number of splits, of a row that `benchmarks.splits` wrote."""
    found: dict[tuple[str, int], float] = {}
    for contestant, us in row["times_us"].items():
        name, _, number = contestant.partition(" ")
        if contestant in row["kernels"]:
            found[row["kernels"][contestant], row["num_splits"][contestant]] = us
        elif number:
            found[name, int(number)] = us
    return found


def _timed(
    run: str,
    problem: Problem,
    times: Mapping[str, float],
    kernels: Mapping[str, KernelInfo],
    date: str | None,
    kind: str,
    is_judged: bool = False,
) -> Iterator[Timed]:
    """Of the kernels that are still what was timed; nothing where that is one."""
    kept = [kernels[name] for name in times if name in kernels]
    if date is not None:
        kept = [kernel for kernel in kept if not has_changed(kernel, problem, date)]
    if len(kept) < 2:
        return
    yield Timed(
        run=run,
        is_judged=is_judged,
        weight=1.0 if is_judged else _WEIGHTS[kind],
        problem=problem,
        kernels=tuple(kept),
        times=tuple(times[kernel.name] for kernel in kept),
        prices=prices_of(kept, problem),
    )


def prices_of(kernels: Sequence[KernelInfo], problem: Problem) -> tuple[float, ...]:
    """Without corrections, as logarithms; those that `order` puts behind all others are far behind."""
    plain = families_with_plain(kernels)
    prices = []
    for kernel in kernels:
        is_behind, cycles, _ = order(kernel, estimate(kernel, problem, DEVICE), problem, plain)
        price = math.log(cycles / factors(kernel, problem, DEVICE)[number_of(kernel, problem)])
        prices.append(price + (_BEHIND if is_behind else 0))
    return tuple(prices)


def number_of(kernel: KernelInfo, problem: Problem) -> int:
    """The number of a kernel's factor. The tiles of a cluster come together."""
    heads = problem.num_heads_q // problem.num_heads_kv if kernel.packs_heads else 1  # in a tile
    rows, cluster = problem.seqlen_q * heads, kernel.detail("cluster", 1)
    tiles = ceil_div(rows, kernel.block_m * cluster) * cluster * problem.batch * problem.num_heads_q // heads
    of_keys = 2 * (problem.seqlen_k <= FEW_KEYS) + 8 * (problem.seqlen_k <= FEWEST_KEYS)
    of_keys += 16 * (problem.seqlen_k <= HARDLY_ANY_KEYS)
    return (tiles <= DEVICE.sms) + of_keys + 4 * (2 * rows <= kernel.block_m)


def is_corrected(kernel: KernelInfo) -> bool:
    """Plain kernels of mma.sync are not, but next to the fewest keys: others are faster nearly everywhere."""
    return kernel.family is Family.FMHA_FWD_SM90 or kernel.is_general


def _traits(kernel: KernelInfo, problem: Problem) -> tuple[str, ...]:
    if not is_corrected(kernel):
        return OF_SIZES[-1:] if problem.seqlen_k <= HARDLY_ANY_KEYS else ()
    number = number_of(kernel, problem)
    of_sizes = (trait for bit, trait in enumerate(OF_SIZES) if number >> bit & 1)
    return ("always", *(["padded"] if is_padded(kernel, problem) else []), *of_sizes)


class Fit:
    """All problems as tensors, and the logarithms of the factors that are best for some of them."""

    def __init__(self, problems: Sequence[Timed]) -> None:
        names = sorted({name_of(kernel) for one in problems for kernel in one.kernels})
        self.factors = [(name, trait) for name in names for trait in TRAITS]
        at = {factor: number + 1 for number, factor in enumerate(self.factors)}  # 0: none
        most = max(len(one.kernels) for one in problems)
        shape = len(problems), most
        self._which = torch.zeros(*shape, len(TRAITS), dtype=torch.long)
        self._prices = torch.full(shape, math.inf)
        self._losses = torch.zeros(shape)
        self._weights = torch.tensor([one.weight for one in problems])
        for row, one in enumerate(problems):
            count = len(one.kernels)
            self._prices[row, :count] = torch.tensor(one.prices) - min(one.prices)
            self._losses[row, :count] = torch.tensor(one.losses)
            for column, (kernel, traits) in enumerate(zip(one.kernels, one.traits, strict=True)):
                for number, trait in enumerate(traits):
                    self._which[row, column, number] = at[name_of(kernel), trait]

    def logarithms(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of the factors, by number; the first is of none. `chosen`: bool, the problems that count."""
        logs = torch.zeros(1 + len(self.factors) + self._num_steps, requires_grad=True)
        optimizer = torch.optim.Adam([logs], lr=RATE)
        losses, weights = self._losses[chosen].clamp(max=_MOST_LOST), self._weights[chosen]
        for _ in range(STEPS):
            shares = torch.softmax(-self._corrected(logs, chosen) / TEMPERATURE, 1)
            of_factors = PENALTY * logs[: 1 + len(self.factors)].square().sum()
            lost = ((shares * losses).sum(1) * weights).sum() + of_factors + self._beside(logs, chosen)
            optimizer.zero_grad()
            lost.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return logs.detach()

    def lost(self, logs: torch.Tensor, chosen: torch.Tensor) -> list[float]:
        """Time of the cheapest kernel over that of the fastest, by problem."""
        cheapest = self._corrected(logs, chosen).argmin(1, keepdim=True)
        found: list[float] = self._losses[chosen].gather(1, cheapest)[:, 0].exp().tolist()
        return found

    def _corrected(self, logs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        known = torch.cat((logs.new_zeros(1), logs[1 : 1 + len(self.factors)]))
        return self._prices[chosen] + known[self._which[chosen]].sum(2)

    @property
    def _num_steps(self) -> int:
        """Further numbers that are fitted: `ConstantsFit` has some."""
        return 0

    def _beside(self, logs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What counts beside what is lost and the factors."""
        return logs.new_zeros(())


def report(problems: Sequence[Timed], fit: Fit) -> Iterator[str]:
    """What problems of each run lose without corrections, and with those that all others give."""
    none = torch.zeros(1 + len(fit.factors))
    before: list[float] = []
    after: list[float] = []
    for run in sorted({one.run for one in problems if one.is_judged}):
        held = torch.tensor([one.run == run for one in problems])
        lost, now = fit.lost(none, held), fit.lost(fit.logarithms(~held), held)
        yield _line(run, lost, now)
        before += lost
        after += now
    yield _line("all of these", before, after)


def _line(run: str, before: Sequence[float], after: Sequence[float]) -> str:
    means = [f"{100 * (statistics.geometric_mean(lost) - 1):.2f} %" for lost in (before, after)]
    far = [str(sum(one > FAR for one in lost)) for lost in (before, after)]
    return f"{run:40} {len(after):5} problems lose {' -> '.join(means)}, beyond {FAR} {' -> '.join(far)}"


def table(fit: Fit, problems: Sequence[Timed]) -> dict[str, Any]:
    """What corrections.json holds."""
    logs = fit.logarithms(torch.ones(len(problems), dtype=torch.bool))
    found: dict[str, dict[str, float]] = {}
    for (name, trait), log in zip(fit.factors, logs[1:].tolist(), strict=True):
        if abs(log) >= LEAST:
            found.setdefault(name, {})[trait] = round(math.exp(log), 3)
    return {"fitted_to": sorted({one.run for one in problems}), "factors": found}
