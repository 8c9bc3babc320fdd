"""The floor under every time: what is counted, from which GPU, and that a time below it does not stand."""

from __future__ import annotations

import dataclasses
import time
import types
from typing import Any

import pytest
import torch

from sdpa_cutlass.cli import measure, providers, results, roofline, suites
from sdpa_cutlass.cli.measure import Settings
from sdpa_cutlass.cli.roofline import Ceilings
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.timing import Timing
from sdpa_cutlass.problem import Causal
from tests.cli import rows as made

MISSION, CAUSAL = suites.mission()
H200 = Ceilings(tflops=1000.0, dram_gbps=4000.0, l2_bytes=50_000_000, source="made up")
DECODE = suites.decode()[1]  # 268 MB


def test_flops_are_counted_one_by_one() -> None:
    assert H200.floor_us(MISSION, 1) == pytest.approx(4 * 8 * 512 * 512 * 64 / 1e15 * 1e6)
    assert H200.floor_us(CAUSAL, 1) / H200.floor_us(MISSION, 1) == pytest.approx(513 / 1024)
    assert H200.floor_us(MISSION, 1, visible=0.25) == pytest.approx(H200.floor_us(MISSION, 1) / 4)
    assert H200.floor_us(MISSION, 1, is_quantised=True) == pytest.approx(H200.floor_us(MISSION, 1) / 2)


def test_only_what_the_cache_cannot_hold_comes_from_dram() -> None:
    size = DECODE.problem().bytes
    assert H200.floor_us(DECODE, 2) == pytest.approx((2 * size - 50e6) / 2 / 4e12 * 1e6)
    assert H200.floor_us(DECODE, 1) == pytest.approx((size - 50e6) / 4e12 * 1e6)
    sets = 50_000_000 // MISSION.problem().bytes
    assert H200.floor_us(MISSION, sets) == H200.floor_us(MISSION, 1)  # all of it in the cache: FLOPs alone


@pytest.mark.parametrize(
    ("queries", "alignment", "share"),
    [
        (1, Causal.BOTTOM_RIGHT, 1.0),
        (4, Causal.BOTTOM_RIGHT, (5 + 6 + 7 + 8) / 32),
        (4, Causal.TOP_LEFT, (1 + 2 + 3 + 4) / 32),
    ],
)
def test_seen(queries: int, alignment: Causal, share: float) -> None:
    case = dataclasses.replace(CAUSAL, seqlen_q=queries, seqlen_k=8, alignment=alignment)
    assert case.seen == pytest.approx(share)
    half = 4 * 8 * queries * 8 * 64 / 2
    right = alignment is Causal.BOTTOM_RIGHT
    assert case.flops == pytest.approx(2 * half * share if right else half)


ENVS: dict[str, tuple[dict[str, Any], float | None]] = {
    "H200": ({"gpu": "NVIDIA H200"}, 989.4),
    "a higher clock": (
        {"gpu": "NVIDIA H200", "clocks": {"start": {"sm_max_mhz": "1980"}}},
        989.4 * 1980 / 1830,
    ),
    "a lower clock": ({"gpu": "NVIDIA H200", "clocks": {"start": {"sm_max_mhz": "900"}}}, 989.4),
    "no clock": ({"gpu": "NVIDIA H200", "clocks": {"start": {"sm_max_mhz": "[N/A]"}}}, 989.4),
    "L4": ({"gpu": "NVIDIA L4"}, 121.0),
    "L40 is no L4": ({"gpu": "NVIDIA L40"}, None),
    "L40S is no L4": ({"gpu": "NVIDIA L40S"}, 362.1),
    "GeForce": ({"gpu": "NVIDIA GeForce RTX 4090"}, 330.3),
    "not listed": ({"gpu": "NVIDIA T4", "clocks": None}, None),
    "CPU": ({"gpu": None}, None),
}


@pytest.mark.parametrize(("env", "tflops"), ENVS.values(), ids=ENVS.keys())
def test_gpus(env: dict[str, Any], tflops: float | None) -> None:
    found = roofline.ceilings_of(env)
    assert (found.tflops if found else None) == (pytest.approx(tflops) if tflops else None)


def test_bandwidth_of_a_row() -> None:
    row = made.row(gpu_us=100.0, num_heads_kv=2, seqlen_q=1, seqlen_k=1000)
    assert roofline.gbps(row) == pytest.approx((8 + 2 * 1000) * 128 * 2 / 100 / 1e3)
    assert roofline.gbps(dataclasses.replace(row, status="wrong: NaN")) is None


def measured(monkeypatch: pytest.MonkeyPatch, time_us: float, ceilings: Ceilings | None) -> results.Row:
    """A real row of the naive chain whose time is made up."""

    def time(contestants: Any, **options: Any) -> dict[str, Timing]:
        for contestant in contestants.values():
            contestant.run(1)
        return {name: Timing(gpu_us=time_us) for name in contestants}

    monkeypatch.setattr(measure, "time_on_cpu", time)
    settings = Settings(
        device=torch.device("cpu"),
        dtype="f16",
        providers=[providers.ALL["naive"]],
        seed=0,
        repeats=1,
        ceilings=ceilings,
    )
    case = Case(suite="t", batch=1, num_heads_q=2, num_heads_kv=2, seqlen_q=64, seqlen_k=64, head_dim=32)
    (row,) = measure.measure(case, settings)
    return row


def test_a_time_below_the_floor_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    floor = 4 * 2 * 64 * 64 * 32 / 1e15 * 1e6
    fine = measured(monkeypatch, 1.01 * floor, H200)
    assert (fine.status, fine.floor_us, fine.input_sets) == ("ok", pytest.approx(floor, rel=1e-4), 1)
    impossible = measured(monkeypatch, 0.99 * floor, H200)
    assert impossible.status.startswith("invalid: ")
    assert not impossible.ok
    unknown = measured(monkeypatch, 0.99 * floor, None)
    assert (unknown.status, unknown.floor_us) == ("ok", None)


def test_copy_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[float] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None: ...
        def record(self) -> None: ...
        def synchronize(self) -> None: ...
        def elapsed_time(self, end: Event) -> float:
            copies.append(time.monotonic())
            return 0.5 if copies[-1] - copies[0] > 0.015 else 9.0  # slow until it is warm

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(roofline, "WARM_S", 0.02)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4_000_000, 8_000_000))
    properties = types.SimpleNamespace(L2_cache_size=250_000)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    cpu = torch.device("cpu")
    assert roofline.copy_bandwidth_gbps(cpu) == pytest.approx(2 * 1_000_000 / 0.5e-3 / 1e9)
    properties.L2_cache_size = 250_001  # what fits is no longer four times the cache
    assert roofline.copy_bandwidth_gbps(cpu) is None
