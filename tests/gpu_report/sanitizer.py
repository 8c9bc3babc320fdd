"""compute-sanitizer: its command lines, and what its logs say.

A log is clean only when its summary says zero errors.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
_OPTIONS = {
    "memcheck": ["--padding", "512", "--track-stream-ordered-races", "all"],
    "racecheck": ["--racecheck-report", "hazard"],
    "synccheck": [],
    "initcheck": [],
}
_LINE = re.compile(r"^=========(.*)$")
_SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazards? displayed)")
_START = re.compile(
    r"^ (?:Error|ERROR|Warning|WARNING|Invalid|Uninitialized|Barrier error|Program hit|Race reported|"
    r"Target application|Internal|Unused memory|Misaligned)"
)


def find() -> str | None:
    """The path of compute-sanitizer, or None."""
    places = [os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")]
    places += [f"{root}/bin/compute-sanitizer" for root in ("/usr/local/cuda", "/opt/cuda")]
    return next((place for place in places if place and Path(place).is_file()), None)


def command(program: str, tool: str, log: Path, target: list[str]) -> list[str]:
    """`target` under `tool`; every report goes to `log`, and errors do not change the exit code.

    It may take a while to start where many processes do.
    """
    return [
        program, "--tool", tool, *_OPTIONS[tool], "--print-limit", "100000", "--launch-timeout", "120",
        "--target-processes", "application-only",
        "--log-file", str(log), *target,
    ]  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One report of a log."""

    text: str


@dataclass
class Log:
    """What one log says. `errors` is None when it has no summary: then the tool did not finish."""

    records: list[Record] = field(default_factory=list)
    errors: int | None = None


def parse(text: str) -> Log:
    """Understands the plain text that compute-sanitizer writes to --log-file or stdout."""
    log = Log()
    block: list[str] = []

    def close() -> None:
        if block:
            log.records.append(Record("\n".join(block)))
            block.clear()

    for line in text.splitlines():
        matched = _LINE.match(line)
        if matched is None:
            continue
        content = matched[1]
        if summary := _SUMMARY.search(content):
            close()
            log.errors = (log.errors or 0) + int(summary[1] or summary[2])
        elif _START.match(content):
            close()
            block.append(content.strip())
        elif not content.strip():
            close()
        elif block:
            block.append(content.strip())
    close()
    return log


@dataclass
class Judged:
    """The logs of one tool, judged."""

    failures: list[str] = field(default_factory=list)
    errors: int = 0


def judge(logs: Mapping[str, str]) -> Judged:
    """`logs` are {where it ran: text}. Every report is a failure, and so is an error without one."""
    judged = Judged()
    for where, text in logs.items():
        log = parse(text)
        if log.errors is None:
            judged.failures.append(f"{where}: the log has no summary: {text.strip()[-300:]!r}")
            continue
        judged.errors += log.errors
        judged.failures += [f"{where}: {record.text}" for record in log.records]
        if log.errors and not log.records:
            judged.failures.append(f"{where}: {log.errors} errors without a report: {text.strip()[-300:]!r}")
    return judged
