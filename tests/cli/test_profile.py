"""The profile command: its options, the static half, and what it says where nothing can be run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from generator.families import FAMILIES
from sdpa_cutlass.cli import FAILED, OK, USAGE, main
from sdpa_cutlass.cli.profiling import child, command, ncu, static
from sdpa_cutlass.cli.profiling.problems import ShapeError, Task, parse_shape
from sdpa_cutlass.errors import LibraryNotFoundError
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.machine_code import expected, kernels, tools
from sdpa_cutlass.problem import Causal

PLAIN = "fmha_fwd_sm89_d64_m64n64_s1_w4_f16"
LIKE_PLAIN = tuple(product(("_d64", "_d128"), ("_f16", "_bf16")))


@pytest.fixture(scope="module")
def plain() -> str:
    """PLAIN or its like, whichever the CUDA library holds; skips without one or a disassembler."""
    names = [PLAIN.replace("_d64", head_dim).replace("_f16", dtype) for head_dim, dtype in LIKE_PLAIN]
    try:
        held = [name for name in names if static.read(name).code]
    except (LibraryNotFoundError, tools.MachineCodeError) as error:
        pytest.skip(str(error))
    if not held:
        pytest.skip(f"the CUDA library holds none of {names}")
    return held[0]


# ---- --shape ----


def test_shapes() -> None:
    case = parse_shape("8, 32x8, 1x4096, 128, causal_bottom_right, bias_f16, dropout")
    assert (case.batch, case.num_heads_q, case.num_heads_kv, case.head_dim) == (8, 32, 8, 128)
    assert (case.seqlen_q, case.seqlen_k) == (1, 4096)
    assert (case.causal, case.alignment, case.mask) == (True, Causal.BOTTOM_RIGHT, "bias_f16")
    assert case.p_dropout > 0
    plain = parse_shape("1,8,512,64")
    assert (plain.causal, plain.mask, plain.p_dropout, plain.seqlen_k) == (False, "none", 0.0, 512)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("1,8,512", "3 parts"),
        ("1,8,512,x", "D is 'x'"),
        ("0,8,512,64", "B is '0'"),
        ("1,8,512,64x32", "single numbers"),
        ("1,8x3,512,64", "3 heads of k do not divide 8"),
        ("1,8,512,64,casual", "'casual' is none of causal"),
        ("1,8,512,64,dense,padding", "at most one mask"),
        ("1,8,128x512,64,packed", "as many queries as keys"),
    ],
)
def test_a_wrong_shape_is_explained(text: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ShapeError, match=complaint):
        parse_shape(text)
    assert main(["profile", "--shape", text]) == USAGE
    assert complaint in capsys.readouterr().err


def test_a_task_survives_the_command_line() -> None:
    task = Task("1,8,512,64,causal", "bf16", PLAIN)
    assert Task.from_json(task.to_json()) == task


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give --static, or --shape"),
        (["--static", "--shape", "1,8,512,64"], "one of them"),
        (["--shape", "1,8,512,64", "--write-gates", "x.md"], "goes with --static"),
        (["--static", "--kernel", "a", "--write-gates", "x.md"], "without --kernel"),
    ],
)
def test_wrong_usage(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == USAGE
    assert complaint in capsys.readouterr().err


# ---- --static ----


def test_one_kernel_in_detail(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "profile.json"
    assert main(["profile", "--static", "--kernel", plain, "--json", str(file)]) == OK
    shown = capsys.readouterr().out
    for wanted in (
        plain,
        "no local memory",
        "sm_86",
        "sm_89",
        "sm_90",
        "main",
        "tensor cores",
        "HMMA",
        "LDGSTS",
    ):
        assert wanted in shown
    assert max(len(line) for line in shown.splitlines()) <= 150
    assert len(shown.splitlines()) <= 40
    (kernel,) = json.loads(file.read_text())["kernels"]
    (main_loop,) = [loop for loop in kernel["loops"] if loop["is_main"]]
    mmas = FAMILIES.parse(plain).head_dim  # a warp has 16 rows and 64 keys; an mma takes 16 x 8 x 16
    assert main_loop["mmas"] == main_loop["groups"]["HMMA"] == mmas
    assert main_loop["slots_per_mma"] == main_loop["slots"] / mmas
    assert main_loop["always"] < main_loop["slots"] == sum(main_loop["opcodes"].values())
    assert main_loop["cycles"]["L4"]["tensor"] == mmas * 4096 / 256
    assert kernel["occupancy"]["sm_89"]["ctas"] >= 1


def test_several_kernels_as_a_table(plain: str, capsys: pytest.CaptureFixture[str]) -> None:
    glob = f"fmha_fwd_sm89_d{FAMILIES.parse(plain).head_dim}_*f16*"
    assert main(["profile", "--static", "--kernel", glob]) == OK
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("fmha_fwd")]
    assert len(rows) > 1
    assert plain in rows
    assert all("…" not in line for line in lines)  # nothing is cut off


@pytest.mark.usefixtures("plain")
def test_a_glob_without_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--static", "--kernel", "no_such_family*"]) == USAGE
    assert "'no_such_family*' matches no kernel" in capsys.readouterr().err


@pytest.fixture
def space(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The library says that it holds the space `request.param`."""
    read = static.read
    monkeypatch.setattr(static, "read", lambda names: dataclasses.replace(read(names), space=request.param))


@pytest.mark.usefixtures("space")
@pytest.mark.parametrize("space", ["release"], indirect=True)
def test_gates_are_written_whole_and_again_the_same(plain: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a.md", tmp_path / "b.md"
    assert main(["profile", "--static", "--write-gates", str(first)]) == OK
    assert main(["profile", "--static", "--write-gates", str(second)]) == OK
    assert plain in first.read_text()
    assert first.read_text() == second.read_text()


@pytest.mark.usefixtures("plain", "space")
@pytest.mark.parametrize("space", ["release_filtered"], indirect=True)
def test_gates_of_some_kernels_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gates.md"
    assert main(["profile", "--static", "--write-gates", str(file)]) == USAGE
    assert "holds 'release_filtered'; build it with `make cuda`" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.usefixtures("space")
@pytest.mark.parametrize("space", ["release"], indirect=True)
def test_a_broken_gate_fails_the_command(
    plain: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(expected, "LOOPS", 7)
    assert main(["profile", "--static", "--kernel", plain]) == FAILED
    assert "2 main loops; there must be 7" in capsys.readouterr().out
    file = tmp_path / "gates.md"
    assert main(["profile", "--static", "--write-gates", str(file)]) == USAGE
    assert "is not written" in capsys.readouterr().err
    assert not file.exists()


def test_no_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(target: Target) -> Any:
        raise LibraryNotFoundError("libsdpa_cutlass.so was not found")

    monkeypatch.setattr(static, "library", missing)
    assert main(["profile", "--static"]) == USAGE
    assert "was not found" in capsys.readouterr().err


@pytest.mark.usefixtures("plain")
def test_no_disassembler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(*args: object, **kwargs: object) -> Any:
        raise tools.MachineCodeError("nvdisasm was not found")

    monkeypatch.setattr(kernels, "read", missing)
    assert main(["profile", "--static"]) == USAGE
    assert "nvdisasm was not found" in capsys.readouterr().err


# ---- --shape without a GPU ----


def test_without_ncu_the_static_half_of_the_chosen_kernel(
    plain: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ncu, "find", lambda: None)
    monkeypatch.setattr(child, "choose", lambda task, device: plain)
    assert main(["profile", "--shape", "1,8,512,64"]) == USAGE
    shown = capsys.readouterr().out
    assert "Nothing was run: " in shown
    assert "ncu (Nsight Compute) is neither on PATH" in shown
    assert f"What {plain}, which would have run" in shown
    assert "tensor cores" in shown


def test_the_chosen_kernel_can_solve_the_problem() -> None:
    assert "_d64_" in child.choose(Task("1,2,64,64,causal", "f16", ""), "cpu")
    assert child.choose(Task("2,2,64,64,padding", "bf16", ""), "cpu").endswith("bf16_general")
    assert child.choose(Task("2,2,64,64,dropout,packed", "f16", ""), "cpu").endswith("general_dropout")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("*_d64_*", "the whole name"), ("unfused_x", "only fused"), ("fmha_fwd_x", "is not in the library")],
)
def test_a_launch_needs_the_name_of_one_fused_kernel(
    name: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--shape", "1,8,512,64", "--kernel", name]) == USAGE
    assert complaint in capsys.readouterr().err


def test_the_profiled_process_solves_the_problem_with_that_kernel() -> None:
    """On the CPU: `bind` gives a call that runs the named kernel, for every word of --shape."""
    for words in ("", ",causal_bottom_right", ",dense", ",lengths,dropout", ",bias_f32", ",packed"):
        task = Task(f"2,4x2,48,64{words}", "f16", "")
        name = child.choose(task, "cpu")
        out = child.bind(task, "cpu")(kernel=name)
        assert out.isfinite().all(), words


@pytest.mark.parametrize(("head_dim", "complaint"), [(64, ""), (8, "matches none of")])
def test_the_profiled_process_runs_that_backward_kernel(head_dim: int, complaint: str) -> None:
    """On the CPU, in a process of its own, which reads what is forced once."""
    task = Task("1,4x2,48,64,dense", "f16", f"fmha_bwd_sm89_d{head_dim}_m64n64_s2_w4_q64k64_f16")
    program = (
        f"from sdpa_cutlass.cli.profiling import child, problems\n"
        f"grads = child.bind_backward(problems.{task!r}, 'cpu')()\n"
        "assert all(grad.isfinite().all() for grad in grads)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(complaint), done.stderr
    assert complaint in done.stderr


def test_globs_are_told_from_names() -> None:
    assert not set(command.GLOB_CHARACTERS) & set(PLAIN)
