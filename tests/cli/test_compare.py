"""The compare command: end to end through the host library, and every way in which it can go wrong."""

from __future__ import annotations

import csv
import math
import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sdpa_cutlass
from sdpa_cutlass.cli import main, results
from sdpa_cutlass.cli.accuracy import naive_attention
from sdpa_cutlass.cli.results import PROVIDERS, Row

CASE = "host/b1_h2_s160_d32"


def stub(
    qkv: tuple[torch.Tensor, ...], *, causal: Any, wrong: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (tensor.float() for tensor in qkv)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal is not None:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v + wrong).to(qkv[0].dtype), scores.logsumexp(-1)


class Kernels:
    """Replaces this library's functions: right answers, unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: Exception | None = None
        self.wrong = 0.0
        self.wrong_when_timed = 0.0
        monkeypatch.setattr(sdpa_cutlass, "attention", self.attention)
        monkeypatch.setattr("sdpa_cutlass.cli.running.library", lambda target: None)
        monkeypatch.setattr("sdpa_cutlass.cli.measure.kernel_name", lambda *arguments: "kernel")

    def attention(self, *qkv: torch.Tensor, causal: Any, out: Any = None, return_lse: bool = False) -> Any:
        if self.error is not None:
            raise self.error
        result, lse = stub(
            qkv, causal=causal, wrong=self.wrong + (0.0 if return_lse else self.wrong_when_timed)
        )
        if return_lse:
            return result, lse
        return out.copy_(result)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def compare(tmp_path: Path, *arguments: str, providers: str = "fused,naive") -> tuple[int, dict[str, Row]]:
    path = tmp_path / "result.json"
    command = ["compare", "--device", "cpu", "--filter", CASE, "--providers", providers, "--json", str(path)]
    status = main([*command, *arguments])
    return status, {row.provider: row for row in results.load(path).rows}


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [
        "--csv",
        str(tmp_path / "r.csv"),
        "--plot",
        str(tmp_path / "r.png"),
        "--markdown",
        str(tmp_path / "r.md"),
    ]
    status, rows = compare(tmp_path, *files, providers=",".join(PROVIDERS))
    output = capsys.readouterr().out
    assert status == 0, output
    assert "times and ratios on a CPU mean nothing" in " ".join(output.split())
    others = [name for name in PROVIDERS if name != "plain"]  # it would compute the same problem
    assert list(rows) == others
    for name in ("fused", "piped"):
        assert rows[name].status == "ok"
        assert str(rows[name].kernel).startswith("fmha_fwd_" if name == "fused" else "unfused_")
        assert 0 < (rows[name].max_err_out or 0) < 2e-3
        assert (rows[name].max_err_lse or 1) < 1e-4
        assert (rows[name].max_err_out or 1) < (rows[name].bound_out or 0) < 4e-3
        assert (rows[name].wall_us or 0) > 0
        assert rows[name].gpu_us is None
    assert rows["naive"].max_err_lse is None
    assert rows["torch_cudnn"].status.startswith("refused: ")
    env = results.load(tmp_path / "result.json").env
    assert env["gpu"] is None
    assert len(env["library"]["digest"]) >= 16
    assert not [value for value in env.values() if "/" in str(value)]  # no paths
    assert platform.node() not in str(env)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(csv.DictReader((tmp_path / "r.csv").read_text().splitlines()))) == len(others)
    assert "| B1 H2 S160 D32 |" in (tmp_path / "r.md").read_text()


def test_masks_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every kind of mask through the host library, beside the plain kernel and, on a CPU, torch's flash."""
    path = tmp_path / "masks.json"
    status = main(
        ["compare", "--device", "cpu", "--suite", "host_masks", "--repeats", "1", "--json", str(path)]
    )
    output = capsys.readouterr().out
    assert status == 0, output
    assert "verdict" in output
    assert re.search(r"fused: right on (\d+) of \1 problems", output)
    rows = {(row.mask, row.causal, row.p_dropout, row.provider): row for row in results.load(path).rows}
    fused = [row for row in rows.values() if row.provider == "fused"]
    plain = [row for row in rows.values() if row.provider == "plain"]
    assert (len(fused), len(plain)) == (11, 10)  # grouped heads are plain themselves
    for row in fused + plain:
        assert row.status == "ok"
        assert 0 < (row.max_err_out or 0) < 2e-3
        assert (row.max_err_lse or 1) < 1e-4
    for row in fused:
        is_general = row.mask != "none" or row.p_dropout > 0
        assert ("_general" in str(row.kernel)) == is_general
        assert str(row.kernel).endswith("_general_dropout") == (row.p_dropout > 0)
    assert not any("_general" in str(row.kernel) for row in plain)
    flash = rows["dense", False, 0.0, "torch_flash"]
    assert (flash.status, flash.visible) == ("ok", rows["dense", False, 0.0, "fused"].visible)
    assert rows["none", False, 0.1, "torch_flash"].status.startswith("refused: ")
    assert rows["packed", False, 0.0, "torch_cudnn"].status.startswith("refused: this backend takes packed")
    assert "naive" not in {provider for *_, provider in rows}


def test_a_wrong_plain_kernel_fails(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.wrong = 0.01
    path = tmp_path / "result.json"
    command = ["compare", "--device", "cpu", "--filter", "*_padding", "--suite", "host_masks", "--quiet"]
    assert main([*command, "--providers", "plain,naive", "--json", str(path)]) == 1
    rows = {row.provider: row for row in results.load(path).rows}
    assert rows["plain"].status.startswith("wrong: max error of O ")
    assert rows["naive"].status == "ok"


def test_right_answers_pass(kernels: Kernels, tmp_path: Path) -> None:
    status, rows = compare(tmp_path)
    assert (status, rows["fused"].status, rows["fused"].kernel) == (0, "ok", "kernel")


@pytest.mark.parametrize("wrong", [0.01, math.nan], ids=str)
def test_wrong_answers_fail(kernels: Kernels, tmp_path: Path, wrong: float) -> None:
    kernels.wrong = wrong
    status, rows = compare(tmp_path)
    assert status == 1
    assert rows["fused"].status.startswith("wrong: max error of O ")
    assert rows["fused"].gpu_us is rows["fused"].wall_us is None
    assert rows["naive"].status == "ok"


@pytest.mark.parametrize("wrong", [0.01, math.nan], ids=str)
def test_wrong_answers_of_timed_calls_fail(kernels: Kernels, tmp_path: Path, wrong: float) -> None:
    kernels.wrong_when_timed = wrong
    status, rows = compare(tmp_path)
    assert status == 1
    assert "timed" in rows["fused"].status


def test_peers_that_leave_nan_are_wrong(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def once(qkv: Any, **options: Any) -> torch.Tensor:
        calls.append(options)
        return naive_attention(qkv, **options) * (1.0 if len(calls) == 1 else math.nan)

    monkeypatch.setattr("sdpa_cutlass.cli.providers.naive_attention", once)
    status, rows = compare(tmp_path)
    assert (status, rows["naive"].status) == (0, "wrong: 1 of 1 timed outputs hold NaN")


@pytest.mark.parametrize(
    ("error", "text", "status"),
    [
        (sdpa_cutlass.LaunchError("boom\nsecond line"), "error: LaunchError: boom", 1),
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory", 1),
        (sdpa_cutlass.NoKernelError("none fits"), "refused: none fits", 1),  # nothing of ours ran
    ],
)
def test_failures_are_saved(
    kernels: Kernels, tmp_path: Path, error: Exception, text: str, status: int
) -> None:
    kernels.error = error
    found, rows = compare(tmp_path)
    assert (found, rows["fused"].status) == (status, text)
    assert rows["naive"].status == "ok"


def test_a_problem_without_a_kernel_is_no_failure(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*qkv: torch.Tensor, **options: Any) -> None:
        raise sdpa_cutlass.NoKernelError("none fits")

    monkeypatch.setattr(sdpa_cutlass, "unfused_attention", refuse)
    status, rows = compare(tmp_path, providers="fused,piped")
    assert (status, rows["piped"].status) == (0, "refused: none fits")


def test_interrupt_saves_what_is_there(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def interrupted(*arguments: Any) -> list[Row]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*arguments)

    from sdpa_cutlass.cli.measure import measure

    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", interrupted)
    status, rows = compare(tmp_path, "--filter", "host/*d64")
    assert status == 0
    assert rows["fused"].head_dim == 32
    assert results.load(tmp_path / "result.json").env["interrupted"] is True
    assert "interrupted" in capsys.readouterr().out


def test_own_inputs(kernels: Kernels, tmp_path: Path) -> None:
    mine = tmp_path / "mine.safetensors"
    save_file({name: torch.randn(1, 2, 33, 64) for name in "qkv"}, mine)
    status, rows = compare(tmp_path, "--input", str(mine), "--filter", "input:mine/*", "--suite", "real")
    assert status == 0
    row = rows["fused"]
    assert (row.suite, row.seqlen_q, row.head_dim, row.dtype) == ("input:mine", 33, 64, "f16")


def test_real_inputs_are_in_both_default_grids(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cpu", "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert names[-1] == "real/b2_h12_s65_d32"
    assert len(names) == 12
    assert main(["compare", "--device", "cpu", "--suite", "mission,real", "--list"]) == 0
    assert len(capsys.readouterr().out.split()) == 3


def test_missing_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(tmp_path / "absent.so"))
    monkeypatch.setattr("sdpa_cutlass.library.abi._loaded", {})
    assert main(["compare", "--device", "cpu"]) == 2
    assert "make host" in capsys.readouterr().err


USAGE = {
    "suite": (["--suite", "nonsense"], "nonsense is not among mission"),
    "provider": (["--providers", "fused,me"], "me is not among fused"),
    "repeats": (["--repeats", "0"], "must be at least 1"),
}


@pytest.mark.parametrize(("arguments", "message"), USAGE.values(), ids=USAGE.keys())
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["compare", *arguments])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


REFUSED = {
    "a GPU's suite": (["--suite", "mission,long,masks"], "--suite long,masks: needs a GPU"),
    "filter": (["--filter", "nothing"], "--list shows their names"),
    "input": (["--input", "absent.safetensors"], "absent.safetensors: cannot be read"),
}


@pytest.mark.parametrize(("arguments", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["compare", "--device", "cuda"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_unwritable_file(kernels: Kernels, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("")
    assert compare_to(blocker / "result.csv", tmp_path) == 2
    assert "cannot write" in capsys.readouterr().err


def compare_to(path: Path, tmp_path: Path) -> int:
    return compare(tmp_path, "--csv", str(path), "--quiet")[0]


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "rich" else object())
    assert main(["compare"]) == 2
    assert "needs rich: pip install 'sdpa_cutlass[cli]'" in capsys.readouterr().err


@pytest.mark.gpu
def test_masks_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    command = ["compare", "--device", "cuda", "--suite", "masks", "--filter", "*_h32_s512_d64*"]
    assert main([*command, "--json", str(path)]) == 0
    rows = results.load(path).rows
    assert len(rows) == 10 * 5
    for row in rows:
        if row.provider in ("fused", "plain"):
            assert row.status == "ok"
            assert 1 < (row.gpu_us or 0) < 5000
        if row.provider == "torch_efficient" and row.mask != "bias_f32":
            assert row.status == "ok"


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    status = main(["compare", "--device", "cuda", "--suite", "mission,real", "--json", str(path)])
    found = results.load(path)
    assert status == 0
    assert len(found.rows) == 3 * (len(PROVIDERS) - 1)
    assert found.env["gpu"]
    assert found.env["clocks"]["end"]
    for row in found.rows:
        if row.provider in ("fused", "piped", "torch_flash", "naive"):
            assert row.status == "ok"  # captured in a graph: no note
            assert 1 < (row.gpu_us or 0) < 1000
            assert (row.gpu_us_spread or 0) < 0.5 * (row.gpu_us or 0)
            assert (row.wall_us or 0) > 1
