"""Suite `wall` as a table: what a call costs in Python, for each way to call (wall.py has the columns)."""

from __future__ import annotations

from collections.abc import Sequence

from sdpa_cutlass.cli.cells import MISSING, number
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.summary import Comparison, kind

SUITE = "wall"
CALLS = {
    "plan_run": "`plan(...)` made before, `run(q, k, v, out)`",
    "attention_out": "`attention(q, k, v, out=out)`",
    "sdpa": "`scaled_dot_product_attention(q, k, v)`",
    "plan_make": "making a plan: `plan(q, k, v, out=out)`",
    "torch_default": "torch's, its own choice of backend",
    "torch_flash": "torch's, flash",
    "torch_cudnn": "torch's, cuDNN",
}
HEADERS = ("problem", *CALLS)


def cells(comparison: Comparison) -> list[str]:
    """One line per problem: `wall_us ± spread, loop_us` of every way to call."""
    return [comparison.label, *(_cell(comparison.rows.get(name)) for name in CALLS)]


def _cell(row: Row | None) -> str:
    if row is None:
        return MISSING
    if not row.ok or row.wall_us is None:
        return kind(row.status)
    return f"{number(row.wall_us)} ± {number(row.wall_us_spread)}, {number(row.loop_us)}"


def markdown(comparisons: Sequence[Comparison]) -> list[str]:
    """The lines of a document's table: one per way to call, three columns per problem."""
    heads = [
        f"{comparison.label}: {what}" for comparison in comparisons for what in ("wall µs", "±", "loop µs")
    ]
    lines = ["| " + " | ".join(["call", *heads]) + " |", "|---|" + "---:|" * len(heads)]
    for name, title in CALLS.items():
        found: list[str] = []
        for comparison in comparisons:
            row = comparison.rows.get(name)
            if row is None or not row.ok:
                found += [kind(row.status) if row else MISSING, MISSING, MISSING]
            else:
                found += [number(row.wall_us), number(row.wall_us_spread), number(row.loop_us)]
        lines.append("| " + " | ".join([title, *found]) + " |")
    return lines
