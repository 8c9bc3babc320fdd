"""compute-sanitizer: its command lines, and what its logs say.

A log is clean only when its summary says zero errors. What is reported may be excused by a `KnownHazard`,
which names kernels, kind and the very words of shared memory; an excused report is listed, never dropped.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sdpa_cutlass.registry import KernelInfo
from tests.gpu_report.problems import NUM_SPLITS

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
_HAZARD = re.compile(
    r"Potential (?P<kind>RAW|WAR|WAW) hazard detected at (?:__shared__|shared) (?P<word>0x[0-9a-fA-F]+)"
)
_KERNEL = re.compile(r"\b((?:fmha_fwd|unfused)_sm\d+\w*)")
_RESERVED = (0, 1024)  # from sm_80 on, the first KiB of a CTA's shared memory is the system's


def find() -> str | None:
    """The path of compute-sanitizer, or None."""
    places = [os.environ.get("COMPUTE_SANITIZER"), shutil.which("compute-sanitizer")]
    places += [f"{root}/bin/compute-sanitizer" for root in ("/usr/local/cuda", "/opt/cuda")]
    return next((place for place in places if place and Path(place).is_file()), None)


def command(program: str, tool: str, log: Path, target: list[str]) -> list[str]:
    """`target` under `tool`; every report goes to `log`, and errors do not change the exit code."""
    return [
        program, "--tool", tool, *_OPTIONS[tool], "--print-limit", "100000", "--target-processes",
        "application-only",
        "--log-file", str(log), *target,
    ]  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One report of a log."""

    text: str

    @property
    def kernel(self) -> str | None:
        found = _KERNEL.search(self.text)
        return found[1] if found else None

    @property
    def hazard(self) -> tuple[str, int] | None:
        """(RAW, WAR or WAW, address in shared memory) of racecheck's reports."""
        found = _HAZARD.search(self.text)
        return (found["kind"], int(found["word"], 16)) if found else None


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


@dataclass(frozen=True)
class KnownHazard:
    """A report that is documented and understood as far as `why` says."""

    name: str
    tool: str
    kind: str
    why: str

    def words(self, row: KernelInfo) -> list[range]:
        """The bytes of shared memory that it is about; none in a kernel that it is not about."""
        raise NotImplementedError

    def excuses(self, tool: str, record: Record, rows: Mapping[str, KernelInfo]) -> bool:
        hazard, row = record.hazard, rows.get(record.kernel or "")
        if tool != self.tool or hazard is None or row is None or hazard[0] != self.kind:
            return False
        return any(hazard[1] in words for words in self.words(row))


class MergeStatistics(KnownHazard):
    """row_max and row_sum of every KV group, in merge_tile of epilogue.cuh (map: kernel_traits.cuh)."""

    def words(self, row: KernelInfo) -> list[range]:
        if row.kv_groups == 1:
            return []
        group_bytes = row.smem_bytes // row.kv_groups
        starts = [g * group_bytes + 4 * row.block_m * (row.head_dim + 8) for g in range(row.kv_groups)]
        return [
            range(reserved + start, reserved + start + 8 * row.block_m)
            for reserved in _RESERVED
            for start in starts
        ]


class SplitMeeting(KnownHazard):
    """The flag of the last CTA, then the statistics of all splits, from byte 0 on (split.cuh)."""

    def words(self, row: KernelInfo) -> list[range]:
        if not row.is_split:
            return []
        return [range(reserved, reserved + 8 * row.block_m * NUM_SPLITS) for reserved in _RESERVED]


class RowPadding(KnownHazard):
    """What the piped baseline's softmax reads behind the end of a row of logits."""

    def words(self, row: KernelInfo) -> list[range]:
        return []

    def excuses(self, tool: str, record: Record, rows: Mapping[str, KernelInfo]) -> bool:
        read = "Uninitialized __global__ memory read" in record.text
        return tool == self.tool and read and "sdpa::unfused::unfused_softmax<" in record.text


KNOWN: tuple[KnownHazard, ...] = (
    SplitMeeting(
        name="split flag and statistics",
        tool="racecheck",
        kind="RAW",
        why=(
            "split kernels: the flag is stored by thread 0, the statistics by as many threads as there are "
            "rows and splits, both before a __syncthreads and loaded after it. Like row_max and row_sum "
            "they are stored by a part of a warp. Results repeat bit for bit; taking out either barrier "
            "fails tests on the host."
        ),
    ),
    RowPadding(
        name="padding of the piped baseline's logits",
        tool="initcheck",
        kind="uninitialised read",
        why=(
            "the softmax of the piped baseline reads rows of the workspace 16 bytes at a time, past the last "
            "column, and discards what lies there. The part `canaries` starts the workspace as NaNs, which "
            "would show in the results."
        ),
    ),
    MergeStatistics(
        name="merge_tile statistics",
        tool="racecheck",
        kind="RAW",
        why=(
            "kernels with KV groups: row_max and row_sum, stored by one lane of four before __syncthreads "
            "and loaded by all lanes after it. In the machine code the stores are predicated (@!P0 STS), "
            "every thread then meets BAR.SYNC 0, and the loads follow it, so no order of the warps makes a "
            "load precede its store. Results repeat bit for bit."
        ),
    ),
)


@dataclass
class Judged:
    """The logs of one tool, judged."""

    failures: list[str] = field(default_factory=list)
    excused: dict[str, int] = field(default_factory=dict)  # name of the exception → reports
    excused_kernels: dict[str, set[str]] = field(default_factory=dict)
    errors: int = 0


def judge(tool: str, logs: Mapping[str, str], rows: Mapping[str, KernelInfo]) -> Judged:
    """`logs` are {where it ran: text}. A count that the reports do not explain is a failure."""
    judged = Judged()
    for where, text in logs.items():
        log = parse(text)
        if log.errors is None:
            judged.failures.append(f"{where}: the log has no summary: {text.strip()[-300:]!r}")
            continue
        judged.errors += log.errors
        excused = 0
        for record in log.records:
            known = next((known for known in KNOWN if known.excuses(tool, record, rows)), None)
            if known is None:
                judged.failures.append(f"{where}: {record.text}")
                continue
            excused += 1
            judged.excused[known.name] = judged.excused.get(known.name, 0) + 1
            judged.excused_kernels.setdefault(known.name, set()).add(record.kernel or "")
        if log.errors and excused == len(log.records) and log.errors != excused:
            judged.failures.append(
                f"{where}: the summary counts {log.errors} errors, the log holds {excused} reports"
            )
        if log.errors and not log.records:
            judged.failures.append(f"{where}: {log.errors} errors without a report: {text.strip()[-300:]!r}")
    return judged
