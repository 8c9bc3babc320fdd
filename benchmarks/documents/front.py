"""The README's table and picture: few problems, one number in a cell, every card and kernel family named.

`table` shows problems of suites `mission` and `hopper` from one result file; `figure` shows speed over the
sequence length, a row of panels for each of the files that it is given. Both show losses, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdpa_cutlass.cli import plots
from sdpa_cutlass.cli.cells import number
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.summary import Comparison, compare

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
SEQLENS = (512, 2048, 16384)
PROVIDERS = {
    "fused": "sdpa_cutlass",
    "torch_cudnn": "torch cuDNN",
    "torch_flash": "torch flash",
    "flash_attn_4": "FlashAttention-4",
    "piped": "piped baseline",
}
TABLE_PROVIDERS = ("fused", "torch_cudnn", "torch_flash", "flash_attn_4")
NEEDS = "flash_attn_4"  # a contestant that a file for the table has to have
MISSING = "–"
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 2.9


def is_of_table(row: Row) -> bool:
    """Whether the table shows the row's problem."""
    return row.suite == "mission" or (row.suite == "hopper" and _is_square(row) and row.seqlen_q in SEQLENS)


def is_of_picture(row: Row) -> bool:
    """Whether the picture shows the row's problem."""
    return row.suite in ("hopper", "long") and _is_square(row)


def table(results: Results) -> list[str]:
    """The table's lines, its head included: one problem a line, microseconds of each contestant."""
    head = ["batch", "heads", "seqlen", "head_dim", "causal", "kernel for"]
    head += [f"{PROVIDERS[name]}, µs" for name in TABLE_PROVIDERS]
    chosen = [comparison for comparison in compare(results.rows) if is_of_table(comparison.problem)]
    return [
        _line(head),
        _line(["---:"] * 4 + ["---"] * 2 + ["---:"] * len(TABLE_PROVIDERS)),
        *(_line(_cells(comparison)) for comparison in chosen),
    ]


def figure(found: Sequence[Results]) -> Figure:
    """Speed over the sequence length at one head_dim: a row of panels a file, full attention and causal."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT * len(found) + 0.6), layout="constrained")
    axes = drawing.subplots(len(found), 2, squeeze=False)
    for results, pair in zip(found, axes, strict=True):
        lines = [comparison for comparison in compare(results.rows) if is_of_picture(comparison.problem)]
        for one, causal in zip(pair, (False, True), strict=True):
            members = sorted(
                (comparison for comparison in lines if comparison.problem.causal == causal),
                key=lambda comparison: comparison.problem.seqlen_q,
            )
            names = [name for name in PROVIDERS if any(member.row(name) for member in members)]
            title = f"{_kernels_of(members)} on {results.env['gpu']}, {'causal' if causal else 'full'}"
            plots.lines(one, plots.Panel(title, members, lines=True), names, _speed)
            one.set_title(title, fontsize=9)
            one.set_ylabel("TFLOP/s", fontsize=8)
            one.set_ylim(bottom=0)
            one.tick_params(labelsize=7)
            one.grid(axis="y", alpha=0.3)
    handles = {
        PROVIDERS[label]: handle
        for one in drawing.axes
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=len(handles), fontsize=8
    )
    return drawing


def _is_square(row: Row) -> bool:
    """A problem of the lines: as many tokens and channels at every length."""
    same_heads = row.num_heads_q == row.num_heads_kv == HEADS
    return row.head_dim == HEAD_DIM and same_heads and row.batch * row.seqlen_q == TOKENS


def _cells(comparison: Comparison) -> list[str]:
    row = comparison.problem
    fused = comparison.row("fused")
    arch = _arch(fused.kernel if fused else None)
    times = [comparison.time_us(name) for name in TABLE_PROVIDERS]
    return [
        *map(str, (row.batch, row.num_heads_q, row.seqlen_q, row.head_dim)),
        "yes" if row.causal else "no",
        arch,
        *(MISSING if time is None else number(time) for time in times),
    ]


def _kernels_of(members: Sequence[Comparison]) -> str:
    rows = [row for member in members if (row := member.row("fused"))]
    return f"{' and '.join(sorted({_arch(row.kernel) for row in rows}))} kernels"


def _arch(kernel: str | None) -> str:
    """The architecture in a kernel's name: `fmha_fwd_sm90_d64_…` → `sm_90`."""
    found = [part for part in (kernel or "").split("_") if part.startswith("sm")]
    return found[0].replace("sm", "sm_") if found else MISSING


def _speed(comparison: Comparison, provider: str) -> float:
    row = comparison.row(provider)
    return row.tflops if row is not None and row.tflops is not None else float("nan")


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
