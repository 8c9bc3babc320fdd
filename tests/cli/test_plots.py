"""Pictures: which panels, what is drawn in them, and that the file is a PNG."""

from __future__ import annotations

from pathlib import Path

from sdpa_cutlass.cli import plots
from sdpa_cutlass.cli.summary import compare
from tests.cli import rows as made

GRID = made.mission() + made.long(64) + made.long(64, causal=True) + made.long(128)


def test_panels() -> None:
    found = plots.panels(compare(GRID))
    assert [(panel.title, panel.lines, len(panel.comparisons)) for panel in found] == [
        ("long: head_dim 64", True, 3),
        ("long: head_dim 128", True, 3),
        ("long: head_dim 64, causal", True, 3),
        ("mission", False, 1),
    ]


def test_figure() -> None:
    drawing = plots.figure(made.results(GRID))
    assert len(drawing.axes) == 4
    lines = {line.get_label(): list(line.get_ydata()) for line in drawing.axes[0].get_lines()}
    speeds = [row.tflops for row in made.long(64) if row.provider == "fused"]
    assert lines["fused"] == speeds
    assert len(drawing.axes[3].patches) == 5  # bars: every provider that ran, one problem
    assert {text.get_text() for text in drawing.legends[0].get_texts()} == {
        "fused", "piped", "torch_flash", "torch_cudnn", "naive",
    }  # fmt: skip


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "plot.png"
    plots.save(made.results(GRID), path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 10_000


def test_nothing_to_draw(tmp_path: Path) -> None:
    plots.save(made.results([]), tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000
