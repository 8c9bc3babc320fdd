"""What a run of random problems says: where this library is behind, and what the choice of kernels costs.

The ratio of a problem is the time of the better of torch's flash and mem-efficient backends over ours (above
1: ours is faster); cuDNN has a column of its own, for it has other instructions on some cards. The *regret*
of a choice is the time of the chosen kernel over that of the fastest one that was tried, at least 1; it is
known for a sample of the problems only (`Sample`). The least of many short measurements is short partly by
luck, so the fastest ones are measured again, and these times alone count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli import random_suite
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.summary import Comparison, compare, tile
from sdpa_cutlass.problem import Causal

if TYPE_CHECKING:
    from rich.console import Console

BEHIND = 0.97
RIVALS = ("torch_flash", "torch_efficient")
CUDNN = "torch_cudnn"
SHOWN = 12
WORTH_A_LINE = 1.02  # of regret


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One problem with several kernels: microseconds by name, and which was chosen.

    `again`: those of the chosen and the fastest ones, measured once more and longer. Older files have none.
    """

    problem: str
    chosen: str
    times: dict[str, float]
    again: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def judged(self) -> dict[str, float]:
        """The times that count."""
        return self.again if self.chosen in self.again else self.times

    @property
    def regret(self) -> float:
        """Time of the chosen kernel over the least."""
        return self.judged[self.chosen] / min(self.judged.values())

    @property
    def best(self) -> str:
        """The fastest kernel."""
        return min(self.judged, key=self.judged.__getitem__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    """Problems with something in common that a rival ran too. Ratios are None where there are none."""

    what: str
    problems: int
    mean: float | None
    least: float | None
    behind: int
    cudnn: float | None


def ratio(comparison: Comparison, peers: Sequence[str] = RIVALS) -> float | None:
    """The best time of `peers` over ours; None where we or all of them have none."""
    ours = comparison.time_us("fused")
    times = [time for peer in peers if (time := comparison.time_us(peer)) is not None]
    return min(times) / ours if ours and times else None


def groups(rows: Iterable[Row]) -> list[Group]:
    """All random problems, then by head_dim up to and above 128, by kind, by head_dim."""
    found = compare(row for row in rows if row.suite == random_suite.SUITE)
    groupings: list[Callable[[Comparison], str]] = [
        lambda one: "all",
        lambda one: "head_dim up to 128" if one.problem.head_dim <= 128 else "head_dim above 128",
        lambda one: kind_of(one.problem),
        lambda one: f"head_dim {one.problem.head_dim:3}",
    ]
    return [
        _group(name, [one for one in found if group_of(one) == name])
        for group_of in groupings
        for name in sorted({group_of(one) for one in found}, key=lambda name: (name == "masked", name))
    ]


def kind_of(row: Row) -> str:
    """The kind of a row's problem; masks, lengths and dropout are one of their own."""
    if row.mask != "none" or row.p_dropout:
        return "masked"
    return random_suite.kind_of(case_of(row))


def case_of(row: Row) -> Case:
    """The case that a row measured."""
    return Case(
        suite=row.suite,
        batch=row.batch,
        num_heads_q=row.num_heads_q,
        num_heads_kv=row.num_heads_kv,
        seqlen_q=row.seqlen_q,
        seqlen_k=row.seqlen_k,
        head_dim=row.head_dim,
        causal=row.causal,
        mask=row.mask,
        p_dropout=row.p_dropout,
        alignment=Causal(row.alignment),
        dtype=row.dtype,
    )


def rows_of_samples(rows: Iterable[Row]) -> dict[str, Row]:
    """Those of fused kernels, by the names that samples have: they do not say the dtype of their run."""
    found = {}
    for row in rows:
        if row.provider == "fused":
            case = case_of(row)
            of_the_run = dataclasses.replace(case, dtype=None).name
            if case.dtype == "f16":
                found[of_the_run] = row
            else:  # of a run in f16, or in its own
                found[case.name] = row
                found.setdefault(of_the_run, row)
    return found


def _group(what: str, some: Sequence[Comparison]) -> Group:
    ratios = [value for one in some if (value := ratio(one)) is not None]
    others = [value for one in some if (value := ratio(one, (CUDNN,))) is not None]
    return Group(
        what=what,
        problems=len(ratios),
        mean=_mean(ratios),
        least=min(ratios, default=None),
        behind=sum(value < BEHIND for value in ratios),
        cudnn=_mean(others),
    )


def _mean(values: Sequence[float]) -> float | None:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def behind(rows: Iterable[Row]) -> list[tuple[float, Comparison]]:
    """The problems whose ratio is below BEHIND, the worst first."""
    found = compare(row for row in rows if row.suite == random_suite.SUITE)
    ratios = [(value, one) for one in found if (value := ratio(one)) is not None and value < BEHIND]
    return sorted(ratios, key=lambda pair: pair[0])


def regret(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Geometric mean and worst regret; None without a sample of at least two kernels."""
    some = [sample for sample in samples if sample.chosen in sample.times and len(sample.times) > 1]
    if not some:
        return None
    worst = max(some, key=lambda sample: sample.regret)
    return {
        "problems": len(some),
        "mean": round(_mean([sample.regret for sample in some]) or 1.0, 4),
        "worst": round(worst.regret, 4),
        "worst_at": worst.problem,
    }


def record(rows: Iterable[Row], samples: Sequence[Sample]) -> dict[str, Any]:
    """What a result file's env has of it."""
    return {
        "groups": [dataclasses.asdict(group) for group in groups(list(rows))],
        "regret": regret(samples),
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def show(rows: Sequence[Row], samples: Sequence[Sample], console: Console) -> None:
    """Prints the groups, the problems where we are behind, and the worst choices."""
    from rich import box
    from rich.table import Table

    title = "\nrandom: the better of torch's flash and mem-efficient over ours (above 1: ours is faster)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("problems")
    for column in ("count", "mean", "least", f"below {BEHIND}", "cuDNN over ours"):
        table.add_column(column, justify="right")
    for group in groups(rows):
        numbers = (_number(group.mean), _number(group.least), str(group.behind), _number(group.cudnn))
        table.add_row(group.what, str(group.problems), *numbers)
    console.print(table)
    slow = behind(rows)
    if slow:
        _print(console, f"behind at {len(slow)} problems, the worst first:")
    for value, one in slow[:SHOWN]:
        ours = one.rows["fused"]
        text = f"  {value:.2f}  {one.label} {ours.dtype}: {tile(ours.kernel)} {ours.time_us:.4g} us"
        _print(console, text, style="")
    summary = regret(samples)
    if summary is None:
        return
    _print(
        console,
        f"regret of the choice over {summary['problems']} problems: geometric mean "
        f"{summary['mean']:.3f}, worst {summary['worst']:.2f}",
    )
    for sample in sorted(samples, key=lambda sample: -sample.regret)[:SHOWN]:
        if sample.regret > WORTH_A_LINE:
            chosen, best = (f"{name} {sample.judged[name]:.4g} us" for name in (sample.chosen, sample.best))
            _print(console, f"  {sample.regret:.2f}  {sample.problem}: {chosen}, {best}", style="")


def _print(console: Console, text: str, *, style: str = "bold") -> None:
    console.print(text, style=style, markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
