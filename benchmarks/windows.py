"""What a sliding window and sinks cost, next to the same kernel without them, in one process on a GPU.

    python -m benchmarks.windows
    python -m benchmarks.windows --seqlen 8192 --json benchmarks/results/windows/FILE.json

For each head_dim, without a causal mask and with one, the kernel that serves the window takes part in three
forms: alone, under the window, and with a sink for each head. The contestants take turns, replay by replay
(sdpa_cutlass/cli/timing.py). `cost` is the time under the window over the time without it, divided by the
share of the scores that the window lets through: 1 is what a window ideally costs. Nothing here is checked
for correctness; tests/kernels/test_window.py and test_sinks.py are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sdpa_cutlass import AttentionPlan, plan
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.suites import LONG_HEADS, LONG_TOKENS, MASK_HEAD_DIMS
from sdpa_cutlass.cli.timing import Contestant, time_on_gpu
from sdpa_cutlass.errors import SdpaError

FORMAT = 1
WINDOWS = (256, 1024, 4096)
BUDGET_S = 0.15


def seen(seqlen: int, window: tuple[int, int] | None, causal: str | None) -> int:
    """Scores of a square problem of `seqlen` that are computed for a reason."""
    left, right = window or (seqlen, seqlen)
    right = 0 if causal else right
    return sum(min(seqlen - 1, row + right) - max(0, row - left) + 1 for row in range(seqlen))


def contestant(made: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Contestant:
    """Runs of the plan, all into one output."""
    out = torch.empty_like(q)

    def call(_: int) -> torch.Tensor:
        made.run(q, k, v, out)
        return out

    return Contestant(call, contextlib.nullcontext, 1)


def measure(
    seqlen: int, head_dim: int, window: int, causal: str | None, dtype: torch.dtype, repeats: int
) -> dict[str, Any]:
    """A row of times in microseconds, and the ratios of this file's head."""
    heads = LONG_HEADS[head_dim]
    shape = (max(1, LONG_TOKENS // seqlen), heads, seqlen, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    sinks = torch.randn(heads, device="cuda", dtype=torch.float32)
    limits = (window, 0) if causal else (window // 2, window // 2)
    windowed = plan(q, k, v, causal=causal, window=limits)
    kernel = windowed.kernel.name
    plans = {
        "window": windowed,
        "without": plan(q, k, v, causal=causal, kernel=kernel),
        "sinks": plan(q, k, v, causal=causal, kernel=kernel, sinks=sinks),
        "chosen_without": plan(q, k, v, causal=causal),
    }
    contestants = {name: contestant(made, q, k, v) for name, made in plans.items()}
    failures: dict[str, str] = {}
    timings = time_on_gpu(
        contestants,
        budget_s=BUDGET_S,
        max_replays=repeats,
        failed=lambda name, error: failures.update({name: str(error)}),
    )
    times = {name: timing.gpu_us for name, timing in timings.items()}
    share = seen(seqlen, limits, causal) / seen(seqlen, None, causal)
    row: dict[str, Any] = {
        "batch": shape[0], "num_heads": heads, "seqlen": seqlen, "head_dim": head_dim, "causal": bool(causal),
        "window": limits, "kernel": kernel, "chosen_without": plans["chosen_without"].kernel.name,
        "share": share, "gpu_us": times, "failures": failures,
    }  # fmt: skip
    without = times.get("without")
    if without:
        row["cost"] = (times.get("window") or math.nan) / without / share
        row["sinks_cost"] = (times.get("sinks") or math.nan) / without
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seqlen", type=int, action="append", metavar="N", help="default: 2048, 8192")
    parser.add_argument("--head-dim", type=int, action="append", choices=MASK_HEAD_DIMS)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="replays of each contestant")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    rows = []
    print("seqlen    d causal      window  share        us   cost  sinks  kernel")
    for seqlen in given.seqlen or (2048, 8192):
        for head_dim in given.head_dim or MASK_HEAD_DIMS:
            for window in (w for w in WINDOWS if w < seqlen):
                for causal in (None, "top_left"):
                    try:
                        row = measure(
                            seqlen, head_dim, window, causal, getattr(torch, given.dtype), given.repeats
                        )
                    except SdpaError as error:  # builds of some kernels do not serve every problem
                        print(f"{seqlen:>6} {head_dim:>4} {error}")
                        continue
                    rows.append(row)
                    times = row["gpu_us"].get("window") or math.nan, row.get("cost", math.nan)
                    print(
                        f"{seqlen:>6} {head_dim:>4} {'yes' if causal else 'no':<6} {row['window']!s:>11}"
                        f" {row['share']:>6.3f} {times[0]:>9.1f} {times[1]:>6.3f}"
                        f" {row.get('sinks_cost', math.nan):>6.3f}  {row['kernel']}",
                        flush=True,
                    )
    if given.json:
        record = {"format": FORMAT, "env": environment.record(torch.device("cuda", 0)), "rows": rows}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(given.json, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
