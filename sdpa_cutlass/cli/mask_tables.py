"""The suites of masks as tables: what a mask, lengths or dropout cost, and what the peers need for the same.

`over plain` is the time that fused needs more than the plain kernel does for the same q, k and v; `fused/x`
is the time of x over the time of fused, so above 1 fused is faster. `seen` is the share of the scores that
the mask or the lengths let through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from sdpa_cutlass.cli.cells import MISSING, error, number, overhead, ratio, time_us
from sdpa_cutlass.cli.results import Row
from sdpa_cutlass.cli.summary import Comparison, tile

HEADERS = (
    "problem",
    "seen",
    "fused kernel",
    "fused µs",
    "TFLOP/s",
    "plain µs",
    "over plain",
    "fused/efficient",
    "fused/cudnn",
    "fused/flash",
    "err O",
    "err LSE",
)
SUMMARY_HEADERS = ("", "over plain", "over torch mem-efficient", "over torch cuDNN", "over torch flash")
PEERS = ("torch_efficient", "torch_cudnn", "torch_flash")
LONG = 2048  # from this length on, what a mask costs is the kernel's business and not the launch's
SEPARATOR = " · "
KINDS = {
    "lengths": "`seqlens_k`, 70 to 100 % of the keys",
    "lengths_full": "`seqlens_k`, all of them the full length",
    "padding": "boolean [B, 1, 1, Sk]",
    "dense": "boolean [B, 1, Sq, Sk], 90 % True",
    "document": "boolean [B, 1, Sq, Sk], eight documents",
    "bias_f16": "fp16 bias [1, H, Sq, Sk]",
    "bias_f32": "fp32 bias [1, H, Sq, Sk]",
    "packed": "`attention_varlen`, 70 to 100 % of the tokens",
    "dropout": "dropout 0.1",
    "causal dropout": "dropout 0.1, causal",
    "grouped heads": "grouped heads, 4 to 1",
}


def cells(comparison: Comparison) -> list[str]:
    """The cells of one line, in the order of HEADERS."""
    row, fused = comparison.problem, comparison.rows.get("fused")
    return [
        comparison.label,
        f"{100 * row.visible:.0f} %",
        _kernel(fused) if fused else MISSING,
        time_us(comparison, "fused"),
        number(fused.tflops) if fused else MISSING,
        time_us(comparison, "plain"),
        overhead(slowdown(comparison)),
        *(ratio(comparison.speedup(peer)) for peer in PEERS),
        error(fused.max_err_out) if fused else MISSING,
        error(fused.max_err_lse) if fused else MISSING,
    ]


def _kernel(row: Row) -> str:
    """Tile, stages and warps; with the kernel's head_dim where it is a larger one than the problem's."""
    found = re.search(r"_d(\d+)_", row.kernel or "")
    if found is None or int(found[1]) == row.head_dim:
        return tile(row.kernel)
    return f"d{found[1]} {tile(row.kernel)}"


def slowdown(comparison: Comparison) -> float | None:
    """Fused time / plain time."""
    speedup = comparison.speedup("plain")
    return None if speedup is None else 1 / speedup


def kind_of(row: Row) -> str:
    """The key of KINDS that a problem belongs to."""
    if row.p_dropout:
        return "causal dropout" if row.causal else "dropout"
    return "grouped heads" if row.mask == "none" else row.mask


def by_kind(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons of each kind, in the order of KINDS; kinds without any are left out."""
    groups: dict[str, list[Comparison]] = {kind: [] for kind in KINDS}
    for comparison in comparisons:
        groups.setdefault(kind_of(comparison.problem), []).append(comparison)
    return {kind: group for kind, group in groups.items() if group}


def conclusions(comparisons: Sequence[Comparison]) -> list[str]:
    """One line per kind: its cost over plain and the speed-up over each peer, of the long problems if any."""
    long = [comparison for comparison in comparisons if comparison.problem.seqlen_k >= LONG]
    lines = []
    for kind, group in by_kind(long or comparisons).items():
        parts = []
        costs = [(cost, one.label) for one in group if (cost := slowdown(one)) is not None]
        if costs:
            worst, label = max(costs)
            mean = _mean([cost for cost, _ in costs])
            parts.append(f"{overhead(mean)} over plain, at most {overhead(worst)} ({label})")
        for peer in PEERS:
            speedups = [speedup for one in group if (speedup := one.speedup(peer)) is not None]
            if speedups:
                name = peer.removeprefix("torch_")
                parts.append(f"{_mean(speedups):.2f}x {name}, least {min(speedups):.2f}x")
        if parts:
            where = f"seqlen {LONG} and more, " if long else ""
            lines.append(f"{kind} ({where}geometric means of {len(group)}): {'; '.join(parts)}")
    return lines


def summary(comparisons: Sequence[Comparison]) -> list[str]:
    """The lines of a short table: kinds by peers at seqlen LONG, head dimensions side by side in a cell."""
    chosen = [one for one in comparisons if one.problem.seqlen_q == LONG and one.problem.seqlen_k == LONG]
    if not chosen:
        return []
    head_dims = SEPARATOR.join(str(size) for size in sorted({one.problem.head_dim for one in chosen}))
    headers = (f"seqlen {LONG}, head_dim {head_dims}", *SUMMARY_HEADERS[1:])
    lines = ["| " + " | ".join(headers) + " |", "|---|" + "---:|" * (len(headers) - 1)]
    for kind, group in by_kind(chosen).items():
        group = sorted(group, key=lambda one: one.problem.head_dim)
        columns: list[Callable[[Comparison], str]] = [
            lambda one: overhead(slowdown(one)),
            *(lambda one, peer=peer: _factor(one.speedup(peer)) for peer in PEERS),
        ]
        found = [[column(one) for one in group] for column in columns]
        joined = [SEPARATOR.join(texts) if set(texts) != {MISSING} else MISSING for texts in found]
        lines.append("| " + " | ".join([KINDS.get(kind, kind), *joined]) + " |")
    return lines


def _factor(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}"


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
