"""Two more pictures of a result file: fused's speed-up over its peers, and every problem below the roof.

Like plots.py, whose panels and colours these use: nothing needs a display, and nothing is drawn that was not
measured.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli import plots
from sdpa_cutlass.cli.plots import COLOURS, COLUMNS, PANEL_HEIGHT, PANEL_WIDTH, Panel, panels
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.roofline import ceilings_of, problem_of
from sdpa_cutlass.cli.suites import MASK_SUITES
from sdpa_cutlass.cli.summary import Comparison, compare, heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PEERS = ("piped", "torch_flash", "torch_cudnn", "torch_efficient")
MARKERS = {"mission": "*", "small": "o", "long": "s", "decode": "v", "masks": "x"}
OTHER_MARKER = "d"
DPI = 100


def speedup(results: Results) -> Figure | None:
    """Time of each peer over fused's, by sequence length or problem; None when fused has no peer here."""
    from matplotlib.figure import Figure

    comparisons = [one for one in _without_masks(results) if any(one.speedup(peer) for peer in PEERS)]
    if not comparisons:
        return None
    found = panels(comparisons)
    narrow = [panel for panel in found if panel.lines]
    wide = [panel for panel in found if not panel.lines]
    columns = max(2, min(COLUMNS, len(narrow)))
    narrow_rows = -(-len(narrow) // columns)
    rows = narrow_rows + len(wide)
    drawing = Figure(figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows + 0.8), layout="constrained")
    grid: Any = drawing.add_gridspec(rows, columns)
    for number, panel in enumerate(narrow):
        _draw_lines(drawing.add_subplot(grid[number // columns, number % columns]), panel)
    for number, panel in enumerate(wide):
        _draw_bars(drawing.add_subplot(grid[narrow_rows + number, :]), panel)
    drawing.suptitle(f"fused's speed-up: time of the other / time of fused. {heading(results)}", fontsize=9)
    _add_legend(drawing)
    return drawing


def roofline(results: Results) -> Figure | None:
    """Speed over FLOPs per byte of fused and of the fastest torch backend, below the datasheet's roof.

    None when the GPU is not listed there, or nothing was timed on one.
    """
    from matplotlib.figure import Figure

    ceilings = ceilings_of(results.env)
    comparisons = [one for one in compare(results.rows) if _point(one.row("fused")) is not None]
    if ceilings is None or not comparisons:
        return None
    drawing = Figure(figsize=(9, 6), layout="constrained")
    axes = drawing.add_subplot()
    points = _draw_points(axes, comparisons)
    left, right = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    ridge = 1000 * ceilings.tflops / ceilings.dram_gbps
    roof = [ceilings.dram_gbps * x / 1000 for x in (left, ridge)]
    peak = f"{ceilings.tflops:.0f} TFLOP/s, {ceilings.dram_gbps:.0f} GB/s ({ceilings.source})"
    axes.plot([left, ridge, max(right, ridge)], [*roof, ceilings.tflops], color="black", label=peak)
    copy = results.env.get("copy_bandwidth_gbps")
    if copy:
        speeds = [copy * x / 1000 for x in (left, ridge)]
        axes.plot([left, ridge], speeds, "--", color="gray", label=f"a copy, measured: {copy:.0f} GB/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs per byte of q, k, v and out", fontsize=8)
    axes.set_ylabel("TFLOP/s", fontsize=8)
    axes.grid(which="both", alpha=0.2)
    axes.set_title(f"Roofline. {heading(results)}", fontsize=8)
    axes.legend(fontsize=7, loc="lower right")
    return drawing


PICTURES: Mapping[str, Callable[[Results], Any]] = {"speedup": speedup, "roofline": roofline}


def save(drawing: Figure, path: Path, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a picture as a PNG file; `metadata` goes into its text."""
    data = io.BytesIO()
    drawing.savefig(data, format="png", dpi=DPI, metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.getvalue())


def _without_masks(results: Results) -> list[Comparison]:
    """The problems without masks; all of them in a file that has no others."""
    comparisons = [one for one in compare(results.rows) if one.row("fused") is not None]
    plain = [one for one in comparisons if one.problem.suite not in MASK_SUITES]
    return plain or comparisons


def _point(row: Row | None) -> tuple[float, float] | None:
    """FLOPs per byte and TFLOP/s."""
    if row is None or row.tflops is None or row.gpu_us is None:
        return None
    return row.tflops * row.gpu_us * 1e6 / problem_of(row).bytes, row.tflops


def _draw_points(axes: Axes, comparisons: list[Comparison]) -> list[tuple[float, float]]:
    """One marker per suite, filled for fused and hollow for torch's best; returns fused's points."""
    every: list[tuple[float, float]] = []
    for suite in dict.fromkeys(one.problem.suite for one in comparisons):
        members = [one for one in comparisons if one.problem.suite == suite]
        marker = MARKERS.get(suite, OTHER_MARKER)
        ours = [point for one in members if (point := _point(one.row("fused")))]
        theirs = [point for one in members if one.best_torch and (point := _point(one.row(one.best_torch)))]
        every += ours
        style: dict[str, Any] = {"marker": marker, "s": 22, "linewidths": 0.8}
        _scatter(axes, ours, color=COLOURS["fused"], label=f"fused, {suite}", **style)
        colour = COLOURS["torch_flash"]
        face = {"color": colour} if marker == "x" else {"facecolors": "none", "edgecolors": colour}
        _scatter(axes, theirs, label=f"fastest of torch, {suite}", **style, **face)
    return every


def _scatter(axes: Axes, points: list[tuple[float, float]], **style: Any) -> None:
    if points:
        axes.scatter([x for x, _ in points], [y for _, y in points], **style)


def _speedup(comparison: Comparison, peer: str) -> float:
    return comparison.speedup(peer) or float("nan")


def _peers(panel: Panel) -> list[str]:
    return [peer for peer in PEERS if any(one.speedup(peer) for one in panel.comparisons)]


def _draw_lines(axes: Axes, panel: Panel) -> None:
    plots.lines(axes, panel, _peers(panel), _speedup)
    _finish(axes, panel)


def _draw_bars(axes: Axes, panel: Panel) -> None:
    plots.bars(axes, panel, _peers(panel), _speedup, fontsize=5)
    _finish(axes, panel)


def _finish(axes: Axes, panel: Panel) -> None:
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_title(panel.title, fontsize=9)
    axes.set_ylabel("speed-up", fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=6)
    axes.grid(axis="y", alpha=0.3)


def _add_legend(drawing: Figure) -> None:
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
