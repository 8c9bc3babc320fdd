"""The suite `random`: what is drawn, what a run of it records, and what the report says of made-up times."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sdpa_cutlass.cli import bench, main, random_report, random_suite
from sdpa_cutlass.cli.random_report import Sample
from sdpa_cutlass.cli.random_sample import FASTEST
from sdpa_cutlass.cli.results import Row, load
from sdpa_cutlass.problem import Causal
from tests.cli import rows as made


@given(seed=st.integers(0, 2**40), index=st.integers(0, 10**6))
def test_every_problem_is_one_that_can_be_measured(seed: int, index: int) -> None:
    for limits in (random_suite.GPU, random_suite.CPU):
        case = random_suite.problem(seed, index, limits)
        problem = case.problem()
        assert case.head_dim in random_suite.HEAD_DIMS
        assert case.num_heads_q % case.num_heads_kv == 0
        assert case.num_heads_q <= random_suite.MOST_HEADS
        assert min(case.batch, case.seqlen_q, case.seqlen_k) >= 1
        assert max(case.seqlen_q, case.seqlen_k) <= random_suite.LONGEST
        assert problem.bytes <= limits.bytes
        assert problem.flops <= limits.flops
        assert not (case.causal and case.mask != "none")
        if case.causal and case.seqlen_q != case.seqlen_k:
            assert case.alignment is Causal.BOTTOM_RIGHT
            assert case.seqlen_q <= case.seqlen_k or limits is random_suite.CPU


def test_a_longer_run_repeats_a_shorter_one_and_another_seed_does_not() -> None:
    names = [case.name for case in random_suite.draw(7, 60)]
    assert names == [case.name for case in random_suite.draw(7, 100)][:60]
    assert len(set(names)) == 60
    assert not set(names) & {case.name for case in random_suite.draw(8, 60)}


def test_every_kind_and_every_head_dim_comes_up() -> None:
    cases = random_suite.draw(0, 1000)
    assert {random_suite.kind_of(case) for case in cases} == set(random_suite.KINDS)
    assert {case.head_dim for case in cases} == set(random_suite.HEAD_DIMS)
    assert {case.mask for case in cases} == {"none", *random_suite.MASKS}
    assert {case.dtype for case in cases} == {None, "bf16"}
    assert any(case.p_dropout for case in cases)
    assert any(case.causal and case.alignment is Causal.BOTTOM_RIGHT for case in cases)


def drawn(ours: float, flash: float | None, efficient: float | None, **shape: object) -> list[Row]:
    shape = {"suite": random_suite.SUITE, "kernel": "fmha_fwd_sm89_d64_m64n64_s1_w4_f16"} | shape
    times = {"fused": ours, "torch_flash": flash, "torch_efficient": efficient, "torch_cudnn": 2 * ours}
    return [made.row(name, time, **shape) for name, time in times.items() if time is not None]


ROWS = [
    *drawn(10.0, 20.0, 40.0),
    *drawn(10.0, 5.0, 30.0, seqlen_q=1, seqlen_k=9000, head_dim=256),
    *drawn(10.0, None, None, mask="padding"),
    *made.mission(),
]


def test_the_better_rival_counts_and_other_suites_do_not() -> None:
    found = {group.what: group for group in random_report.groups(ROWS)}
    every = found["all"]
    assert (every.problems, every.behind, every.least) == (2, 1, 0.5)
    assert every.mean == pytest.approx(1.0)  # of 2 and 0.5
    assert every.cudnn == pytest.approx(2.0)
    assert found["decode"].mean == found["head_dim 256"].mean == found["head_dim above 128"].mean == 0.5
    assert (found["masked"].problems, found["masked"].mean) == (0, None)  # without a rival
    assert found["self"].mean == 2.0
    assert [(value, one.problem.seqlen_k) for value, one in random_report.behind(ROWS)] == [(0.5, 9000)]


SAMPLES = [
    Sample(problem="random/a", chosen="slow", times={"slow": 12.0, "fast": 10.0}),
    Sample(problem="random/b", chosen="fast", times={"slow": 12.0, "fast": 10.0}),
    Sample(problem="random/c", chosen="only", times={"only": 1.0}),
]


def test_regret_is_over_problems_with_a_choice() -> None:
    assert random_report.regret(SAMPLES) == {
        "problems": 2,
        "mean": pytest.approx(1.2**0.5, abs=1e-4),
        "worst": 1.2,
        "worst_at": "random/a",
    }
    assert random_report.regret(SAMPLES[2:]) is None


def test_times_measured_again_judge_the_choice() -> None:
    first = {"slow": 12.0, "fast": 10.0, "lucky": 9.0}
    again = {"slow": 11.0, "fast": 10.0, "lucky": 10.5}
    sample = Sample(problem="p", chosen="slow", times=first, again=again)
    assert (sample.regret, sample.best) == (1.1, "fast")
    not_again = Sample(problem="p", chosen="slow", times=first, again={"fast": 10.0})
    assert (not_again.regret, not_again.best) == (12 / 9, "lucky")


def test_samples_find_their_rows_in_runs_of_either_type() -> None:
    """A run in f16 names its problems in bf16 after their type, a run in bf16 none."""
    f16, own = drawn(5, 4, 6, dtype="f16")[0], drawn(5, 4, 6, dtype="bf16")[0]
    name = random_report.case_of(f16).name.removesuffix("_f16")
    assert random_report.rows_of_samples([own])[name] == own
    for rows in ([f16, own], [own, f16]):
        found = random_report.rows_of_samples(rows)
        assert (found[name], found[f"{name}_bf16"]) == (f16, own)


def test_what_is_printed_names_the_worst() -> None:
    text = io.StringIO()
    random_report.show(ROWS, SAMPLES, Console(file=text, width=180))
    printed = text.getvalue()
    assert "behind at 1 problems" in printed
    assert "0.50  B1 H8 S1/9000 D256 f16: m64n64_s1_w4 10 us" in printed
    assert "geometric mean 1.095, worst 1.20" in printed
    assert "1.20  random/a: slow 12 us, fast 10 us" in printed
    assert "random/b" not in printed


def run(folder: Path, *arguments: str) -> int:
    command = ["bench", "--device", "cpu", "--suite", "random", "--seed", "3", "--repeats", "1", "--quiet"]
    return main([*command, "--providers", "fused,torch_math", "--out", str(folder), *arguments])


def test_a_run_records_rows_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--count", "4", "--every", "2", "--filter", "random/b1_h1_*") == 0
    found = load(next(tmp_path.glob("*.json")))
    assert "-random.json" in next(tmp_path.glob("*.json")).name
    assert {row.suite for row in found.rows} == {random_suite.SUITE}
    assert {row.status for row in found.rows if row.provider == "fused"} == {"ok"}
    record = found.env["random"]
    assert json.dumps(record)
    names = {sample["problem"] for sample in record["samples"]}
    assert names <= {case.name for case in random_suite.draw(3, 4, random_suite.CPU)}
    assert names
    for sample in record["samples"]:
        assert sample["chosen"] in sample["times"]
        assert sample["chosen"] in sample["again"]
        fastest = sorted(sample["times"], key=sample["times"].__getitem__)[:FASTEST]
        assert set(sample["again"]) == {sample["chosen"], *fastest}
    assert "random: the better of torch's flash" in capsys.readouterr().out


def test_no_problem_begins_after_the_time_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 10**6, 40))
    monkeypatch.setattr(bench.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr("sdpa_cutlass.cli.measure.measure", lambda *arguments: drawn(1.0, 2.0, 3.0))
    assert run(tmp_path, "--count", "9", "--every", "99", "--seconds", "100") == 0
    found = load(next(tmp_path.glob("*.json")))
    assert found.env["left_out"] == 7
    assert len(found.rows) == 2 * 4
    assert "7 problems were left out: --seconds 100" in capsys.readouterr().out


def test_list_gives_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "--device", "cpu", "--suite", "random", "--seed", "5", "--count", "7", "--list"]) == 0
    )
    names = capsys.readouterr().out.split()
    assert names == [case.name for case in random_suite.draw(5, 7, random_suite.CPU)]


def test_a_run_in_the_other_type_draws_the_same_problems(capsys: pytest.CaptureFixture[str]) -> None:
    listed = []
    for dtype in ("f16", "bf16"):
        command = [
            "bench",
            "--device",
            "cpu",
            "--suite",
            "random",
            "--count",
            "40",
            "--dtype",
            dtype,
            "--list",
        ]
        assert main(command) == 0
        listed.append({name.removesuffix("_bf16") for name in capsys.readouterr().out.split()})
    assert listed[0] == listed[1]
