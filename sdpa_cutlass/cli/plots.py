"""Comparisons as one picture: TFLOP/s of every provider.

Problems that differ only in their sequence length make a line panel, one per suite, head dimension, causality
and mask; all other problems of a suite make one bar panel. panels() decides, figure() draws; nothing needs
a display.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli import mask_tables, wall_tables
from sdpa_cutlass.cli.results import PEERS, PROVIDERS, Results, Row
from sdpa_cutlass.cli.suites import MASK_SUITES
from sdpa_cutlass.cli.summary import Comparison, by_suite, compare, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "fused": "#d62728",
    "plain": "#e7969c",
    "piped": "#ff9896",
    "torch_flash": "#1f77b4",
    "torch_cudnn": "#2ca02c",
    "torch_efficient": "#9467bd",
    "torch_math": "#8c8c8c",
    "naive": "#333333",
    "flash_attn": "#17becf",
    "flash_attn_3": "#0b7285",
    "flash_attn_4": "#74c0fc",
    "xformers": "#bcbd22",
    "flashinfer": "#e377c2",
    "sageattention": "#ff7f0e",
}
PANEL_WIDTH, PANEL_HEIGHT, COLUMNS = 4.2, 3.2, 5
MIN_LENGTHS = 3


@dataclasses.dataclass(frozen=True)
class Panel:
    """One axes. `lines`: x is seqlen_q on a logarithmic scale; otherwise a group of bars per problem."""

    title: str
    comparisons: Sequence[Comparison]
    lines: bool


def panels(comparisons: Sequence[Comparison]) -> list[Panel]:
    """Line panels first, then a bar panel for the rest of each suite."""
    lines: list[Panel] = []
    bars: list[Panel] = []
    for suite, group in by_suite(comparisons).items():
        series: dict[tuple[str, bool, int], list[Comparison]] = {}
        for comparison in group:
            row = comparison.problem
            series.setdefault((_mask(row), row.causal, row.head_dim), []).append(comparison)
        rest: list[Comparison] = []
        for (mask, causal, head_dim), members in sorted(series.items()):
            lengths = {member.problem.seqlen_q for member in members}
            if len(lengths) == len(members) >= MIN_LENGTHS:
                title = f"{suite}: head_dim {head_dim}{', causal' if causal else ''}{mask}"
                members.sort(key=lambda member: member.problem.seqlen_q)
                lines.append(Panel(title, members, lines=True))
            else:
                rest += members
        if rest:
            bars.append(Panel(suite, [comparison for comparison in group if comparison in rest], lines=False))
    return lines + bars


def _mask(row: Row) -> str:
    """What a title says of a problem that is not plain."""
    return f", {mask_tables.kind_of(row)}" if row.suite in MASK_SUITES else ""


def figure(results: Results) -> Figure:
    """The picture: one axes per panel, bar panels as wide as the figure, one legend."""
    from matplotlib.figure import Figure

    found = panels([one for one in compare(results.rows) if one.problem.suite != wall_tables.SUITE])
    narrow = [panel for panel in found if panel.lines]
    wide = [panel for panel in found if not panel.lines]
    columns = min(COLUMNS, len(narrow)) or 2
    narrow_rows = -(-len(narrow) // columns)
    rows = max(1, narrow_rows + len(wide))
    drawing = Figure(figsize=(PANEL_WIDTH * max(columns, 2), PANEL_HEIGHT * rows + 0.8), layout="constrained")
    grid: Any = drawing.add_gridspec(rows, columns)
    for number, panel in enumerate(narrow):
        _draw_lines(drawing.add_subplot(grid[number // columns, number % columns]), panel)
    for number, panel in enumerate(wide):
        _draw_bars(drawing.add_subplot(grid[narrow_rows + number, :]), panel)
    drawing.suptitle(heading(results), fontsize=9)
    handles = {
        label: handle
        for axes in drawing.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    drawing.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=max(1, len(handles)),
        fontsize=8,
    )
    return drawing


def save(results: Results, path: Path) -> None:
    """Writes the picture as a PNG file."""
    data = io.BytesIO()
    figure(results).savefig(data, format="png", dpi=110)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.getvalue())


def _speed(comparison: Comparison, provider: str) -> float:
    row = comparison.row(provider)
    return row.tflops if row is not None and row.tflops is not None else float("nan")


def _providers(panel: Panel) -> list[str]:
    names = (*PROVIDERS, *PEERS)
    return [name for name in names if any(comparison.row(name) for comparison in panel.comparisons)]


def lines(axes: Axes, panel: Panel, names: Sequence[str], value: Callable[[Comparison, str], float]) -> None:
    """One line over the sequence length for each of `names`."""
    lengths = [comparison.problem.seqlen_q for comparison in panel.comparisons]
    for name in names:
        values = [value(comparison, name) for comparison in panel.comparisons]
        axes.plot(lengths, values, marker="o", markersize=3, color=COLOURS[name], label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("sequence length", fontsize=8)


def bars(
    axes: Axes,
    panel: Panel,
    names: Sequence[str],
    value: Callable[[Comparison, str], float],
    *,
    fontsize: int,
) -> None:
    """A group of bars, one of each name, for every problem."""
    width = 0.8 / max(1, len(names))
    for number, name in enumerate(names):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(panel.comparisons))]
        values = [value(comparison, name) for comparison in panel.comparisons]
        axes.bar(places, values, width, color=COLOURS[name], label=name)
    labels = [comparison.label.replace(" D", "\nD") for comparison in panel.comparisons]
    axes.set_xticks(range(len(labels)), labels, fontsize=fontsize)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    lines(axes, panel, _providers(panel), _speed)
    _finish(axes, panel)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    bars(axes, panel, _providers(panel), _speed, fontsize=6)
    _finish(axes, panel)


def _finish(axes: Axes, panel: Panel) -> None:
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", alpha=0.3)
