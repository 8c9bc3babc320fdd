"""What `tune` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdpa_cutlass.cli.tuning.derive import Choice, geometric_mean

if TYPE_CHECKING:
    from rich.console import Console

    from sdpa_cutlass.cli.tuning.sweep import Outcome

SHOWN_ROWS = 40


def outcome(found: Outcome, console: Console) -> None:
    """One line on a sweep, and one on each problem that was skipped."""
    text = f"measured {found.measured} problems"
    if found.kept:
        text += f", {found.kept} were in the journal"
    if found.ended:
        text += f"; {found.ended}, {found.left} problems are left (--resume goes on)"
    console.print(text, highlight=False, markup=False)
    for line in found.skipped:
        console.print(f"skipped {line}", style="yellow", highlight=False, markup=False)


def failed(text: str, console: Console) -> None:
    """A line in red."""
    console.print(text, style="bold red", highlight=False, markup=False, soft_wrap=True)


def table(found: Sequence[Choice], console: Console) -> None:
    """Bucket, chosen kernel, its time, gain over the cost model's choice: the largest gains first."""
    from rich.table import Table

    shown = sorted(found, key=lambda choice: (-choice.regret, str(choice.bucket)))[:SHOWN_ROWS]
    view = Table(title=_title(len(shown), len(found)), title_justify="left")
    view.add_column("bucket")
    view.add_column("kernel")
    for column in ("GPU time", "runner-up", "gain over model"):
        view.add_column(column, justify="right")
    for choice in shown:
        runner_up = f"{choice.times[1][1] / choice.best_us:.3f}" if len(choice.times) > 1 else "–"
        gain = f"{choice.regret - 1:.1%}" if choice.kernel != choice.model_kernel else "same"
        view.add_row(str(choice.bucket), choice.kernel, time(choice.best_us), runner_up, gain)
    console.print(view)
    worst = max(found, key=lambda choice: choice.regret)
    same = sum(choice.kernel == choice.model_kernel for choice in found)
    console.print(
        f"The cost model's choice takes {geometric_mean(c.regret for c in found) - 1:.2%} longer in the mean "
        f"(geometric), {worst.regret - 1:.1%} at worst ({worst.bucket}); at {same} of {len(found)} buckets "
        "it is the fastest.",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _title(shown: int, total: int) -> str:
    return f"{total} buckets" if shown == total else f"{total} buckets, the {shown} with the largest gains"


def time(microseconds: float) -> str:
    """With three significant digits."""
    if microseconds >= 1000:
        return f"{microseconds / 1000:.3g} ms"
    return f"{microseconds:.3g} µs"
