"""Timing: on a CPU for real, on a GPU against a made-up torch.cuda whose clock advances with every call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sdpa_cutlass.cli import timing
from sdpa_cutlass.cli.timing import Contestant


class FakeGpu:
    """Enough of torch.cuda: a clock in microseconds, events that read it, graphs that record and replay."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, can_capture: bool = True, cold_calls: bool = False
    ) -> None:
        self.now_us = 0.0
        self.recording: list[Callable[[], None]] | None = None
        self.can_capture = can_capture
        self.cold_calls = cold_calls
        self.log: list[str] = []
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                self.at_us = 0.0

            def record(self) -> None:
                self.at_us = gpu.now_us

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Event) -> float:
                return (end.at_us - self.at_us) / 1000

        class CUDAGraph:
            def __init__(self) -> None:
                self.work: list[Callable[[], None]] = []

            def replay(self) -> None:
                for call in self.work:
                    call()

        @contextlib.contextmanager
        def graph(target: CUDAGraph, *, capture_error_mode: str) -> Iterator[None]:
            if not gpu.can_capture:
                raise RuntimeError("operation not permitted\nwhen stream is capturing")
            gpu.recording = target.work
            try:
                yield
            finally:
                gpu.recording = None

        for name, value in {"Event": Event, "CUDAGraph": CUDAGraph, "graph": graph}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)

    def contestant(self, name: str, call_us: float, *, sets: int = 1, lazy: bool = False) -> Contestant:
        """A provider whose calls take `call_us`; a `lazy` one soon stops writing its output."""
        outputs = [torch.zeros(4) for _ in range(sets)]

        def call(index: int) -> torch.Tensor:
            def work() -> None:
                is_cold = self.cold_calls and self.log[-1:] != [name]
                self.log.append(name)
                self.now_us += 10 * call_us if is_cold else call_us
                if not (lazy and self.recording is None and len(self.log) > 400):
                    outputs[index].fill_(1.0)

            if self.recording is not None:
                self.recording.append(work)
            else:
                work()
            return outputs[index]

        return Contestant(call, contextlib.nullcontext, sets)


def fail(name: str, error: Exception) -> None:
    raise AssertionError(f"{name}: {error}")


def run(contestants: dict[str, Contestant], failed: Callable[[str, Exception], None] = fail) -> Any:
    return timing.time_on_gpu(contestants, budget_s=0.15, max_replays=25, failed=failed)


def test_short_calls_are_captured_and_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    contestants = {"a": gpu.contestant("a", 5.0, sets=3), "b": gpu.contestant("b", 200.0)}
    found = run(contestants)
    assert found["a"].gpu_us == pytest.approx(5.0)
    assert found["b"].gpu_us == pytest.approx(200.0)
    assert found["a"].gpu_us_spread == pytest.approx(0.0, abs=1e-6)
    assert found["a"].note is None
    assert found["a"].wall_us is not None
    assert sorted(contestants["a"].outputs) == [0, 1, 2]
    last = "".join(gpu.log[-25 * 60 :])
    assert last == ("a" * 40 + "b" * 20) * 25  # before each short replay, an untimed one


def test_a_sustained_run_has_no_turns_and_leaves_its_first_half_out(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    contestants = {"a": gpu.contestant("a", 5.0), "b": gpu.contestant("b", 200.0)}
    found = timing.time_on_gpu(contestants, budget_s=0.15, max_replays=25, failed=fail, sustained_s=0.02)
    assert found["a"].gpu_us == pytest.approx(5.0)
    assert found["b"].gpu_us == pytest.approx(200.0)
    assert "".join(gpu.log).rstrip("b").endswith("a" * 3900)
    assert gpu.log.count("b") >= 100
    assert len(found["a"].samples_us) == 100  # of 200 replays of 20 calls


def test_another_contestants_caches_are_not_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU whose first call after another contestant's takes ten times as long."""
    gpu = FakeGpu(monkeypatch, cold_calls=True)
    found = run({"a": gpu.contestant("a", 5.0), "b": gpu.contestant("b", 200.0)})
    assert found["a"].gpu_us == pytest.approx(5.0)
    assert found["b"].gpu_us == pytest.approx(200.0 * (1 + 9 / 20))  # too long to be run twice for it


def test_long_calls_are_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, can_capture=False)
    contestant = gpu.contestant("slow", 90_000.0, sets=20)
    found = run({"slow": contestant})["slow"]
    assert all(output.tolist() == [1.0] * 4 for output in contestant.outputs.values())
    assert found == timing.Timing(  # no note, no wall time
        gpu_us=pytest.approx(90_000.0), gpu_us_spread=0.0, samples_us=(pytest.approx(90_000.0),) * 2
    )
    assert len(gpu.log) <= 8


def test_a_failed_capture_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch, can_capture=False)
    found = run({"a": gpu.contestant("a", 10.0, sets=2)})["a"]
    assert found.gpu_us == pytest.approx(10.0)
    assert found.note == "events around calls, capture failed: operation not permitted"


def test_outputs_are_poisoned_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    contestants = {"good": gpu.contestant("good", 5.0), "lazy": gpu.contestant("lazy", 5.0, lazy=True)}
    run(contestants)
    assert contestants["good"].outputs[0].tolist() == [1.0] * 4
    assert contestants["lazy"].outputs[0].isnan().all()


def test_one_failure_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    failures: dict[str, str] = {}

    def broken(index: int) -> torch.Tensor:
        raise RuntimeError("no")

    contestants = {
        "bad": Contestant(broken, contextlib.nullcontext, 1),
        "good": gpu.contestant("good", 5.0),
    }
    found = run(contestants, lambda name, error: failures.update({name: str(error)}))
    assert list(found) == ["good"]
    assert failures == {"bad": "no"}


def test_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(index: int) -> torch.Tensor:
        time.sleep(0.002)
        return torch.zeros(1)

    def broken(index: int) -> torch.Tensor:
        raise RuntimeError("no")

    failures: list[str] = []
    contestants = {
        name: Contestant(call, contextlib.nullcontext, 1) for name, call in (("a", sleep), ("b", broken))
    }
    found = timing.time_on_cpu(contestants, repeats=3, failed=lambda name, error: failures.append(name))
    assert failures == ["b"]
    assert found["a"].gpu_us is None
    assert 2000 <= (found["a"].wall_us or 0) < 50_000


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([5.0], 0.0), ([5.0, 9.0], 2.0), ([float(number) for number in range(101)], 40.0)],
)
def test_spread(samples: list[float], expected: float) -> None:
    assert timing.spread(samples) == pytest.approx(expected)
