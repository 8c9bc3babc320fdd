"""Results → a table short enough for a first screen, as Markdown: one line per series of problems.

A series holds problems that differ in one size: the batch in suite `small`, the sequence length in suite
`long`. Its values stand side by side in one cell, in the order of the sizes in the first cell. Ratios are
peer time / fused time, so more than 1 means that fused is faster. Suites without a series here (real data,
the CPU's) are left to the long tables of tables.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from sdpa_cutlass.cli.cells import number
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.summary import OURS, Comparison, compare, heading, overall
from sdpa_cutlass.cli.tables import footnotes

SEPARATOR = " · "
MISSING = "–"
HEADERS = ("problem", "fused", "over piped", "over torch flash", "over best torch")
PEERS = ("piped", "torch_flash", "best torch")
CLAIMED_PEERS = {
    "piped": "the piped CUTLASS baseline",
    "torch_flash": "torch flash",
    "best torch": "the fastest torch backend of each problem",
    "flash_attn": "FlashAttention 2",
    "flash_attn_3": "FlashAttention 3",
    "flash_attn_4": "FlashAttention 4",
    "xformers": "xFormers",
    "flashinfer": "FlashInfer",
    "sageattention": "SageAttention (8 bits)",
    "naive": "the naive chain",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """How a suite's problems become lines: `varies` is the size within a line, its speed shown in `unit`."""

    varies: Callable[[Comparison], int]
    title: Callable[[Sequence[Comparison]], str]
    unit: str


def _sizes(values: Sequence[int]) -> str:
    return SEPARATOR.join(map(str, values))


def _mission_title(line: Sequence[Comparison]) -> str:
    row = line[0].problem
    return f"batch {row.batch}, {row.num_heads_q} heads of {row.head_dim}, seqlen {row.seqlen_q}"


def _small_title(line: Sequence[Comparison]) -> str:
    row = line[0].problem
    batches = _sizes([comparison.problem.batch for comparison in line])
    return f"batch {batches}, {row.num_heads_q} heads of {row.head_dim}, seqlen {row.seqlen_q}"


def _long_title(line: Sequence[Comparison]) -> str:
    seqlens = _sizes([comparison.problem.seqlen_q for comparison in line])
    return f"head_dim {line[0].problem.head_dim}, seqlen {seqlens}"


SERIES = {
    "mission": Series(varies=lambda c: 0, title=_mission_title, unit="µs"),
    "small": Series(varies=lambda c: c.problem.batch, title=_small_title, unit="µs"),
    "long": Series(varies=lambda c: c.problem.seqlen_q, title=_long_title, unit="TFLOP/s"),
}


def to_markdown(results: Results, *, with_table: bool = True) -> str:
    """Heading, table and statements; without the table where `with_table` is False."""
    comparisons = compare(results.rows)
    dtypes = " and ".join(dict.fromkeys(comparison.problem.dtype for comparison in comparisons))
    blocks = [f"**{dtypes}** on {heading(results)}.{through_ptx(results)}"]
    if with_table and (lines := table(comparisons)):
        blocks.append("\n".join(lines))
    blocks.append("\n".join(f"- {line}" for line in statements(comparisons)))
    return "\n\n".join(block for block in blocks if block)


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """The lines of the table, the header included; empty when no suite has a series."""
    body = ["| " + " | ".join(cells(line)) + " |" for line in series(comparisons)]
    rule = "|---|" + "---:|" * (len(HEADERS) - 1)
    return ["| " + " | ".join(HEADERS) + " |", rule, *body] if body else []


def series(comparisons: Sequence[Comparison]) -> list[list[Comparison]]:
    """Comparisons grouped into lines: by suite in the order of SERIES, full attention before causal."""
    found: list[list[Comparison]] = []
    for suite, kind in SERIES.items():
        members = [comparison for comparison in comparisons if comparison.problem.suite == suite]
        for causal in (False, True):
            lines: dict[tuple[object, ...], list[Comparison]] = {}
            for comparison in members:
                row = comparison.problem
                if row.causal == causal:
                    fixed = row.seqlen_q if suite == "small" else None
                    key = (row.dtype, row.num_heads_q, row.head_dim, fixed)
                    lines.setdefault(key, []).append(comparison)
            found += [sorted(line, key=kind.varies) for line in lines.values()]
    return found


def cells(line: Sequence[Comparison]) -> list[str]:
    """The cells of one line, in the order of HEADERS."""
    row = line[0].problem
    kind = SERIES[row.suite]
    speeds = [_speed(comparison, kind.unit) for comparison in line]
    ratios = [[_ratio(_speedup(comparison, peer)) for comparison in line] for peer in PEERS]
    return [
        kind.title(line) + (", causal" if row.causal else ""),
        f"{SEPARATOR.join(speeds)} {kind.unit}",
        *(SEPARATOR.join(values) for values in ratios),
    ]


def statements(comparisons: Sequence[Comparison]) -> list[str]:
    """One sentence per peer over all problems of the file, then what of ours is not plainly ok."""
    lines = []
    for peer, name in CLAIMED_PEERS.items():
        found = overall(comparisons, peer)
        if found is None:
            continue
        faster = sum((_speedup(comparison, peer) or 0.0) > 1.0 for comparison in comparisons)
        lines.append(
            f"Against {name}: faster on {faster} of {found.count} problems, "
            f"geometric mean {found.mean:.2f}x, "
            f"from {found.least:.2f}x ({found.least_at}) to {found.greatest:.2f}x ({found.greatest_at})."
        )
    ours = [
        Comparison({name: row for name, row in comparison.rows.items() if name in OURS})
        for comparison in comparisons
    ]
    return lines + footnotes(ours)


def through_ptx(results: Results) -> str:
    """A sentence for a GPU that the library has no machine code for, else nothing."""
    archs = str((results.env.get("library") or {}).get("archs") or "")
    major = str(results.env.get("sm") or "").partition(".")[0]
    built = [arch for arch in archs.replace(",", ";").split(";") if arch and not arch.endswith("-virtual")]
    if not major or not built or any(arch.partition("-")[0].rstrip("af")[:-1] == major for arch in built):
        return ""
    names = ", ".join(f"sm_{arch.partition('-')[0]}" for arch in built)
    return f" Machine code is for {names}: this GPU ran the PTX, compiled by its driver."


def _speed(comparison: Comparison, unit: str) -> str:
    fused = comparison.row("fused")
    value = None if fused is None else fused.time_us if unit == "µs" else fused.tflops
    return MISSING if value is None else number(value)


def _speedup(comparison: Comparison, peer: str) -> float | None:
    return comparison.speedup(comparison.best_torch if peer == "best torch" else peer)


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"
