"""Suite `decode` as a table: how near to the memory bandwidth a few queries against a long cache come.

`GB/s` is the size of q, k, v and out, each counted once, over fused's time; `of copy` its share of the
bandwidth at which this GPU copied in the same run. `fused/x` is the time of x over the time of fused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdpa_cutlass.cli.cells import MISSING, error, number, ratio, time_us
from sdpa_cutlass.cli.roofline import gbps
from sdpa_cutlass.cli.summary import Comparison, tile

SUITE = "decode"
PEERS = ("torch_flash", "torch_cudnn")
HEADERS = (
    "problem",
    "fused kernel",
    "fused µs",
    "GB/s",
    "of copy",
    "flash µs",
    "fused/flash",
    "cudnn µs",
    "fused/cudnn",
    "naive µs",
    "err O",
    "err LSE",
)


def cells(comparison: Comparison, env: Mapping[str, Any]) -> list[str]:
    """The cells of one line, in the order of HEADERS."""
    fused = comparison.rows.get("fused")
    speed = gbps(fused) if fused else None
    row = comparison.problem
    label = comparison.label + (" bf16" if row.dtype == "bf16" else "")
    return [
        label,
        tile(fused.kernel) if fused else MISSING,
        time_us(comparison, "fused"),
        number(speed),
        percent(share_of_copy(comparison, env)),
        *(text for peer in PEERS for text in (time_us(comparison, peer), ratio(comparison.speedup(peer)))),
        time_us(comparison, "naive"),
        error(fused.max_err_out) if fused else MISSING,
        error(fused.max_err_lse) if fused else MISSING,
    ]


def share_of_copy(comparison: Comparison, env: Mapping[str, Any]) -> float | None:
    """Fused's bytes per second over those of a copy; None when either was not measured."""
    fused, copy = comparison.rows.get("fused"), env.get("copy_bandwidth_gbps")
    speed = gbps(fused) if fused else None
    return speed / copy if speed and copy else None


def percent(share: float | None) -> str:
    """`83 %`."""
    return MISSING if share is None else f"{100 * share:.0f} %"


def statements(comparisons: Sequence[Comparison], env: Mapping[str, Any]) -> list[str]:
    """What holds for all lines: the bandwidth reached, and the ratio to each peer."""
    shares = [(share, one.label) for one in comparisons if (share := share_of_copy(one, env)) is not None]
    lines = []
    if shares:
        (least, least_at), (greatest, greatest_at) = min(shares), max(shares)
        lines.append(
            f"A copy reaches {env['copy_bandwidth_gbps']:.0f} GB/s here; fused from {percent(least)} of it "
            f"({least_at}) to {percent(greatest)} ({greatest_at})."
        )
    for peer in PEERS:
        speedups = [(speedup, one.label) for one in comparisons if (speedup := one.speedup(peer)) is not None]
        if speedups:
            faster = sum(speedup > 1 for speedup, _ in speedups)
            lines.append(
                f"Against {peer.replace('_', ' ')}: faster on {faster} of {len(speedups)} problems, "
                f"least {min(speedups)[0]:.2f}x ({min(speedups)[1]})."
            )
    return lines
