"""How long a call takes: GPU time from CUDA graph replays, and the time that the calling thread spends.

gpu_us         microseconds of GPU time per call: the median over replays of a CUDA graph that holds up to 20
               calls, each replay between two events, queued behind a short spin so that the stream never
               runs dry. The contestants take turns, replay by replay, so that clocks and heat are shared; an
               untimed replay of the same graph goes before each timed one shorter than WARM_SPAN_US, so that
               none pays for finding the caches full of another contestant's code and tensors.
               Calls longer than SLOW_US, and those that no graph can hold, are timed with events around
               plain calls. In a sustained run each contestant has the GPU for itself instead, without a
               pause; the first half of its time is for clocks and heat to settle and does not count.
gpu_us_spread  half the distance between the 10th and the 90th percentile of those replays
wall_us        on a GPU: time per call that Python needs to queue it, the least of three loops over 50 calls
               that nothing waits for (few enough for the queue never to be full); null for calls longer than
               WALL_LIMIT_US, where it tells nothing. On a CPU: the median time of a call.

Input sets are rotated from call to call when several are given. Before the timed replays every output is
filled with NaN: what lies there afterwards was computed by a timed call.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

REPEATS = {"cuda": 25, "cpu": 2}
BUDGET_S = 0.15  # of GPU time for each provider of a problem
MASK_BUDGET_S = 0.06  # there are many such problems
GRAPH_CALLS = 20
GRAPH_SPAN_US = 5000.0
WARM_SPAN_US = 1000.0
SLOW_US = 2500.0
SPIN_CYCLES = 500_000
WALL_CALLS = 50
WALL_LOOPS = 3
WALL_LIMIT_US = 500.0
MIN_REPLAYS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """What was measured; `note` says how, where that was not the usual way.

    `samples_us`: the time of a call in each replay on a GPU, or of each call on a CPU, in their order.
    """

    gpu_us: float | None = None
    gpu_us_spread: float | None = None
    wall_us: float | None = None
    note: str | None = None
    samples_us: tuple[float, ...] = ()


class Contestant:
    """One provider at one problem: `call(index)` runs it on input set `index` and returns the output."""

    def __init__(
        self,
        call: Callable[[int], torch.Tensor],
        context: Callable[[], AbstractContextManager[Any]],
        num_sets: int,
    ) -> None:
        self._call = call
        self._next = 0
        self.context = context
        self.num_sets = num_sets
        self.outputs: dict[int, torch.Tensor] = {}
        self.graph: torch.cuda.CUDAGraph | None = None  # kept as long as the outputs, which lie in its memory

    def run(self, calls: int) -> None:
        """Runs `calls` calls, going on to the next input set after each, and keeps each set's last output."""
        for _ in range(calls):
            self.outputs[self._next] = self._call(self._next)
            self._next = (self._next + 1) % self.num_sets

    def restart(self, num_sets: int) -> None:
        """Forgets the outputs and starts anew with the first of `num_sets` input sets."""
        self.num_sets = num_sets
        self.outputs = {}
        self._next = 0

    def poison(self) -> None:
        """Fills every kept output with NaN."""
        for output in self.outputs.values():
            output.fill_(float("nan"))


class _Replay:
    """A contestant on a GPU, ready to be replayed: warmed up, and captured unless its calls are long."""

    def __init__(self, contestant: Contestant, budget_s: float, max_replays: int) -> None:
        self.contestant = contestant
        self.note: str | None = None
        self.wall_us: float | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        with contestant.context():
            contestant.run(1)
            call_us = _elapsed_us(lambda: contestant.run(2)) / 2
            if call_us < WALL_LIMIT_US:
                self.wall_us = _queueing_us(contestant)
            self.calls = max(1, min(GRAPH_CALLS, int(GRAPH_SPAN_US / call_us)))
            contestant.restart(min(contestant.num_sets, self.calls))
            if call_us < SLOW_US:
                self._capture()
        self.replay()
        self._batch_us = _elapsed_us(self.replay) if call_us < SLOW_US else self.calls * call_us
        self.replays = max(MIN_REPLAYS, min(max_replays, int(budget_s * 1e6 / self._batch_us)))
        self._warms = contestant.graph is not None and self._batch_us < WARM_SPAN_US

    def _capture(self) -> None:
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.contestant.run(self.calls)
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.note = f"events around calls, capture failed: {str(error).strip().splitlines()[0][:80]}"
            self.contestant.restart(self.contestant.num_sets)
        else:
            self.contestant.graph = graph

    def replay(self) -> None:
        """Queues the calls once."""
        if self.contestant.graph is not None:
            self.contestant.graph.replay()
        else:
            with self.contestant.context():
                self.contestant.run(self.calls)

    def timed_replay(self) -> None:
        """Queues the calls once, between two events; before them, where they are short, once without."""
        import torch

        if self._warms:
            self.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.replay()
        end.record()
        self._events.append((start, end))

    def sustain(self, seconds: float) -> None:
        """Queues the calls for that long, between events; keeps those of the second half."""
        count = max(2 * MIN_REPLAYS, math.ceil(seconds * 1e6 / self._batch_us))
        self._warms = False
        for _ in range(count):
            self.timed_replay()
        del self._events[: count // 2]

    def samples_us(self) -> list[float]:
        """Microseconds per call of each timed replay; the device must be idle."""
        return [1000.0 * start.elapsed_time(end) / self.calls for start, end in self._events]


def _elapsed_us(work: Callable[[], None]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _spin()
    start.record()
    work()
    end.record()
    end.synchronize()
    return max(1.0, 1000.0 * start.elapsed_time(end))


def _spin() -> None:
    """Keeps the stream busy for a quarter of a millisecond, while this thread queues what is to be timed."""
    import torch

    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(SPIN_CYCLES)


def time_on_gpu(
    contestants: Mapping[str, Contestant],
    *,
    budget_s: float,
    max_replays: int,
    failed: Callable[[str, Exception], None],
    sustained_s: float | None = None,
) -> dict[str, Timing]:
    """Times the contestants side by side, each for about `budget_s` seconds of GPU time; or one after the
    other, each for `sustained_s` seconds.

    One that raises is reported to `failed` and drops out; the others go on.
    """
    import torch

    ready: dict[str, _Replay] = {}
    for name, contestant in contestants.items():
        try:
            ready[name] = _Replay(contestant, budget_s, max_replays)
            torch.cuda.synchronize()
        except Exception as error:
            failed(name, error)
    for replay in ready.values():
        replay.contestant.poison()
    if sustained_s is not None:
        for name, replay in list(ready.items()):
            try:
                replay.sustain(sustained_s)
                torch.cuda.synchronize()
            except Exception as error:
                failed(name, error)
                del ready[name]
    else:
        _take_turns(ready, failed)
    timings = {}
    for name, replay in ready.items():
        samples = replay.samples_us()
        timings[name] = Timing(
            gpu_us=statistics.median(samples),
            gpu_us_spread=spread(samples),
            wall_us=replay.wall_us,
            note=replay.note,
            samples_us=tuple(samples),
        )
    return timings


def _take_turns(ready: dict[str, _Replay], failed: Callable[[str, Exception], None]) -> None:
    """Replay by replay; those that fail leave `ready`."""
    import torch

    for number in range(max((replay.replays for replay in ready.values()), default=0)):
        _spin()
        for name, replay in list(ready.items()):
            if number < replay.replays:
                try:
                    replay.timed_replay()
                except Exception as error:
                    failed(name, error)
                    del ready[name]
        torch.cuda.synchronize()


def _queueing_us(contestant: Contestant) -> float:
    """Time that the calling thread spends per call while it waits for nothing."""
    import torch

    loops = []
    for _ in range(WALL_LOOPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        contestant.run(WALL_CALLS)
        loops.append((time.perf_counter() - start) / WALL_CALLS)
    torch.cuda.synchronize()
    return 1e6 * min(loops)


def time_on_cpu(
    contestants: Mapping[str, Contestant], *, repeats: int, failed: Callable[[str, Exception], None]
) -> dict[str, Timing]:
    """Median wall time of `repeats` calls of each contestant, taking turns. Failures as in time_on_gpu."""
    samples: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():
        contestant.poison()
    for _ in range(repeats):
        for name in list(samples):
            contestant = contestants[name]
            try:
                with contestant.context():
                    start = time.perf_counter()
                    contestant.run(1)
                    samples[name].append(1e6 * (time.perf_counter() - start))
            except Exception as error:
                failed(name, error)
                del samples[name]
    return {
        name: Timing(wall_us=statistics.median(times), samples_us=tuple(times))
        for name, times in samples.items()
        if times
    }


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the 10th and the 90th percentile (of few samples: half their range)."""
    if len(samples) < 2:
        return 0.0
    if len(samples) < 10:
        return (max(samples) - min(samples)) / 2
    tenths = statistics.quantiles(samples, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / 2
