"""What `enable()` adds to a call that it leaves to torch, in nanoseconds: at most 3 µs for every reason.

    python -m benchmarks.passed_on [--device cuda]

The function that stands behind the replacement does nothing here, so that its own time, which is no part of
the question, does not hide the answer. The least of many runs counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_cutlass

RUNS, CALLS = 40, 2000


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for torch."""


def nanoseconds(function: Callable[[], Any]) -> float:
    """Of one call."""
    least = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            function()
        least = min(least, (time.perf_counter_ns() - started) / CALLS)
    return least


def main() -> None:
    """Prints a line for each reason."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.passed_on", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    q = torch.randn(1, 1, 8, 64, device=device).half()
    cases: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "float32": (q.float(), {}),
        "float32, scale": (q.float(), {"scale": 0.3}),
        "gradients": (torch.randn(1, 1, 8, 264, device=device).half().requires_grad_(), {}),  # above 256
        "head_dim": (torch.randn(1, 1, 8, 264, device=device).half(), {}),
        "device": (q.to("meta"), {}),
        "backends named": (q, {}),
    }
    F.scaled_dot_product_attention = nothing
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        function = F.scaled_dot_product_attention
        for name, (tensor, options) in cases.items():
            with sdpa_kernel([SDPBackend.MATH]) if name == "backends named" else torch.enable_grad():
                without = nanoseconds(lambda t=tensor, o=options: nothing(t, t, t, **o))
                passed = nanoseconds(lambda t=tensor, o=options: function(t, t, t, **o))
            print(f"{name:16} {passed - without:6.0f} ns")
    assert usage.served == 0


if __name__ == "__main__":
    main()
