"""Comparisons as tables: for a terminal (rich) and as Markdown, from the same cells.

One line per problem: kernel, time and speed of fused; time of piped, of the best torch backend and of the
naive chain, each with the ratio of fused's speed to its own (above 1, fused is faster); the largest errors of
fused. What did not run is listed below its table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.summary import Comparison, by_suite, compare, failures, kind, overall, tile

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
LEFT_ALIGNED = {"problem", "fused kernel"}
PEERS = ("piped", "torch_flash", "best torch", "naive")
CPU_WARNING = (
    "No GPU was used: the kernels ran on a model of one, thread by thread. Correctness is what this shows; "
    "times and ratios on a CPU mean nothing."
)


def cells(comparison: Comparison) -> list[str]:
    """The cells of one line, in the order of HEADERS."""
    fused, best = comparison.rows.get("fused"), comparison.best_torch
    return [
        comparison.label,
        tile(fused.kernel) if fused else "-",
        _time(comparison, "fused"),
        number(fused.tflops) if fused else "-",
        _time(comparison, "piped"),
        _ratio(comparison.speedup("piped")),
        f"{best.removeprefix('torch_')} {_time(comparison, best)}" if best else "-",
        _ratio(comparison.speedup(best)),
        _time(comparison, "naive"),
        _ratio(comparison.speedup("naive")),
        _error(fused.max_err_out) if fused else "-",
        _error(fused.max_err_lse) if fused else "-",
    ]


def heading(results: Results) -> str:
    """One line that says what the numbers were taken on."""
    env = results.env
    library = env.get("library") or {}
    where = env.get("gpu") or f"CPU: {env.get('cpu')}"
    parts = [
        where,
        f"driver {env['driver']}" if env.get("driver") else "",
        f"torch {env.get('torch')}",
        f"CUDA {env['cuda']}" if env.get("cuda") else "",
        f"library {library.get('version')} ({library.get('space')}, {str(library.get('digest'))[:12]})"
        if library
        else "no library",
        str(env.get("date", ""))[:10],
    ]
    return ", ".join(part for part in parts if part)


def conclusions(comparisons: Sequence[Comparison]) -> list[str]:
    """One line per peer: fused's speed-up over it, as a whole."""
    lines = []
    for peer in PEERS:
        found = overall(comparisons, peer)
        if found is not None:
            lines.append(
                f"fused against {peer.removeprefix('torch_')}: geometric mean {found.mean:.2f}x over "
                f"{found.count} problems, least {found.least:.2f}x ({found.least_at}), "
                f"greatest {found.greatest:.2f}x ({found.greatest_at})"
            )
    return lines


def footnotes(comparisons: Sequence[Comparison]) -> list[str]:
    """What is not plainly ok: one line per provider and kind of reason."""
    lines = []
    for failure in failures(comparisons):
        problems = f"{failure.count} of {len(comparisons)} problems"
        detail = failure.example.removeprefix(failure.kind).lstrip(": ")
        lines.append(f"{failure.provider}: {failure.kind}, {problems}" + (f": {detail}" if detail else ""))
    return lines


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
        for header in HEADERS:
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
            table.add_row(*map(escape, cells(comparison)))
        console.print(table)
        for line in footnotes(group):
            console.print(f"  {escape(line)}", style="dim", highlight=False)
    if results.env.get("gpu") is None:
        console.print(CPU_WARNING, style="bold yellow", highlight=False)
    else:
        console.print()
        for line in conclusions(comparisons):
            console.print(escape(line), highlight=False)


def to_markdown(results: Results) -> str:
    """The same tables as Markdown."""
    comparisons = compare(results.rows)
    lines = [heading(results), ""]
    for suite, group in by_suite(comparisons).items():
        lines += [f"**{suite}**, {group[0].problem.dtype}", ""]
        lines.append("| " + " | ".join(HEADERS) + " |")
        lines.append("|" + "|".join("---" if header in LEFT_ALIGNED else "---:" for header in HEADERS) + "|")
        lines += ["| " + " | ".join(cells(comparison)) + " |" for comparison in group]
        lines += ["", *(f"- {line}" for line in footnotes(group)), ""]
    if results.env.get("gpu") is None:
        lines.append(CPU_WARNING)
    else:
        lines += [f"- {line}" for line in conclusions(comparisons)]
    return "\n".join(lines) + "\n"


def _time(comparison: Comparison, provider: str) -> str:
    """Microseconds, or why there are none."""
    time_us = comparison.time_us(provider)
    if time_us is not None:
        return number(time_us)
    row = comparison.rows.get(provider)
    return "-" if row is None else kind(row.status)


def number(value: float | None) -> str:
    """Three digits, or the whole number where it has more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
