"""Comparisons as tables: for a terminal (rich) and as Markdown, from the same cells.

One line per problem: kernel, time and speed of fused; time of piped, of the best torch backend and of the
naive chain, each with the ratio of fused's speed to its own (above 1, fused is faster); the largest errors of
fused. The suites of masks, `decode` and `wall` have columns of their own (mask_tables.py, decode_tables.py,
wall_tables.py). What did not run is listed below its table. Without a GPU every suite has the columns of
cpu_tables.py instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sdpa_cutlass.cli import cpu_tables, decode_tables, mask_tables, wall_tables
from sdpa_cutlass.cli.cells import error, number, ratio, time_us
from sdpa_cutlass.cli.results import PEERS as INSTALLED
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.suites import MASK_SUITES
from sdpa_cutlass.cli.summary import OURS, Comparison, by_suite, compare, failures, heading, overall, tile

if TYPE_CHECKING:
    from rich.console import Console

HEADERS = (
    "problem",
    "fused kernel",
    "fused µs",
    "TFLOP/s",
    "piped µs",
    "fused/piped",
    "best torch µs",
    "fused/torch",
    "naive µs",
    "fused/naive",
    "err O",
    "err LSE",
)
LEFT_ALIGNED = ("problem", "fused kernel")
PEERS = ("piped", "torch_flash", "best torch", "naive")


def cells(comparison: Comparison) -> list[str]:
    """The cells of one line, in the order of HEADERS."""
    fused, best = comparison.rows.get("fused"), comparison.best_torch
    return [
        comparison.label,
        tile(fused.kernel) if fused else "-",
        time_us(comparison, "fused"),
        number(fused.tflops) if fused else "-",
        time_us(comparison, "piped"),
        ratio(comparison.speedup("piped")),
        f"{best.removeprefix('torch_')} {time_us(comparison, best)}" if best else "-",
        ratio(comparison.speedup(best)),
        time_us(comparison, "naive"),
        ratio(comparison.speedup("naive")),
        error(fused.max_err_out) if fused else "-",
        error(fused.max_err_lse) if fused else "-",
    ]


class Layout(NamedTuple):
    """The columns of a suite's table."""

    headers: tuple[str, ...]
    cells: Callable[[Comparison], list[str]]


def layout(suite: str, env: Mapping[str, Any] | None = None) -> Layout:
    """The columns that a suite is shown in; `env` is of the results, for what is relative to the machine."""
    if not _is_of_gpu(env):
        return Layout(cpu_tables.HEADERS, cpu_tables.cells)
    if suite == decode_tables.SUITE:
        return Layout(decode_tables.HEADERS, functools.partial(decode_tables.cells, env=env or {}))
    if suite == wall_tables.SUITE:
        return Layout(wall_tables.HEADERS, wall_tables.cells)
    if suite in MASK_SUITES:
        return Layout(mask_tables.HEADERS, mask_tables.cells)
    return Layout(HEADERS, cells)


def _is_of_gpu(env: Mapping[str, Any] | None) -> bool:
    """Whether results with this `env` were measured on a GPU; without one they are taken to be."""
    return env is None or env.get("gpu") is not None


def conclusions(comparisons: Sequence[Comparison], env: Mapping[str, Any] | None = None) -> list[str]:
    """One line per peer: fused's speed-up over it, as a whole; then those of `decode` and of the masks."""
    lines = []
    decode = [one for one in comparisons if one.problem.suite == decode_tables.SUITE]
    plain, masked = split(comparisons)
    for peer in (*PEERS, *INSTALLED):
        found = overall(plain, peer)
        if found is not None:
            lines.append(
                f"fused against {peer.removeprefix('torch_')}: geometric mean {found.mean:.2f}x over "
                f"{found.count} problems, least {found.least:.2f}x ({found.least_at}), "
                f"greatest {found.greatest:.2f}x ({found.greatest_at})"
            )
    lines += [f"decode: {line}" for line in decode_tables.statements(decode, env or {})]
    return lines + mask_tables.conclusions(masked)


def sentence(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> str | None:
    """The plain problems in words to repeat; None where none was measured by fused and by a torch backend."""
    plain, _ = split(comparisons)
    found = overall(plain, "best torch")
    if found is None:
        return None
    ahead = sum((one.speedup(one.best_torch) or 0) > 1 for one in plain)
    return (
        f"In one sentence: on an {env['gpu']}, attention by sdpa_cutlass is {found.mean:.2f} times as fast "
        "as by the fastest of torch's backends (geometric mean), and ahead in "
        f"{ahead} of {found.count} problems."
    )


def split(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[Comparison]]:
    """Those of the suites of plain problems, and those of the suites of masks."""
    others = (*MASK_SUITES, decode_tables.SUITE, wall_tables.SUITE)
    plain = [one for one in comparisons if one.problem.suite not in others]
    return plain, [one for one in comparisons if one.problem.suite in MASK_SUITES]


def footnotes(comparisons: Sequence[Comparison]) -> list[str]:
    """What is not plainly ok: one line per provider and kind of reason."""
    lines = []
    for failure in failures(comparisons):
        problems = f"{failure.count} of {len(comparisons)} problems"
        detail = failure.example.removeprefix(failure.kind).lstrip(": ")
        lines.append(f"{failure.provider}: {failure.kind}, {problems}" + (f": {detail}" if detail else ""))
    return lines


def _shown(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> Sequence[Comparison]:
    """What the footnotes are about: without a GPU this library's families, the only ones in the table."""
    if _is_of_gpu(env):
        return comparisons
    ours = ({name: row for name, row in one.rows.items() if name in OURS} for one in comparisons)
    return [Comparison(rows) for rows in ours if rows]


def show(results: Results, console: Console) -> None:
    """Prints one table per suite, with footnotes, then the conclusions."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    comparisons = compare(results.rows)
    console.print(escape(heading(results)), style="bold", highlight=False)
    for suite, group in by_suite(comparisons).items():
        title = f"\n{suite}, {group[0].problem.dtype}"
        table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        columns = layout(suite, results.env)
        for header in columns.headers:
            # Two lines: the numbers below are narrow.
            lines = (
                header.replace("/", "/\n", 1)
                if header.startswith("fused/")
                else header.replace(" µs", "\nµs")
            )
            table.add_column(
                lines,
                justify="left" if header in LEFT_ALIGNED else "right",
                no_wrap=header != "fused kernel",
                overflow="fold",
            )
        for comparison in group:
            table.add_row(*map(escape, columns.cells(comparison)))
        console.print(table)
        for line in footnotes(_shown(group, results.env)):
            console.print(f"  {escape(line)}", style="dim", highlight=False)
    if not _is_of_gpu(results.env):
        for line in cpu_tables.conclusions(comparisons):
            console.print(f"{escape(line)}", style="bold", highlight=False)
        console.print(cpu_tables.NOTE, style="yellow", highlight=False)
    else:
        console.print()
        for line in conclusions(comparisons, results.env):
            console.print(escape(line), highlight=False)
        if in_words := sentence(comparisons, results.env):
            console.print(f"\n{escape(in_words)}", style="bold", highlight=False)


def to_markdown(results: Results) -> str:
    """The same tables as Markdown."""
    comparisons = compare(results.rows)
    lines = [heading(results), ""]
    for suite, group in by_suite(comparisons).items():
        lines += [f"**{suite}**, {group[0].problem.dtype}", ""]
        columns = layout(suite, results.env)
        rule = ("---" if header in LEFT_ALIGNED else "---:" for header in columns.headers)
        lines += ["| " + " | ".join(columns.headers) + " |", "|" + "|".join(rule) + "|"]
        lines += ["| " + " | ".join(columns.cells(comparison)) + " |" for comparison in group]
        lines += ["", *(f"- {line}" for line in footnotes(_shown(group, results.env))), ""]
    if not _is_of_gpu(results.env):
        lines += [*(f"- {line}" for line in cpu_tables.conclusions(comparisons)), "", cpu_tables.NOTE]
    else:
        lines += [f"- {line}" for line in conclusions(comparisons, results.env)]
    return "\n".join(lines) + "\n"
