"""The warm command: which kernels it loads, what it says of them, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sdpa_cutlass.choice.select import choose_first, ranking
from sdpa_cutlass.cli import CommandError, main, warm
from sdpa_cutlass.cli.warm_arguments import Shape
from sdpa_cutlass.errors import LaunchError
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, read_kernels
from sdpa_cutlass.problem import ATTENTION_DTYPES, Causal, DType, Problem
from tests.library.cards import made_card

H200 = made_card("H200", (9, 0), 132, 2580)
L4 = made_card("L4", (8, 9), 58, 1024)


class Recorder:
    """The host library, whose kernels are loaded by name only."""

    def __init__(self, failing: str = "") -> None:
        self.native = library(Target.HOST)
        self.loaded: list[str] = []
        self._failing = failing
        self._names = {row.index: row.name for row in read_kernels(self.native)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def prepare(self, index: int, device: int) -> None:
        assert device == 0
        self.loaded.append(self._names[index])
        if self._names[index] == self._failing:
            raise LaunchError("cudaFuncGetAttributes: no code\nmore")


def run(
    monkeypatch: pytest.MonkeyPatch, *arguments: str, card: Any = L4, failing: str = ""
) -> tuple[int, list[str]]:
    recorder = Recorder(failing)
    rows = read_kernels(recorder.native)
    monkeypatch.setattr(warm, "library", lambda target: recorder)
    monkeypatch.setattr(warm, "read_kernels", lambda native: rows)
    monkeypatch.setattr(warm, "choose_first", lambda native, *rest: choose_first(recorder.native, *rest))
    monkeypatch.setattr(warm, "cuda_device", lambda index: card)
    monkeypatch.setattr(warm, "check_can_serve", lambda build, device: None)
    return main(["warm", "--quiet", *arguments]), recorder.loaded


def test_everything_that_runs_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, loaded = run(monkeypatch)
    rows = {row.name: row for row in read_kernels(library(Target.HOST))}
    assert status == 0
    assert set(loaded) == {name for name, row in rows.items() if not row.is_for_one_arch}
    assert len(loaded) == len(set(loaded))
    assert f"{len(loaded)} kernels are loaded on L4" in capsys.readouterr().out
    _, on_hopper = run(monkeypatch, card=H200)
    assert set(on_hopper) == set(rows)


def test_shapes_load_what_calls_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loaded = run(monkeypatch, "--shape", "1,8,512,64", "--shape", "8,32/8,1/4096,128", "--dtype", "f16")
    wanted = set()
    for sizes in ((1, 8, 8, 512, 512, 64), (8, 32, 8, 1, 4096, 128)):
        for causal in (None, Causal.TOP_LEFT if sizes[3] == sizes[4] else Causal.BOTTOM_RIGHT):
            shape = dataclasses.asdict(Shape(*sizes))
            problem = Problem(dtype=DType.F16, causal=causal, **shape)
            ranked = ranking(library(Target.HOST), problem, Family.FMHA_FWD, L4)
            wanted.add(ranked[0][0].name)
    assert set(loaded) == wanted


def test_globs_and_types_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loaded = run(monkeypatch, "--kernels", "fmha_fwd_sm89_d64_*_causal", "--dtype", "bf16")
    assert loaded
    assert all("_d64_" in name and name.endswith("bf16_causal") for name in loaded)


def test_what_fails_is_named_and_the_others_are_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = next(row.name for row in read_kernels(library(Target.HOST)) if row.dtype is DType.F16)
    status, loaded = run(monkeypatch, "--dtype", "f16", failing=failing)
    assert status == 1
    assert len(loaded) > 10
    assert f"not loaded: {failing}: cudaFuncGetAttributes: no code\n" in capsys.readouterr().out


def test_slow_ones_are_listed_the_slowest_first() -> None:
    found = [warm.Loaded("fast", 0.01), warm.Loaded("slow", 9.0), warm.Loaded("slower", 15.0)]
    lines = warm.report(found, L4)
    assert lines[0] == "3 kernels are loaded on L4: 24.0 s"
    assert [line.split()[-1] for line in lines[2:]] == ["slower", "slow"]


def test_nothing_left_and_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    native: Library = library(Target.HOST)
    with pytest.raises(CommandError, match="no kernel is left"):
        warm.wanted(native, L4, [], ["nothing*"], list(ATTENTION_DTYPES))
    with pytest.raises(CommandError, match="no kernel is left"):  # head_dims that nobody has
        warm.wanted(native, L4, [Shape(1, 1, 1, 8, 8, 1024)], [], list(ATTENTION_DTYPES))
    assert run(monkeypatch, "--kernels", "nothing*")[0] == 2
    assert "no kernel is left" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["8,32,512", "1,8,512,64,3", "1,8/3,512,64", "0,8,512,64", "a,b,c,d"])
def test_bad_shapes(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["warm", "--shape", text])
    assert raised.value.code == 2
    assert "allowed is B,Hq[/Hkv],Sq[/Sk],D" in " ".join(capsys.readouterr().err.split())


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--shape", "1,8,512,64", "--dtype", "f16", "--quiet"]) == 0
    assert "kernels are loaded on" in capsys.readouterr().out
