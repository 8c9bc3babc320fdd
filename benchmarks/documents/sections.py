"""The kinds of blocks: what makes a block's text or picture from result files, and which rows it shows.

`SECTIONS` has them all by the name that a marker says; report.py finds the markers and writes the documents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents import (
    agreement,
    front,
    goal_tables,
    model_quality,
    naive_tables,
    prediction_tables,
    random_tables,
    short_tables,
)
from benchmarks.documents.naive_tables import NAIVE
from sdpa_cutlass.cli import (
    bench_plots,
    decode_tables,
    mask_tables,
    plots,
    random_suite,
    summary,
    tables,
    wall_tables,
)
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.suites import MASK_SUITES
from sdpa_cutlass.cli.summary import compare

PICTURE_SUFFIX = ".png"


@dataclasses.dataclass(frozen=True)
class Source:
    """A result file and what it holds."""

    path: Path
    results: Results
    digest: str

    @property
    def tag(self) -> str:
        """What a picture that was drawn from this file says of its origin."""
        return f"sha256:{self.digest}"

    def showing(self, section: Section) -> Source:
        """The same file with the rows that a section shows, perhaps none."""
        rows = [row for row in self.results.rows if section.shows(row)]
        return dataclasses.replace(self, results=Results(self.results.env, rows))


@dataclasses.dataclass(frozen=True)
class Section:
    """One kind of block: what makes its body from sources and their names, and which rows it shows.

    It takes at least `least` files, in which provider `needs`, if given, took part. `draw` makes the picture
    of those that have one, from their first file, or from all where `draws_all`.
    """

    make: Callable[[Sequence[Source], Sequence[str]], str]
    shows: Callable[[Row], bool]
    least: int = 1
    needs: str | None = None
    draw: Callable[[Sequence[Results]], Any] | None = None
    draws_all: bool = False


def _summary(sources: Sequence[Source], files: Sequence[str]) -> str:
    """The short table of the first file, the statements of all."""
    parts = [
        short_tables.to_markdown(source.results, with_table=number == 0)
        for number, source in enumerate(sources)
    ]
    return "\n\n".join([*parts, _origin(files)])


def _tables(sources: Sequence[Source], files: Sequence[str]) -> str:
    """Every row of every file."""
    parts: list[str] = []
    for source in sources:
        parts += [f"## {source.path.stem}", tables.to_markdown(source.results).strip()]
    return "\n\n".join([*parts, _origin(files)])


def _plot(sources: Sequence[Source], files: Sequence[str], *, title: str) -> str:
    """The picture, where there is one: it is the last file."""
    if not files[-1].endswith(PICTURE_SUFFIX):
        return ""
    return f"![{title} on {summary.heading(sources[0].results)}]({files[-1]})"


def _wall(sources: Sequence[Source], files: Sequence[str]) -> str:
    """What a call costs in Python, one table per file."""
    parts: list[str] = []
    for source in sources:
        found = source.results
        parts += [f"**{source.path.stem}**: {summary.heading(found)}"]
        parts += ["\n".join(wall_tables.markdown(compare(found.rows)))]
        notes = [line for line in tables.footnotes(compare(found.rows)) if not line.startswith("ok")]
        parts += ["\n".join(f"- {line}" for line in notes)] if notes else []
    return "\n\n".join([*parts, _origin(files)])


def _naive(sources: Sequence[Source], files: Sequence[str], *, with_table: bool) -> str:
    """The highest ratio over the naive chain, and that of every problem."""
    found = {source.path.stem: source.results for source in sources}
    parts = [naive_tables.sentence(found)]
    if with_table:
        parts.append("\n".join(naive_tables.table(found)))
    return "\n\n".join([*parts, _origin(files)])


def _goals(sources: Sequence[Source], files: Sequence[str]) -> str:
    """Every goal, a column for each file."""
    lines = goal_tables.table({source.path.stem: source.results for source in sources})
    return "\n\n".join(["\n".join(lines), _origin(files)])


def _agreement(sources: Sequence[Source], files: Sequence[str]) -> str:
    """Every pair of files with problems in common."""
    lines = agreement.sections({source.path.stem: source.results for source in sources})
    return "\n".join([*(lines or ["No two of these files share a problem.", ""]), _origin(files)])


def _masks_summary(sources: Sequence[Source], files: Sequence[str]) -> str:
    """What each kind of mask costs, of the first file."""
    found = sources[0].results
    comparisons = compare(found.rows)
    dtypes = " and ".join(dict.fromkeys(row.dtype for row in found.rows))
    head = f"**{dtypes}** on {summary.heading(found)}.{short_tables.through_ptx(found)}"
    return "\n\n".join([head, "\n".join(mask_tables.summary(comparisons)), _origin(files)])


def _front(sources: Sequence[Source], files: Sequence[str]) -> str:
    """The first screen's table, of the first file."""
    found = sources[0].results
    return "\n\n".join(["\n".join(front.table(found)), f"{summary.heading(found)}. {_origin(files[:1])}"])


def _front_picture(sources: Sequence[Source], files: Sequence[str]) -> str:
    """The first screen's picture."""
    cards = " and ".join(dict.fromkeys(source.results.env["gpu"] for source in sources))
    return f"![Speed over sequence length on {cards}]({files[-1]})\n\n{_origin(files[:-1])}"


def _predictions(sources: Sequence[Source], files: Sequence[str]) -> str:
    """Times that the cost models predict. Of the files, which say what was measured, nothing is in them."""
    return "\n".join([*prediction_tables.tables(), "", "Predictions, not measurements."])


def _prediction_goal(sources: Sequence[Source], files: Sequence[str]) -> str:
    """The mission's goal on cards that are predicted."""
    return "\n".join(prediction_tables.goal())


def _model_quality(sources: Sequence[Source], files: Sequence[str]) -> str:
    """Predictions next to the measurements of all files."""
    lines = prediction_tables.quality([source.results for source in sources])
    return "\n\n".join(["\n".join(lines), _origin(files)])


def _random(sources: Sequence[Source], files: Sequence[str]) -> str:
    """A line for each run of random problems, with its file."""
    runs = {
        f"[{source.results.env['command']['seed']}]({name})": source.results
        for source, name in zip(sources, files, strict=True)
    }
    return "\n".join(random_tables.table(runs))


def _has_masks(row: Row) -> bool:
    return row.suite in MASK_SUITES


def _is_of(suite: str) -> Callable[[Row], bool]:
    return lambda row: row.suite == suite


def _is_plain(row: Row) -> bool:
    return row.suite not in (*MASK_SUITES, decode_tables.SUITE, wall_tables.SUITE)


def _is_timed_on_gpu(row: Row) -> bool:
    return row.suite != wall_tables.SUITE


def _is_compared_with_naive(row: Row) -> bool:
    return _is_timed_on_gpu(row) and row.provider in ("fused", NAIVE)


def _first(draw: Callable[[Results], Any]) -> Callable[[Sequence[Results]], Any]:
    return lambda found: draw(found[0])


def _draw_lines(found: Results) -> Any:
    """Speed over sequence length; everything, where no problems differ in length alone."""
    rows = [
        row
        for panel in plots.panels(compare(found.rows))
        if panel.lines
        for comparison in panel.comparisons
        for row in comparison.rows.values()
    ]
    return plots.figure(Results(found.env, rows or found.rows))


_SPEED = functools.partial(_plot, title="Speed over sequence length")
_SPEEDUP = functools.partial(_plot, title="Speed-up of fused over its peers")
_ROOFLINE = functools.partial(_plot, title="Every problem below the roof")

SECTIONS = {
    "front": Section(_front, front.is_of_table, needs=front.NEEDS),
    "front_picture": Section(_front_picture, front.is_of_picture, least=2, draw=front.figure, draws_all=True),
    "summary": Section(_summary, _is_plain),
    "tables": Section(_tables, _is_plain),
    "plot": Section(_SPEED, _is_plain, draw=_first(_draw_lines)),
    "plot_speedup": Section(_SPEEDUP, _is_plain, draw=_first(bench_plots.speedup)),
    "plot_roofline": Section(_ROOFLINE, _is_timed_on_gpu, draw=_first(bench_plots.roofline)),
    "masks": Section(_tables, _has_masks),
    "masks_summary": Section(_masks_summary, _has_masks),
    "decode": Section(_tables, _is_of(decode_tables.SUITE)),
    "wall": Section(_wall, _is_of(wall_tables.SUITE)),
    "naive": Section(functools.partial(_naive, with_table=True), _is_compared_with_naive, needs=NAIVE),
    "naive_line": Section(functools.partial(_naive, with_table=False), _is_compared_with_naive, needs=NAIVE),
    "random": Section(_random, _is_of(random_suite.SUITE), needs="fused"),
    "goals": Section(_goals, lambda row: True),
    "agreement": Section(_agreement, lambda row: row.ok, least=2),
    "predictions": Section(_predictions, lambda row: False, least=0),
    "prediction_goal": Section(_prediction_goal, lambda row: False, least=0),
    "model_quality": Section(_model_quality, lambda row: row.provider in model_quality.OURS),
}


def _origin(files: Sequence[str]) -> str:
    links = ", ".join(f"[{Path(name).name}]({name})" for name in files)
    return f"Made by `python -m benchmarks.documents` from {links}."
