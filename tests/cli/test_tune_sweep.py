"""Sweeps on the host library: which problems and kernels, how each is checked, and what the journal keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass import Problem
from sdpa_cutlass.choice import select
from sdpa_cutlass.choice.tuned_table import Bucket, HeadDims, Nearest, bucket_of, from_json
from sdpa_cutlass.cli import CommandError
from sdpa_cutlass.cli.tuning import command, journal, sweep, tasks
from sdpa_cutlass.cli.tuning.journal import JournalError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Takes, read_kernels
from tests.cli.sweeps import FakeMeasurer, fresh_journal, host_tasks, options, run_tune, swept
from tests.library.tuned_tables import row, table


def head_dims() -> HeadDims:
    return HeadDims(read_kernels(library(Target.HOST)))


# ---- which problems and kernels ----


def test_the_most_valuable_problems_come_first() -> None:
    found = tasks.make_tasks(options().suite, ("f16", "bf16"), head_dims())
    assert [task.name for task in found[:2]] == [
        "mission/b1_h8_s512_d64_f16",
        "mission/b1_h8_s512_d64_causal_f16",
    ]
    levels = [task.level for task in found]
    assert levels == sorted(levels)
    assert {0, 1, 2} == set(levels)
    names = [task.name for task in found]
    assert len(set(names)) == len(names)
    assert {task.bucket.dtype.value for task in found[:40]} == {"f16", "bf16"}
    grid = [task.bucket for task in found if task.case.suite == "grid"]
    assert len(set(grid)) == len(grid)
    others = {task.bucket for task in found if task.case.suite != "grid"}
    assert not others & set(grid)
    assert {bucket.head_dim for bucket in grid} == head_dims().plain | set(head_dims().general)
    assert {bucket.kind for bucket in grid} == {"plain", "bool", "bias16", "bias32", "lengths", "dropout"}


def test_every_problem_of_the_grid_is_near_a_bucket() -> None:
    """So that no plain problem between 128 and 8192 keys, square, is out of reach of a full table."""
    found = tasks.make_tasks(("grid",), ("f16",), head_dims())
    nearest = Nearest(table(*(row(bucket=task.bucket) for task in found)))
    for seqlen in (128, 180, 363, 725, 1449, 2897, 5793, 8192):
        for heads in (4, 6, 11, 23, 64, 300, 1000):
            problem = dataclasses.replace(
                found[0].problem,
                batch=1,
                num_heads_q=heads,
                num_heads_kv=heads,
                seqlen_q=seqlen,
                seqlen_k=seqlen,
            )
            bucket = bucket_of(problem, head_dims())
            assert bucket is not None
            assert nearest(bucket) is not None, problem


def test_masks_are_problems_of_their_own_kind() -> None:
    found = {task.name: task.problem for task in host_tasks("host_masks")}
    kinds = {name.removeprefix("host_masks/b2_h4_s97_d64_"): problem for name, problem in found.items()}
    assert str(kinds["bias_f16_f16"].mask) == "MaskType.F16"
    assert kinds["packed_f16"].has_lengths
    assert kinds["lengths_f16"].has_lengths
    assert kinds["causal_dropout_f16"].has_dropout
    assert not kinds["padding_f16"].has_lengths
    bf16 = {task.name: task.problem for task in host_tasks("host_masks", dtypes=("bf16",))}
    assert str(bf16["host_masks/b2_h4_s97_d64_bias_f16_bf16"].mask) == "MaskType.BF16"


def test_hopeless_kernels_are_left_out_unless_all_are_wanted() -> None:
    native = library(Target.HOST)
    task = next(t for t in host_tasks() if t.case.head_dim == 64)
    some = sweep.candidates(native, task, HOST)
    every = sweep.candidates(native, task, HOST, everything=True)
    assert {kernel.name for kernel in some} < {kernel.name for kernel in every}
    assert not any(kernel.is_general and not kernel.is_split for kernel in some)
    assert any(kernel.is_general for kernel in every)
    assert some[0].name == every[0].name
    matching = sweep.candidates(native, task, HOST, glob="*_m64n*", everything=True)
    assert matching == [kernel for kernel in every if kernel.block_m == 64]
    masked = next(t for t in host_tasks("host_masks") if t.case.mask == "dense")
    assert all(kernel.is_general for kernel in sweep.candidates(native, masked, HOST))


def test_the_cost_models_last_are_pruned(monkeypatch: pytest.MonkeyPatch) -> None:
    task = next(t for t in host_tasks() if t.case.head_dim == 64)
    row, cost = select.ranking(library(Target.HOST), task.problem, sdpa_cutlass.Family.FMHA_FWD, HOST)[0]
    ranked = [
        (dataclasses.replace(row, name=f"k{i}"), dataclasses.replace(cost, cycles=cost.cycles * (1 + i / 4)))
        for i in range(9)
    ]
    monkeypatch.setattr(sweep, "ranking", lambda *arguments: ranked)
    monkeypatch.setattr(sweep, "SURE_CANDIDATES", 2)
    found = sweep.candidates(library(Target.HOST), task, HOST)
    assert [kernel.name for kernel in found] == ["k0", "k1", "k2"]  # 1, 1.25 and 1.5 times the best
    monkeypatch.setattr(sweep, "SURE_CANDIDATES", 5)
    assert len(sweep.candidates(library(Target.HOST), task, HOST)) == 5


# ---- real measurements, of the emulated GPU ----


def test_kernels_are_checked_and_timed() -> None:
    native = library(Target.HOST)
    measurer = sweep.Measurer(torch.device("cpu"), seed=0, repeats=1)
    for task in [
        host_tasks()[0],
        *(t for t in host_tasks("host_masks") if t.case.mask in ("packed", "dense")),
    ]:
        kernels = sweep.candidates(native, task, HOST)[:2]
        found = measurer(task, kernels)
        assert [item.kernel for item in found] == [kernel.name for kernel in kernels]
        for item in found:
            assert item.status == "ok"
            assert (item.gpu_us or 0) > 0
            assert 0 < (item.max_err_out or 0) < 2e-3
            assert (item.max_err_lse or 1) < 1e-4


@pytest.mark.parametrize("when", ["first run", "timed run", "timed run, NaN", "raises"])
def test_a_wrong_kernel_is_found_out(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = host_tasks()[0]
    good, bad = sweep.candidates(library(Target.HOST), task, HOST)[:2]
    original = sdpa_cutlass.attention

    def attention(*tensors: Any, kernel: str, **rest: Any) -> Any:
        result: Any = original(*tensors, kernel=kernel, **rest)
        if kernel != bad.name:
            return result
        if when == "raises":
            raise sdpa_cutlass.LaunchError("made up")
        if when == "first run" and isinstance(result, tuple):
            result[0][0, 0, 0, 0] += 0.1
        if when == "timed run" and not isinstance(result, tuple):
            result[0, 0, 0, 0] += 0.1
        if when == "timed run, NaN" and not isinstance(result, tuple):
            result[0, 0, 0, 0] = float("nan")
        return result

    monkeypatch.setattr(sdpa_cutlass, "attention", attention)
    right, wrong = sweep.Measurer(torch.device("cpu"), seed=0, repeats=1)(task, [good, bad])
    assert right.status == "ok"
    expected = {
        "first run": "wrong: max error of O 0.",
        "timed run": "wrong: in the timed run, max error",
        "timed run, NaN": "wrong: 1 of 1 timed outputs hold NaN",
        "raises": "error: LaunchError: made up",
    }
    assert wrong.status.startswith(expected[when])
    assert wrong.has_failed


def test_what_a_kernel_refuses_is_not_its_failure() -> None:
    task = host_tasks()[0]
    good = sweep.candidates(library(Target.HOST), task, HOST)[0]
    other = next(
        k
        for k in read_kernels(library(Target.HOST))
        if k.family is good.family and k.head_dim != good.head_dim and not k.is_general
    )
    _, refused = sweep.Measurer(torch.device("cpu"), seed=0, repeats=1)(task, [good, other])
    assert refused.status.startswith("refused: ")
    assert not refused.has_failed


# ---- journal, budget, resume ----


def test_the_journal_survives_a_round_trip(tmp_path: Path) -> None:
    measurer = FakeMeasurer()
    measurer.wrong = lambda task, kernel: kernel.block_m == 32
    found = swept(tmp_path, host_tasks("host", "host_masks"), measurer)
    assert found.device == HOST
    assert len(found.entries) == len(measurer.asked)
    rows = {kernel.name: kernel for kernel in read_kernels(library(Target.HOST))}
    assert found.kernels == {name: rows[name] for name in found.kernels}
    task = host_tasks()[0]
    entry = found.entries[task.name]
    assert (entry.problem, entry.bucket) == (task.problem, task.bucket)
    assert set(found.failures) == {name for name in found.kernels if "_m32" in name}
    failed = [item for item in entry.measured if item.has_failed]
    assert all(item.max_err_lse is None for item in failed)  # NaN is no number in JSON


def test_journals_of_older_versions_are_read(tmp_path: Path) -> None:
    """They have a number of splits for each kernel, which was always 1."""
    swept(tmp_path, host_tasks(), FakeMeasurer())
    path = tmp_path / "journal.jsonl"
    text = path.read_text()
    assert "num_splits" not in text
    expected = journal.read(path)
    path.write_text(text.replace('"status": "ok"', '"status": "ok", "num_splits": 1'))
    assert journal.read(path) == expected
    path.write_text(text.replace('"status": "ok"', '"status": "ok", "num_splits": 2'))
    with pytest.raises(JournalError, match=r"line \d+: .*num_splits is 2; a row names no number of splits"):
        journal.read(path)
    committed = Path(__file__).parents[2] / "benchmarks/results/tuning/2026-11-21-h200-tune-f16.jsonl"
    assert '"num_splits": 1' in committed.read_text()
    assert len(journal.read(committed).entries) > 50


def test_the_budget_ends_a_sweep_between_problems(tmp_path: Path) -> None:
    now = 0.0

    def clock() -> float:
        return now

    class Slow(FakeMeasurer):
        def __call__(self, *arguments: Any) -> Any:
            nonlocal now
            now += 10
            return super().__call__(*arguments)

    some = host_tasks()
    native, writer = library(Target.HOST), journal.Writer(tmp_path / "j", fresh_journal(), is_new=True)
    outcome = sweep.run(
        some,
        candidates_of=lambda task: sweep.candidates(native, task, HOST),
        measure=Slow(),
        writer=writer,
        budget_s=25,
        clock=clock,
    )
    writer.close()
    assert (outcome.measured, outcome.left) == (3, len(some) - 3)
    assert outcome.ended == "the budget of 25 s is spent"
    assert list(journal.read(tmp_path / "j").entries) == [task.name for task in some[:3]]


def test_an_interrupted_sweep_is_kept_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = FakeMeasurer()
    first.raises[3] = KeyboardInterrupt()
    assert run_tune(tmp_path, first) == 0
    total = len(host_tasks())
    output = " ".join(capsys.readouterr().out.split())
    assert f"measured 3 problems; interrupted, {total - 3} problems are left (--resume goes on)" in output
    assert len(from_json((tmp_path / "table.json").read_text()).rows) == 3

    with open(tmp_path / "journal.jsonl", "a", encoding="utf-8") as file:
        file.write('{"case": "torn')
    second = FakeMeasurer()
    assert run_tune(tmp_path, second, resume=True) == 0
    assert f"measured {total - 3} problems, 3 were in the journal" in " ".join(
        capsys.readouterr().out.split()
    )
    assert [name for name, _ in first.asked[:3] + second.asked] == [task.name for task in host_tasks()]
    assert len(from_json((tmp_path / "table.json").read_text()).rows) == total
    third = FakeMeasurer()
    assert run_tune(tmp_path, third, resume=True) == 0
    assert third.asked == []


def test_only_kernels_that_were_not_measured_are_added(tmp_path: Path) -> None:
    run_tune(tmp_path, FakeMeasurer(), "--kernels", "*_m128n*")
    more = FakeMeasurer()
    run_tune(tmp_path, more, resume=True)
    assert more.asked
    assert not any("_m128n" in kernel for _, names in more.asked for kernel in names)
    entries = journal.read(tmp_path / "journal.jsonl").entries.values()
    assert any({"_m128n" in item.kernel for item in entry.measured} == {True, False} for entry in entries)


@pytest.mark.parametrize(
    ("changes", "resume", "message"),
    [
        ({}, False, "is there already: --resume goes on with it"),
        ({"seed": 1}, True, "its seed is 0, and now it is 1"),
        (
            {"device": dataclasses.replace(HOST, sms=60)},
            True,
            "its GPU is host (modelled as NVIDIA L4), 58 SMs",
        ),
        (
            {"env": {"library": {"digest": "other"}}},
            True,
            "its library is 0123456789abcdef, and now it is other",
        ),
    ],
    ids=["not asked for", "seed", "GPU", "library"],
)
def test_journals_are_neither_lost_nor_mixed(
    changes: dict[str, Any], resume: bool, message: str, tmp_path: Path
) -> None:
    swept(tmp_path, host_tasks()[:1])
    before = (tmp_path / "journal.jsonl").read_bytes()
    with pytest.raises(CommandError) as caught:
        command.open_journal(tmp_path / "journal.jsonl", fresh_journal(**changes), resume=resume)
    assert message in str(caught.value)
    assert (tmp_path / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        "no JSON",
        "[]",
        "{}",
        '{"kernel": {"name": "x"}}',
        '{"case": "x", "problem": {}, "bucket": {}, "measured": []}',
    ],
)
def test_damaged_journals_are_refused(line: str, tmp_path: Path) -> None:
    swept(tmp_path, host_tasks()[:1])
    path = tmp_path / "journal.jsonl"
    path.write_text(path.read_text() + line + "\n")
    number = len(path.read_text().splitlines())
    with pytest.raises(JournalError, match=rf"journal.jsonl: line {number}: "):
        journal.read(path)


def test_problems_are_what_their_rows_say() -> None:
    """The bucket that a task carries is the one that select.py will look for."""
    for task in host_tasks("host", "host_masks"):
        problem: Problem = task.problem
        bucket: Bucket | None = bucket_of(problem, head_dims())
        assert task.bucket == bucket


def test_rows_of_journals_from_before_capabilities_are_todays() -> None:
    """They said with flags what a kernel takes. Windows and sinks came later."""
    committed = Path(__file__).parents[2] / "benchmarks/results/tuning/2026-11-22-h200-tune-f16.jsonl"
    rows = {row.name: row for row in read_kernels(library(Target.HOST))}
    found = [kernel for kernel in journal.read(committed).kernels.values() if kernel.name in rows]
    assert len({kernel.takes for kernel in found}) == 5
    for kernel in found:
        today = rows[kernel.name]
        takes = today.takes & ~(Takes.WINDOW | Takes.SINKS)
        assert (kernel.takes, kernel.details) == (takes, today.details), kernel.name
