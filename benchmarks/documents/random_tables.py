"""Runs of random problems → one line a run: where this library is ahead, and what its choice loses.

Ratios are those of sdpa_cutlass/cli/random_report.py: the better of torch's flash and mem-efficient backends
over ours. What the choice loses is what the cost models of this checkout would choose among the kernels that
the run timed at a sample of its problems, over the fastest of them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.documents import kernel_rows
from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.choice.cost.splits import merges_in_second_launch
from sdpa_cutlass.choice.mask_reads import LONGEST_RUN, RUNS, UNALIGNED_COPY_SCORES
from sdpa_cutlass.cli import predictions, random_report
from sdpa_cutlass.cli.cells import MISSING
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.summary import compare
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import Problem

FAR_BEHIND = 0.9
_COPIES_SINCE = "2026-11-25"  # of dense masks whose rows are unaligned: before that, kernels read them
_MERGES_SINCE = (
    "2026-11-26T08"  # by a second launch: before that, the last CTA of a tile merged large parts too
)
_SHORT_PROLOGUES_SINCE = "2026-11-27"  # of split kernels with KV groups: they took up to 1.5 times as long
_TURNS_SINCE = "2026-11-27T18"  # of general kernels of Hopper: a CTA had one tile
_PAIRS_READ_SINCE = "2026-11-26T21"  # by Hopper's kernels of masks that others have copied
# Of tiles that leave SMs idle, or a few of them with more, with more than two KV groups, and with two.
_EVEN_SPLITS_SINCE = "2026-11-28T14"
_EVEN_SPLITS_OF_TWO_SINCE = "2026-11-28T18"
_SHORT_EPILOGUES_SINCE = "2026-11-28T16"  # of kernels for mma.sync whose warps do not share rows
_SHORT_EPILOGUES_KEYS = 512  # beyond, O's way out is a small part of the time
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
    rows = {
        dataclasses.replace(random_report.case_of(row), dtype=None).name: row
        for row in run.rows
        if row.provider == "fused" and row.dtype == "f16"
    }
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


def has_changed(kernel: KernelInfo, problem: Problem, date: str) -> bool:
    """Whether times of `date` are another kernel's: its code has changed, its mask is no longer copied, or
    other CTAs merge its parts.
    """
    if kernel.family is Family.FMHA_FWD_SM90 and kernel.is_general:
        if date < _PAIRS_READ_SINCE and not problem.reads_mask_by(LONGEST_RUN):
            run = RUNS[kernel.family.value]
            return problem.reads_mask_by(run) and problem.scores >= UNALIGNED_COPY_SCORES
        return date < _TURNS_SINCE and problem.mask is None and not problem.has_lengths
    if kernel.family is not Family.FMHA_FWD:
        return False
    writes_much = kernel.kv_groups == 1 and problem.seqlen_k <= _SHORT_EPILOGUES_KEYS
    if date < _SHORT_EPILOGUES_SINCE and writes_much:
        return True
    if not kernel.is_split:
        return False
    if kernel.kv_groups > 1 and date < _SHORT_PROLOGUES_SINCE:
        return True
    rows = min(kernel.block_m, problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv)
    found = estimate(kernel, problem, predictions.H200.device)
    num_splits = found.num_splits
    leaves_sms_idle = 2 * found.ctas > predictions.H200.device.sms * num_splits  # without splits
    even_since = _EVEN_SPLITS_OF_TWO_SINCE if kernel.kv_groups == 2 else _EVEN_SPLITS_SINCE
    if date < even_since and kernel.kv_groups > 1 and num_splits > 1 and leaves_sms_idle:
        return True
    return date < _MERGES_SINCE and merges_in_second_launch(kernel, rows, num_splits)


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
