"""Wall time: on a made-up clock, and every way to call for real on the host library."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass.cli import measure, providers, suites, wall, wall_tables
from sdpa_cutlass.cli.conditions import make_conditions
from sdpa_cutlass.cli.inputs import random_qkv
from sdpa_cutlass.cli.providers import Operands
from sdpa_cutlass.cli.results import WALL_PROVIDERS, Row
from sdpa_cutlass.cli.summary import compare, unacceptable
from sdpa_cutlass.cli.timing import Timing

CPU = torch.device("cpu")


class Clock:
    """A CPU that needs `queue_us` to queue a call, and a GPU that then works `gpu_us` on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.gpu_free = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now / 1e6)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)

    def synchronize(self) -> None:
        self.now = max(self.now, self.gpu_free)

    def caller(self, queue_us: float, gpu_us: float) -> Any:
        def run(calls: int) -> None:
            for _ in range(calls):
                self.now += queue_us
                self.gpu_free = max(self.now, self.gpu_free) + gpu_us

        return run


def fail(name: str, error: Exception) -> None:
    raise AssertionError(f"{name}: {error}")


def test_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    run = {"python": clock.caller(10.0, 4.0), "gpu": clock.caller(3.0, 6.0)}
    found = wall.time_wall(run, dict.fromkeys(run, contextlib.nullcontext), loops=5, failed=fail)
    assert found["python"].queue_us == pytest.approx(10.0)
    assert found["python"].loop_us == pytest.approx((50 * 10 + 4) / 50)
    assert found["gpu"].queue_us == pytest.approx(3.0)
    assert found["gpu"].loop_us == pytest.approx((3 + 50 * 6) / 50)
    assert found["gpu"].queue_us_spread == pytest.approx(0.0, abs=1e-6)


def test_the_first_loop_warms_up_and_failures_drop_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    calls: list[int] = []

    def warming(count: int) -> None:
        calls.append(count)
        clock.now += 1e6 if len(calls) == 1 else 100.0

    def broken(count: int) -> None:
        raise RuntimeError("no")

    failures: list[str] = []
    run = {"broken": broken, "warming": warming}
    contexts = dict.fromkeys(run, contextlib.nullcontext)
    found = wall.time_wall(run, contexts, loops=1, failed=lambda name, error: failures.append(name))
    assert failures == ["broken"]
    assert list(found) == ["warming"]
    assert len(calls) == 2
    assert found["warming"].queue_us == pytest.approx(2.0)


def test_only_what_the_gpu_finishes_quickly_is_timed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up GPU: the small problem gets the median of its loops, the other keeps what it had."""
    times = {"naive": 99.0, "torch_math": 101.0}

    def time_on_gpu(contestants: Any, **options: Any) -> dict[str, Timing]:
        for contestant in contestants.values():
            contestant.run(1)
        return {name: Timing(gpu_us=times[name], wall_us=7.0) for name in contestants}

    case = suites.square("t", 1, 2, 64, 32)[0]
    qkv = random_qkv(case, dtype=torch.float16, device=CPU, seed=0)
    operands = Operands(qkv, make_conditions(case, dtype=torch.float16, device=CPU, seed=0))
    monkeypatch.setattr(measure, "input_sets", lambda case, settings: [operands])
    monkeypatch.setattr(measure, "time_on_gpu", time_on_gpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    settings = measure.Settings(
        device=torch.device("cuda"),
        dtype="f16",
        providers=[providers.ALL[name] for name in times],
        seed=0,
        repeats=1,
        loops=3,
    )
    naive, math = measure.measure(case, settings)
    assert (naive.status, math.status) == ("ok", "ok")
    assert naive.wall_us != 7.0
    assert 0 < (naive.wall_us or 0) <= (naive.loop_us or 0)
    assert naive.wall_us_spread is not None
    assert (math.wall_us, math.wall_us_spread, math.loop_us) == (7.0, None, None)
    without = measure.measure(case, dataclasses.replace(settings, loops=0))[0]
    assert (without.wall_us, without.wall_us_spread, without.loop_us) == (7.0, None, None)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Measures a small problem in every way to call, on the host library."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(wall, "LOOP_CALLS", 1)

    def measured(*, causal: bool) -> dict[str, Row]:
        case = suites.square("wall", 1, 2, 64, 64)[causal]
        return {row.provider: row for row in wall.measure(case, "f16", CPU, seed=0, loops=2)}

    return measured


@pytest.mark.parametrize("causal", [False, True])
def test_every_way_to_call(rows: Any, causal: bool) -> None:
    found = rows(causal=causal)
    assert list(found) == [*WALL_PROVIDERS[:4], *wall.TORCH]
    assert {*wall_tables.CALLS} == {*found}
    for name, row in found.items():
        if name == "torch_cudnn":
            assert row.status.startswith("refused: ")
            continue
        assert row.status == "ok", name
        assert (row.wall_us or 0) > 0
        assert (row.loop_us or 0) >= (row.wall_us or 0)
        assert row.gpu_us is None
        assert (row.max_err_out is None) == (name == "plan_make")
        assert (row.max_err_out or 0) < 2e-3


def test_a_wrong_answer_fails(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = sdpa_cutlass.scaled_dot_product_attention
    monkeypatch.setattr(
        sdpa_cutlass, "scaled_dot_product_attention", lambda *qkv, **options: real(*qkv, **options) + 0.01
    )
    monkeypatch.setattr(sdpa_cutlass, "attention", lambda *qkv, **options: None)  # writes nothing
    found = rows(causal=False)
    assert found["sdpa"].status.startswith("wrong: max error of O ")
    assert found["attention_out"].status.startswith("wrong: max error of O nan")
    assert found["plan_run"].status == "ok"
    assert [row.provider for row in unacceptable(found.values())] == ["attention_out", "sdpa"]


def test_table(rows: Any) -> None:
    found = [*rows(causal=False).values(), *rows(causal=True).values()]
    lines = wall_tables.markdown(compare(found))
    heads = "B1 H2 S64 D64: wall µs | B1 H2 S64 D64: ± | B1 H2 S64 D64: loop µs"
    assert lines[0] == f"| call | {heads} | {heads.replace('D64:', 'D64 causal:')} |"
    assert len(lines) == 2 + len(wall_tables.CALLS)
    assert lines[-1] == "| torch's, cuDNN | refused | - | - | refused | - | - |"
    assert lines[2].startswith("| `plan(...)` made before")
    assert len(lines[2].split("|")) == 1 + 1 + 6 + 1
    cells = wall_tables.cells(compare(found)[0])
    assert len(cells) == len(wall_tables.HEADERS)
    assert " ± " in cells[1]
