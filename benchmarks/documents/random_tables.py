"""Runs of random problems → one line a run: where this library is ahead, and what its choice loses.

Ratios are those of sdpa_cutlass/cli/random_report.py: the better of torch's flash and mem-efficient backends
over ours. What the choice loses is what the cost models of this checkout would choose among the kernels that
the run timed at a sample of its problems, over the fastest of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.changed_kernels import has_changed
from benchmarks.documents import kernel_rows
from sdpa_cutlass.cli import predictions, random_report
from sdpa_cutlass.cli.cells import MISSING
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.summary import compare

FAR_BEHIND = 0.9
_COPIES_SINCE = "2026-11-25"  # of dense masks whose rows are unaligned: before that, kernels read them
_MEANS = ("all", "head_dim up to 128", "head_dim above 128")  # of the groups in random_report.py
_HEADERS = (
    "seed", "card", "date", "problems", "ahead", "mean", "up to head_dim 128", "above", "least",
    f"below {FAR_BEHIND}", "cuDNN over ours", "choice loses", "at most",
)  # fmt: skip


def table(found: Mapping[str, Results]) -> list[str]:
    """Markdown; `found` by what the first cell says of it."""
    lines = [f"| {' | '.join(_HEADERS)} |", "|---|---|---|" + "---:|" * (len(_HEADERS) - 3)]
    return lines + [f"| {' | '.join([name, *_cells(run)])} |" for name, run in found.items()]


def losses(run: Results) -> dict[str, float]:
    """Time of today's choice over that of the fastest kernel, by problem.

    Without those at which kernels read what a call copies today, and without kernels that are no longer
    built or have changed.
    """
    date = run.env["date"]
    rows = random_report.rows_of_samples(run.rows)
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    found = {}
    for sample in run.env["random"]["samples"]:
        name = sample["problem"]
        times = {one: time for one, time in sample["times"].items() if one in kernels}
        row = rows.get(name)
        if row is None or (date < _COPIES_SINCE and row.mask == "dense" and row.seqlen_k % 8):
            continue
        problem = predictions.problem_with_masks(row)
        times = {one: time for one, time in times.items() if not has_changed(kernels[one], problem, date)}
        if len(times) < 2:
            continue
        chosen = predictions.predict(map(kernels.__getitem__, times), row, predictions.H200)
        assert chosen is not None, f"{name} was timed, but nothing may run it"
        found[name] = times[chosen.kernel.name] / min(times.values())
    return found


def _cells(run: Results) -> Sequence[str]:
    comparisons = compare(run.rows)
    ratios = [ratio for one in comparisons if (ratio := random_report.ratio(one)) is not None]
    group = {one.what: one for one in random_report.groups(run.rows)}
    means = [group[what].mean if what in group else None for what in _MEANS]
    lost = losses(run).values()
    return (
        run.env["gpu"].removeprefix("NVIDIA ").split()[0],
        run.env["date"][:10],
        str(len(ratios)),
        f"{100 * sum(ratio >= 1 for ratio in ratios) / len(ratios):.1f} %",
        *(MISSING if mean is None else f"{mean:.2f}" for mean in means),
        f"{min(ratios):.2f}",
        str(sum(ratio < FAR_BEHIND for ratio in ratios)),
        MISSING if (cudnn := group["all"].cudnn) is None else f"{cudnn:.2f}",
        f"{100 * (statistics.geometric_mean(lost) - 1):.1f} %" if lost else MISSING,
        f"{100 * (max(lost) - 1):.0f} %" if lost else MISSING,
    )
