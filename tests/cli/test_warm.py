"""The warm command: which kernels it loads, what it says of them, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from sdpa_cutlass.choice.select import choose_first, ranking
from sdpa_cutlass.cli import CommandError, main, warm
from sdpa_cutlass.cli.profiling.problems import parse_shape
from sdpa_cutlass.errors import LaunchError
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, read_kernels
from sdpa_cutlass.problem import ATTENTION_DTYPES, Causal, DType, MaskType, Problem
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
    shapes = {
        "1,8,512,64": {},
        "1,8,512,64,causal": {"causal": Causal.TOP_LEFT},
        "8,32x8,1x4096,128": {
            "batch": 8,
            "num_heads_q": 32,
            "seqlen_q": 1,
            "seqlen_k": 4096,
            "head_dim": 128,
        },
        "1,8,512,64,bias_f16": {"mask": MaskType.F16},
    }
    arguments = [word for shape in shapes for word in ("--shape", shape)]
    _, loaded = run(monkeypatch, *arguments, "--dtype", "f16")
    usual: dict[str, Any] = {
        "dtype": DType.F16, "batch": 1, "num_heads_q": 8, "num_heads_kv": 8, "seqlen_q": 512, "seqlen_k": 512,
        "head_dim": 64,
    }  # fmt: skip
    wanted = set()
    for changes in shapes.values():
        ranked = ranking(library(Target.HOST), Problem(**usual | changes), Family.FMHA_FWD, L4)
        wanted.add(ranked[0][0].name)
    assert set(loaded) == wanted
    assert len(wanted) == len(shapes)


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
    with pytest.raises(CommandError, match="no kernel is left"):  # a head_dim that nobody has
        warm.wanted(native, L4, [parse_shape("1,1,8,1024")], [], list(ATTENTION_DTYPES))
    assert run(monkeypatch, "--kernels", "nothing*")[0] == 2
    assert "no kernel is left" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("8,32,512", "3 parts"), ("1,8x3,512,64", "do not divide"), ("1,8,512,64,often", "'often'")],
)
def test_bad_shapes(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--shape", text]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm", "--shape", "1,8,512,64", "--dtype", "f16", "--quiet"]) == 0
    assert "kernels are loaded on" in capsys.readouterr().out
