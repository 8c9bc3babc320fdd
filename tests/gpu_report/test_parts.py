"""From processes to a report, with processes that are played: nothing is clean by being left out."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_cutlass.errors import DriverError
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.public.api import kernels, library_for
from tests.gpu_report import __main__ as main_module
from tests.gpu_report import report, sanitizer
from tests.gpu_report.context import named
from tests.gpu_report.jobs import Ended, Job, run_all, run_process
from tests.gpu_report.parts import (
    CLEAN,
    FAILED,
    PARTS,
    SKIPPED,
    Outcome,
    Part,
    SanitizerPart,
    Settings,
)
from tests.gpu_report.test_sanitizer import CLEAN as CLEAN_LOG
from tests.gpu_report.test_sanitizer import HAZARD, OUT_OF_BOUNDS

ROWS = named(kernels(Target.HOST), "*")
GROUPED = next(row for row in ROWS if row.kv_groups > 1 and not row.is_split)
LAUNCHES = SanitizerPart(name="racecheck", check="launches", tool="racecheck", what="w", processes=0)
Result = dict[str, Any]


def result(**changed: Any) -> Result:
    return {
        "finished": True,
        "skipped": "",
        "numbers": {"kernels": len(ROWS)},
        "largest": {},
        "failures": [],
        **changed,
    }


def player(answer: Callable[[Job], tuple[int | None, Result | None, str]]) -> Callable[[Job, float], Ended]:
    """A runner: `answer` gives exit code, the result file's content, and the sanitizer's log."""

    def run(job: Job, seconds: float) -> Ended:
        status, content, log = answer(job)
        command = list(job.command)
        if content is not None and "--result" in command:
            Path(command[command.index("--result") + 1]).write_text(json.dumps(content))
        if "--log-file" in command:
            Path(command[command.index("--log-file") + 1]).write_text(log)
        return Ended(job, status, 0.0, 1.0, "the last words")

    return run


def outcomes_of(
    tmp_path: Path,
    parts: list[Part],
    answer: Callable[[Job], tuple[int | None, Result | None, str]],
    **more: Any,
) -> list[Outcome]:
    settings = Settings(folder=tmp_path, **more)
    return main_module.make(parts, settings, ROWS, budget=60, runner=player(answer))


def one(name: str) -> Part:
    return next(part for part in PARTS if part.name == name)


def test_a_clean_part(tmp_path: Path) -> None:
    (outcome,) = outcomes_of(tmp_path, [one("twins")], lambda job: (0, result(largest={"x": 0.5}), ""))
    assert outcome.verdict == CLEAN
    assert outcome.largest == {"x": 0.5}
    assert outcome.seeds == [0]


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (0, None),  # no result
        (1, result(failures=["a failure"], numbers={"kernels": len(ROWS), "failures": 1})),
        (-11, None),  # a fault
        (-11, result()),  # a fault after the result was written
        (0, result(numbers={"kernels": len(ROWS) - 1})),  # a kernel was left out
    ],
)
def test_whatever_is_wrong_is_not_clean(tmp_path: Path, status: int, content: Result | None) -> None:
    outcomes = outcomes_of(tmp_path, [one("canaries")], lambda job: (status, content, ""))
    assert [outcome.verdict for outcome in outcomes] == [FAILED]
    assert outcomes[0].failures
    assert not report.is_clean(outcomes)


def test_nothing_at_all_is_not_clean() -> None:
    assert not report.is_clean([])


def test_shards_are_summed_and_all_are_needed(tmp_path: Path) -> None:
    def answer(job: Job) -> tuple[int, Result | None, str]:
        if job.name == "2/3":
            return 0, None, ""
        return 0, result(numbers={"kernels": len(ROWS) // 2}, largest={"x": float(job.name[0])}), ""

    (outcome,) = outcomes_of(tmp_path, [one("canaries")], answer, workers=4)
    assert outcome.verdict == FAILED
    assert outcome.numbers == {"kernels": 2 * (len(ROWS) // 2)}
    assert outcome.largest == {"x": 3.0}
    assert outcome.failures == ["process 2/3: exit code 0; its last words: the last words"]


def test_a_skipped_part_says_why(tmp_path: Path) -> None:
    (outcome,) = outcomes_of(tmp_path, [one("devices")], lambda job: (0, result(skipped="one GPU only"), ""))
    assert outcome.verdict == SKIPPED
    assert outcome.notes == ["one GPU only"]


def logs(own: str, *, planted: str = OUT_OF_BOUNDS, good: str = CLEAN_LOG) -> Callable[[Job], Any]:
    def answer(job: Job) -> tuple[int, Result, str]:
        text = {"planted racecheck": planted, "planted good": good}.get(job.name, own)
        return 0, result(), text

    return answer


@pytest.fixture
def _sanitizer_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: "/bin/cs")


@pytest.mark.usefixtures("_sanitizer_is_there")
@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (logs(CLEAN_LOG), CLEAN),
        (logs(HAZARD), FAILED),
        (logs(CLEAN_LOG, planted=CLEAN_LOG), FAILED),  # the tool sees nothing
        (logs(CLEAN_LOG, good=OUT_OF_BOUNDS), FAILED),  # or sees what is not there
        (logs(""), FAILED),
    ],
)
def test_sanitizers(tmp_path: Path, answer: Callable[[Job], Any], verdict: str) -> None:
    (outcome,) = outcomes_of(tmp_path, [LAUNCHES], answer)
    assert outcome.verdict == verdict, outcome.failures


def test_a_missing_sanitizer_is_not_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitizer, "find", lambda: None)
    (outcome,) = outcomes_of(tmp_path, [LAUNCHES], lambda job: (0, result(), ""))
    assert outcome.verdict == FAILED
    assert "COMPUTE_SANITIZER" in outcome.failures[0]


def test_the_soak_is_split_and_each_process_has_a_seed(tmp_path: Path) -> None:
    jobs = one("soak").jobs(Settings(folder=tmp_path, workers=4, soak=10, seed=7))
    examples = [job.command[list(job.command).index("--examples") + 1] for job in jobs]
    seeds = [job.command[list(job.command).index("--seed") + 1] for job in jobs]
    assert examples == ["4", "3", "3"]
    assert seeds == ["7", "8", "9"]


def test_the_budget_ends_what_runs_and_starts_nothing_more() -> None:
    jobs = [Job("p", str(i), [sys.executable, "-c", "import time; time.sleep(60)"], 100) for i in range(3)]
    ended = run_all(jobs, workers=1, budget=1)
    assert [end.status for end in ended] == [None, None, None]
    assert ended[0].cut_off.startswith("ended after")
    assert {end.cut_off for end in ended[1:]} == {"not started: the budget was spent"}


def test_a_process_ends_with_its_children_and_keeps_its_last_words(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; print('hello', flush=True); "
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    )
    ended = run_process(Job("p", "n", [sys.executable, "-c", code], 5), 5)
    assert ended.status is None
    assert ended.output == "hello\n"
    assert ended.end - ended.start < 30


def test_an_environment_is_added() -> None:
    code = (
        "import os, time; left = float(os.environ['SDPA_REPORT_DEADLINE']) - time.monotonic(); "
        "print(os.environ['SDPA_X'], 'PATH' in os.environ, 0 < left < 16)"
    )
    ended = run_process(Job("p", "n", [sys.executable, "-c", code], 20, {"SDPA_X": "1"}), 20)
    assert (ended.status, ended.output) == (0, "1 True True\n")


def test_a_soak_that_runs_out_of_time_keeps_what_it_found(tmp_path: Path) -> None:
    settings = Settings(folder=tmp_path, device="cpu", soak=100_000, kernels=GROUPED.name)
    (outcome,) = main_module.make([one("soak")], settings, ROWS, budget=30)
    assert outcome.verdict == FAILED
    assert outcome.numbers["problems"] > 0
    assert "of 100000 problems were tried" in outcome.failures[0]


def test_names_of_parts() -> None:
    assert [part.name for part in main_module.chosen("twins,canaries", "cpu")] == ["canaries", "twins"]
    assert not any(part.needs_gpu for part in main_module.chosen(None, "cpu"))
    assert main_module.chosen(None, "cuda") == list(PARTS)
    with pytest.raises(ValueError, match="allowed: load, memcheck"):
        main_module.chosen("twin", "cpu")
    with pytest.raises(ValueError, match="needs a GPU"):
        main_module.chosen("graphs", "cpu")


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in (
        (["--soak", "0"], "--soak is 0"),
        (["--out", "report.txt"], "ends in .json"),
    ):
        with pytest.raises(SystemExit):
            main_module.parse(options)
        assert message in capsys.readouterr().err
    assert main_module.main(["--device", "cpu", "--kernels", "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


def test_quantised_kernels_alone_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--only", "soak-quantised", "--soak", "2", "--workers", "1"]
    assert main_module.main([*options, "--kernels", "fmha_fwd_q8*_int8"]) == 0
    assert "kernels fmha_fwd_q8*_int8" in capsys.readouterr().out


def test_json_and_markdown_hold_everything() -> None:
    found = library_for(torch.empty(0))[0]
    facts = report.machine("cpu", found, ROWS)
    outcomes = [
        Outcome("twins", "both", CLEAN, 12.4, {"launches": 7}, {"share": 0.25}, [0, 1, 2]),
        Outcome("racecheck", "races", CLEAN, notes=["what to know"]),
        Outcome("soak", "random", FAILED, largest={"error": math.nan}, failures=["what broke"]),
    ]
    content = json.loads(report.to_json(facts, {"seed": 0}, outcomes))
    assert content["clean"] is False
    assert [part["verdict"] for part in content["parts"]] == [CLEAN, CLEAN, FAILED]
    assert content["parts"][2]["largest"] == {"error": "nan"}
    assert content["machine"]["library"]["digest"] == found.build.digest
    text = report.to_markdown(facts, {"seed": 0}, outcomes)
    assert text.startswith("# Report: NOT CLEAN\n")
    assert "| **twins**: both | clean | 7 launches, share 0.25 | 0–2 | 12 |" in text
    assert "- what to know" in text
    assert "what broke" in text
    assert json.loads(report.to_json(facts, {}, outcomes[:2]))["clean"] is True


def test_a_gpu_report_says_on_what(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library_for(torch.empty(0))[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DriverError, match="finds no GPU"):
        report.machine("cuda", found, ROWS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(report, "gpu_state", lambda: {"driver": "580.1"})
    text = report.to_markdown(report.machine("cuda", found, ROWS), {}, [])
    assert "GPU 0, GPU 1, driver 580.1, torch" in text


def test_every_kernel_has_its_row(tmp_path: Path) -> None:
    """The rows that a part is measured by are those of the registry."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(isinstance(row, KernelInfo) for row in ROWS)
