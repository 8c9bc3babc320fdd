"""Attention's share of a run's time, from the profiler's trace.

Each call of F.scaled_dot_product_attention is a range of the trace. On a GPU the share is the time of the
kernels that were launched within such ranges, over that of all kernels and copies; where there are no kernels
it is the time of the ranges over that of the run.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from benchmarks.models.machine import Call, Machine
from benchmarks.models.watch import Function, replaced

ATTENTION = "benchmarks.models attention"
RUN = "benchmarks.models run"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


def attention_share(machine: Machine, call: Call) -> float | None:
    """Of one run of `call`, which has run before; None where it made no call."""

    def marked() -> torch.Tensor:
        with replaced(_marking), record_function(RUN):
            return call()

    return share(machine.trace(marked)["traceEvents"])


def _marking(function: Function) -> Callable[..., torch.Tensor]:
    def call(*tensors: Any, **options: Any) -> torch.Tensor:
        with record_function(ATTENTION):
            return function(*tensors, **options)

    return call


def share(events: list[dict[str, Any]]) -> float | None:
    """From a trace's events; None where none of them is an attention call."""
    ranges = [event for event in events if event.get("name") == ATTENTION and _is_on_host(event)]
    if not ranges:
        return None
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    if not kernels:
        whole = sum(event["dur"] for event in events if event.get("name") == RUN and _is_on_host(event))
        return round(sum(event["dur"] for event in ranges) / whole, 4)
    spans: dict[Any, list[tuple[float, float]]] = {}
    for event in ranges:
        spans.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for of_thread in spans.values():
        of_thread.sort()
    within = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") in _LAUNCHES
        and "correlation" in event.get("args", {})
        and _lies_in(spans.get(event["tid"], []), event["ts"])
    }
    attention = sum(e["dur"] for e in kernels if e.get("args", {}).get("correlation") in within)
    return round(attention / sum(event["dur"] for event in kernels), 4)


def _is_on_host(event: dict[str, Any]) -> bool:
    """Not the same range as the device saw it."""
    return event.get("ph") == "X" and event.get("cat") in ("user_annotation", "cpu_op")


def _lies_in(spans: list[tuple[float, float]], moment: float) -> bool:
    index = bisect.bisect_right(spans, (moment, float("inf"))) - 1
    return index >= 0 and moment <= spans[index][1]
