"""compute-sanitizer's logs: what counts as clean."""

from __future__ import annotations

from pathlib import Path

from tests.gpu_report import sanitizer

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
OUT_OF_BOUNDS = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at planted+0x90
=========     by thread (63,0,0) in block (0,0,0)
=========     Access to 0x7f1c00000100 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1c00000000 of size 256 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========     Host Frame: main [0x1234]
=========
========= ERROR SUMMARY: 1 error
"""


HAZARD = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x400 in block (0,0,0) :
=========     Write Thread (0,0,0) at planted+0x87d0
=========     Read Thread (64,0,0) at planted+0x8a70
=========     Current Value : 0
=========
========= RACECHECK SUMMARY: 1 hazards displayed (1 errors, 0 warnings)
"""


def test_a_clean_log() -> None:
    assert sanitizer.parse(CLEAN) == sanitizer.Log(records=[], errors=0)


def test_a_report_is_read_whole() -> None:
    log = sanitizer.parse(OUT_OF_BOUNDS)
    assert log.errors == 1
    assert len(log.records) == 1
    assert "by thread (63,0,0)" in log.records[0].text


def test_a_log_that_ends_early_is_a_failure() -> None:
    for text in ("", "========= COMPUTE-SANITIZER\n", "Device not supported"):
        assert sanitizer.judge({"here": text}).failures


def test_an_error_is_a_failure_and_shows_its_report() -> None:
    judged = sanitizer.judge({"one": CLEAN, "two": OUT_OF_BOUNDS, "three": HAZARD})
    assert judged.errors == 2
    assert [failure.splitlines()[0] for failure in judged.failures] == [
        "two: Invalid __global__ write of size 4 bytes",
        "three: Error: Potential RAW hazard detected at __shared__ 0x400 in block (0,0,0) :",
    ]


def test_an_error_without_a_report_is_a_failure() -> None:
    judged = sanitizer.judge({"here": CLEAN.replace("0 errors", "2 errors")})
    assert judged.failures


def test_the_command_line_names_tool_and_log(tmp_path: Path) -> None:
    command = sanitizer.command("/bin/cs", "racecheck", tmp_path / "log", ["python", "-c", "1"])
    assert command[:3] == ["/bin/cs", "--tool", "racecheck"]
    assert command[command.index("--racecheck-report") + 1] == "hazard"
    assert command[command.index("--log-file") + 1] == str(tmp_path / "log")
    assert command[-3:] == ["python", "-c", "1"]
