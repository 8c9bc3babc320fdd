"""The tune command on the host library, with made-up times: the table, the exit status, the command line."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_cutlass import explain
from sdpa_cutlass.choice import tuned_lookup
from sdpa_cutlass.choice.tuned_table import from_json, misfit, to_json
from sdpa_cutlass.cli import CommandError, main
from sdpa_cutlass.cli.tuning import command, derive, journal, sweep
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import read_kernels
from tests.cli.sweeps import FakeMeasurer, host_tasks, made_up_us, options, run_tune, swept


@pytest.fixture(autouse=True)
def _own_tables_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tuned_lookup.TABLE_VARIABLE, raising=False)
    yield
    tuned_lookup.forget()


# ---- the table ----


def test_the_fastest_right_kernel_is_selected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measurer = FakeMeasurer()
    assert run_tune(tmp_path, measurer) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "The cost model's choice takes" in output
    found = from_json((tmp_path / "table.json").read_text())
    assert misfit(found, read_kernels(library(Target.HOST)), HOST) is None
    assert (found.digest, found.driver, found.date) == ("0123456789abcdef", "580.0", "2026-11-21")
    rows = {kernel.name: kernel for kernel in read_kernels(library(Target.HOST))}
    by_bucket = {row.bucket: row for row in found.rows}
    for task, (_, names) in zip(host_tasks(), measurer.asked, strict=True):
        times = sorted((made_up_us(task, rows[name]), name) for name in names)
        row = by_bucket[task.bucket]
        assert row.gpu_ns == round(1e3 * times[0][0])
        assert made_up_us(task, rows[row.kernel]) == times[0][0]
        assert (row.check, row.max_error_nano) == ("ok", 125_000)
        if len(times) > 1:
            assert row.ratio == pytest.approx(times[1][0] / times[0][0], rel=1e-3)
    # And it is taken from then on.
    monkeypatch.setenv(tuned_lookup.TABLE_VARIABLE, str(tmp_path / "table.json"))
    tuned_lookup.forget()
    task = host_tasks()[0]
    q = torch.zeros(task.case.batch, task.case.num_heads_q, task.case.seqlen_q, task.case.head_dim).half()
    chosen = explain(q, q.clone(), q.clone()).choice
    assert chosen.kernel.name == by_bucket[task.bucket].kernel
    assert chosen.reason.startswith("tuned table table.json")


def test_a_kernel_that_fails_once_is_selected_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though it is among the two fastest elsewhere too, and right at all problems but one."""
    suites = ("host", "host_masks")
    clean = derive.make_table(swept(tmp_path, host_tasks(*suites)))
    assert clean is not None
    uses = Counter(name for row in clean.rows for name in (row.kernel, row.runner_up))
    best = max((row.kernel for row in clean.rows), key=lambda name: uses[name])
    assert uses[best] > 1
    buckets = [row.bucket for row in clean.rows if row.kernel == best]
    task = next(t for t in host_tasks(*suites) if t.bucket in buckets)
    (tmp_path / "journal.jsonl").unlink()
    measurer = FakeMeasurer()
    measurer.wrong = lambda where, kernel: (where.name, kernel.name) == (task.name, best)
    assert run_tune(tmp_path, measurer, names=suites) == 1
    assert f"{best} is not selected: {task.name}: wrong: made up" in capsys.readouterr().out
    found = from_json((tmp_path / "table.json").read_text())
    assert len(found.rows) == len(clean.rows)
    assert best not in {name for row in found.rows for name in (row.kernel, row.runner_up)}


def test_problems_that_share_a_bucket_are_weighed_together(tmp_path: Path) -> None:
    """Lengths, full lengths, packed: kernel A wins two, B loses those by less than it wins one."""
    some = [t for t in host_tasks("host_masks") if t.bucket.kind == "lengths"]
    assert len(some) == 3
    assert len({t.bucket for t in some}) == 1
    a, b = sweep.candidates(library(Target.HOST), some[0], HOST)[:2]
    times = {a.name: (10.0, 10.0, 20.0), b.name: (10.1, 10.1, 10.0)}

    class Measurer(FakeMeasurer):
        def __call__(self, task: Any, kernels: Any) -> Any:
            return [
                journal.Measured(kernel=name, gpu_us=values[some.index(task)], max_err_out=0.0)
                for name, values in times.items()
            ]

    (choice,) = derive.choices([swept(tmp_path, some, Measurer())])
    assert choice.kernel == b.name
    assert choice.cases == tuple(t.name for t in some)
    assert choice.best_us == pytest.approx((10.1 * 10.1 * 10) ** (1 / 3))


def test_where_problems_share_a_bucket_a_kernel_has_to_be_right_at_all(tmp_path: Path) -> None:
    some = [t for t in host_tasks("host_masks") if t.bucket.kind == "lengths"]
    a, b = sweep.candidates(library(Target.HOST), some[0], HOST)[:2]

    class Measurer(FakeMeasurer):
        def __call__(self, task: Any, kernels: Any) -> Any:
            fastest = journal.Measured(kernel=a.name, gpu_us=1.0, max_err_out=0.0)
            if task is some[-1]:
                fastest = journal.Measured(kernel=a.name, status="refused: made up")
            return [fastest, journal.Measured(kernel=b.name, gpu_us=2.0, max_err_out=0.0)]

    (choice,) = derive.choices([swept(tmp_path, some, Measurer())])
    assert choice.times == ((b.name, pytest.approx(2.0)),)


def test_a_lost_gpu_ends_the_sweep_and_names_the_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measurer = FakeMeasurer()
    measurer.raises[2] = sweep.GpuLostError("kernel k at problem p left the GPU unusable: illegal address")
    assert run_tune(tmp_path, measurer) == 1
    assert "kernel k at problem p left the GPU unusable" in capsys.readouterr().out
    assert len(from_json((tmp_path / "table.json").read_text()).rows) == 2


def test_a_problem_that_does_not_fit_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measurer = FakeMeasurer()
    measurer.raises[0] = torch.cuda.OutOfMemoryError("made up")
    assert run_tune(tmp_path, measurer) == 0
    assert f"skipped {host_tasks()[0].name}: out of memory" in capsys.readouterr().out
    assert len(from_json((tmp_path / "table.json").read_text()).rows) == len(host_tasks()) - 1


def test_nothing_to_measure_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no kernel was measured"):
        run_tune(tmp_path, FakeMeasurer(), "--kernels", "nothing*")
    assert not (tmp_path / "table.json").exists()


# ---- the command line ----


def test_the_whole_command_on_the_emulated_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but the search for a GPU is real; the times are those of the emulation."""
    cpu = torch.device("cpu")
    monkeypatch.setattr(command, "_gpu", lambda index: (library(Target.HOST), HOST, cpu))
    monkeypatch.setattr(sweep, "REPEATS", 1)
    out = tmp_path / "table.json"
    arguments = [
        "tune",
        "--suite",
        "grid",
        "--dtype",
        "f16",
        "--filter",
        "grid/b1_h4_s128_d64*",
        "--out",
        str(out),
    ]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "measured 2 problems" in output
    assert f"wrote {out}: it counts where SDPA_CUTLASS_TUNED_TABLE names it" in output
    found = from_json(out.read_text())
    assert found.digest == library(Target.HOST).build.digest
    assert {(row.bucket.rows, row.bucket.causal) for row in found.rows} == {(512, False), (512, True)}
    assert all(0 < row.max_error_nano < 2e6 for row in found.rows)
    raw = journal.read(tmp_path / "table.journal.jsonl")
    assert not raw.failures
    assert main(arguments) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert main([*arguments, "--resume"]) == 0
    assert "measured 0 problems, 2 were in the journal" in capsys.readouterr().out


def test_without_a_gpu_tune_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 2
    assert "torch finds no GPU" in capsys.readouterr().err


def test_list_needs_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "_any_library", lambda: (Target.HOST, library(Target.HOST)))
    assert main(["tune", "--list", "--suite", "mission", "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out.split() == [
        "mission/b1_h8_s512_d64_bf16",
        "mission/b1_h8_s512_d64_causal_bf16",
    ]
    assert main(["tune", "--list", "--filter", "nothing"]) == 2


def test_tables_can_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_any_library", lambda: (Target.HOST, library(Target.HOST)))
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    made = derive.make_table(swept(tmp_path, host_tasks()))
    assert made is not None
    good.write_text(to_json(made))
    assert main(["tune", "--check", str(good)]) == 0
    output = capsys.readouterr().out
    assert f"{good}: valid for the " in output
    assert f"{len(made.rows)} rows" in output
    document = json.loads(good.read_text())
    document["rows"][0]["kernel"] = "fmha_fwd_sm89_d64_m16n16_s1_w1_f16"
    bad.write_text(json.dumps(document))
    assert main(["tune", "--check", str(good), str(bad), str(tmp_path / "none.json")]) == 1
    output = capsys.readouterr().out
    assert f"{bad}: not valid: the library has no kernel fmha_fwd_sm89_d64_m16n16" in output
    assert "none.json: not valid: there is no such file" in output


@pytest.mark.parametrize(
    "arguments",
    [["--suite", "host"], ["--suite", ","], ["--budget", "-1"], ["--budget", "inf"], ["--within", "150"]],
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tune", *arguments])
    assert caught.value.code == 2


def test_the_table_goes_where_it_takes_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = dataclasses.replace(HOST, target=Target.CUDA, name="NVIDIA H200")
    out, raw = command._paths(options(), device)
    assert out == tuned_lookup.default_paths(device)[0]
    assert raw == out.with_name("nvidia_h200.journal.jsonl")
    assert command._effect(out, device) == "new processes choose by it"
    monkeypatch.setenv(tuned_lookup.TABLE_VARIABLE, "off")
    assert command._effect(out, device) == "not in use, because SDPA_CUTLASS_TUNED_TABLE is off"
    monkeypatch.setenv(tuned_lookup.TABLE_VARIABLE, str(out))
    assert command._effect(out, device) == "new processes choose by it"
    out, raw = command._paths(options("--out", "a/b.json", "--journal", "c"), device)
    assert (out, raw) == (Path("a/b.json"), Path("c"))
