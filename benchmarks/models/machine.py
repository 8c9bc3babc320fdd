"""What a device offers to measure with, and wall times of contestants that take turns.

Only a GPU's times say something: on a CPU this library's kernels run on a model of a GPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], torch.Tensor]


class Machine:
    """A CPU."""

    device = "cpu"
    claims_speed = False
    has_graphs = False
    compiler = "aot_eager"

    def synchronize(self) -> None:
        """Waits for the device."""

    def capture(self, call: Call) -> Call:
        """A replay of a graph of `call`."""
        raise NotImplementedError("a CPU has no graphs")

    def trace(self, call: Call) -> dict[str, Any]:
        """The profiler's trace of `call`, in the format of Chrome."""
        activities = [ProfilerActivity.CPU]
        if self.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as found:
            call()
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            found.export_chrome_trace(str(file))
            return dict(json.loads(file.read_text(encoding="utf-8")))


class Gpu(Machine):
    """A CUDA device."""

    device = "cuda"
    claims_speed = True
    has_graphs = True
    compiler = "inductor"

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

    def capture(self, call: Call) -> Call:
        """A replay of a graph of `call`, which has run on a side stream before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True)
class Wall:
    """Milliseconds of a run: the median, and half the distance of the 10th to the 90th percentile."""

    ms: float
    spread: float


def wall_times(
    calls: Mapping[str, tuple[Call, Callable[[], AbstractContextManager[Any]]]],
    machine: Machine,
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Wall]:
    """Every round runs each call once, in its context, which is not timed; each round begins with another."""
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            call, around = calls[name]
            with around():
                machine.synchronize()
                start = clock()
                call()
                machine.synchronize()
                samples[name].append(1e3 * (clock() - start))
    return {name: _wall(sorted(times)) for name, times in samples.items() if times}


def _wall(times: list[float]) -> Wall:
    low, high = times[len(times) // 10], times[len(times) - 1 - len(times) // 10]
    return Wall(round(statistics.median(times), 4), round((high - low) / 2, 4))
