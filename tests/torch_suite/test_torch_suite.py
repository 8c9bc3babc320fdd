"""The machinery of `make torch-suite`, on a made-up file: outcomes, crashes, differences, going on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.torch_suite import __main__ as suite
from tests.torch_suite.records import Mode, Outcome, Records, differences, read

SUITE = """
import os, time, unittest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

Q = torch.zeros(1, 1, 8, 64, dtype=torch.float16)

class TestSDPACPU(unittest.TestCase):
    def test_served(self):
        attention(Q, Q, Q)

    def test_left_to_torch(self):
        attention(Q.float(), Q.float(), Q.float())
        attention(*[torch.zeros(1, 1, 1024, 64).half()] * 3)

    def test_fails_always(self):
        raise ValueError("as before")

    def test_skipped(self):
        self.skipTest("not here")

    def test_too_slow(self):
        time.sleep(30)

    def test_wants_torchs_own(self):
        assert attention.__module__ != "sdpa_cutlass.integrations.torch_sdpa"

    def test_ends_the_process(self):
        if attention.__module__ == "sdpa_cutlass.integrations.torch_sdpa":
            os._exit(7)
"""


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and report of SUITE."""
    file = tmp_path / suite.NAME
    file.write_text(SUITE)
    status = suite.main(
        [str(file), "--device", "cpu", "--timeout", "3", "--out", str(tmp_path / "out"), *arguments]
    )
    return status, json.loads((tmp_path / "out" / "report.json").read_text())


def test_what_fails_only_with_the_library_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In two runs: the first is cut off behind its first test, the second goes on, in two processes."""
    status, report = run(tmp_path, "--limit", "0")
    assert (status, report["finished"], report["modes"]["plain"]["tests"]) == (1, False, 1)

    monkeypatch.setitem(suite.EXPLAINED, Mode.ENABLED, {"TestSDPACPU::test_ends*": "it asks for that"})
    status, report = run(tmp_path, "--jobs", "2")
    assert (status, report["finished"]) == (1, True)
    found = {(d["test"], d["plain"], d["found"], d["reason"]) for d in report["differences"]}
    assert found == {
        ("TestSDPACPU::test_wants_torchs_own", "passed", "failed", None),
        ("TestSDPACPU::test_ends_the_process", "passed", "crashed", "it asks for that"),
    }
    plain, enabled = report["modes"]["plain"], report["modes"]["enabled"]
    assert plain["outcomes"] == {"passed": 4, "failed": 1, "skipped": 1, "timeout": 1}
    assert enabled["outcomes"] == {"passed": 2, "failed": 2, "skipped": 1, "timeout": 1, "crashed": 1}
    assert (plain["calls_served"], enabled["calls_served"], enabled["tests_with_served_calls"]) == (0, 1, 1)
    assert enabled["calls_left_to_torch"] == {"dtype torch.float32": 1, "UnsupportedError": 1}
    assert report["left_out"] == ["the swap point: it needs CUDA and torch 2.11"]
    assert "test_wants_torchs_own: failed: NO REASON" in capsys.readouterr().out
    files = sorted((tmp_path / "out").glob("plain*.jsonl"))
    assert [file.name for file in files] == ["plain-1.jsonl", "plain.jsonl"]
    lines = [line for file in files for line in file.read_text().splitlines()]
    again = 2
    assert sum('"started"' in line for line in lines) == 7 + again


def test_the_suite_is_found_and_has_to_be_torchs_version(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no file; wanted is test_transformers.py of torch 2.13.0"):
        suite.find_suite(tmp_path, "2.13.0")
    (tmp_path / "test").mkdir()
    file = tmp_path / "test" / suite.NAME
    file.touch()
    assert suite.find_suite(tmp_path, "2.13.0") == suite.find_suite(file, "2.13.0") == file
    (tmp_path / "version.txt").write_text("2.12.0a0\n")
    with pytest.raises(ValueError, match=r"is the source of torch 2.12.0a0; installed is 2.13.0"):
        suite.find_suite(tmp_path, "2.13.0+cpu")
    assert suite.main([str(tmp_path / "missing")]) == 2


def test_what_counts_as_worse() -> None:
    outcomes = ("passed", "skipped", "xfailed", "failed", "timeout")
    pairs = {(a, b) for a in outcomes for b in outcomes}
    plain = Records({f"{a}-{b}": Outcome(a) for a, b in pairs})
    found = Records({f"{a}-{b}": Outcome(b) for a, b in pairs})
    worse = {d.test for d in differences(plain, found, Mode.ENABLED, {})}
    assert worse == {
        "passed-skipped", "passed-xfailed", "passed-failed", "passed-timeout", "skipped-failed",
        "skipped-timeout", "xfailed-passed", "xfailed-skipped", "xfailed-failed", "xfailed-timeout",
    }  # fmt: skip


def test_of_two_runs_the_second_counts(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    line = {"test": "a", "message": "", "served": 0, "seconds": 0.0}
    file.write_text("".join(json.dumps({**line, "outcome": o}) + "\n" for o in ("failed", "passed")))
    assert read(file).outcomes["a"].outcome == "passed"
    assert read(tmp_path / "none").outcomes == {}
