"""The parts of the report: what each does, its processes, and what their results come to."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sdpa_cutlass.library.registry import KernelInfo
from tests.gpu_report import planted, sanitizer
from tests.gpu_report.jobs import Ended, Job, log_text

CLEAN, SKIPPED, FAILED = "clean", "skipped", "FAILED"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How one run of the report is made."""

    device: str = "cuda"
    workers: int = 1
    seed: int = 0
    soak: int = 500
    repeats: int = 0  # 0: the check's own number
    kernels: str = "*"  # those whose name matches
    folder: Path  # for results and logs, while the report is made

    @property
    def shards(self) -> int:
        """Into how many processes a part over all kernels is split."""
        return max(1, self.workers * 3 // 4)


@dataclass
class Outcome:
    """One part's result, as it is written into the report."""

    name: str
    what: str
    verdict: str
    seconds: float = 0.0
    numbers: dict[str, int] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Part:
    """One check of the report, split over `processes` (0: as many as Settings.shards)."""

    name: str
    what: str
    check: str
    seconds: float = 240.0  # limit of each process
    processes: int = 1
    needs_gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    repeats: bool = False  # takes Settings.repeats
    is_soak: bool = False

    def jobs(self, settings: Settings) -> list[Job]:
        count = self.processes or settings.shards
        return [self._job(settings, index, count) for index in range(count)]

    def _job(self, settings: Settings, index: int, count: int) -> Job:
        shard = "0/1" if self.is_soak else f"{index}/{count}"
        examples = settings.repeats if self.repeats else 0
        if self.is_soak:
            examples = settings.soak // count + (index < settings.soak % count)
        command = [
            sys.executable, "-m", "tests.gpu_report.child", self.check, "--device", settings.device,
            "--shard", shard, "--seed", str(settings.seed + index),
            "--examples", str(examples), "--kernels", settings.kernels,
            "--result", str(self._result(settings, index)),
        ]  # fmt: skip
        return Job(self.name, f"{index + 1}/{count}", command, self.seconds, dict(self.environment))

    def _result(self, settings: Settings, index: int) -> Path:
        return settings.folder / f"{self.name}-{index}.json"

    def outcome(self, settings: Settings, ended: Sequence[Ended], rows: Mapping[str, KernelInfo]) -> Outcome:
        """Puts the processes' results together; a process without a result is a failure."""
        outcome = Outcome(self.name, self.what, CLEAN, seconds=_seconds(ended))
        numbers: Counter[str] = Counter()
        for index, end in enumerate(ended):
            where = f"process {end.job.name}"
            result = _read(self._result(settings, index))
            if result is None:
                outcome.failures.append(f"{where}: {_how(end)}")
                continue
            if end.status != 0 and not result["failures"]:
                outcome.failures.append(f"{where}: {_how(end)}")
            numbers.update(result["numbers"])
            for name, value in result["largest"].items():
                if not value <= outcome.largest.get(name, float("-inf")):
                    outcome.largest[name] = value
            outcome.failures += [f"{where}: {failure}" for failure in result["failures"]]
            if result["skipped"]:
                outcome.notes.append(result["skipped"])
        failed = numbers.pop("failures", 0)
        if failed > len(outcome.failures):
            outcome.notes.append(f"{failed} failures in all")
        outcome.numbers = dict(numbers)
        outcome.seeds = [settings.seed + index for index in range(len(ended))]
        if outcome.failures:
            outcome.verdict = FAILED
        elif outcome.notes:
            outcome.verdict = SKIPPED
        self._every_kernel(outcome, rows)
        return outcome

    def _every_kernel(self, outcome: Outcome, rows: Mapping[str, KernelInfo]) -> None:
        """A part over all kernels that met fewer is not clean."""
        if self.processes or self.is_soak or outcome.verdict == FAILED:
            return
        met = outcome.numbers.get("kernels", 0) + outcome.numbers.get("kernels without a twin", 0)
        if met < len(rows):
            outcome.verdict = FAILED
            outcome.failures.append(f"{met} of {len(rows)} kernels were checked")


@dataclass(frozen=True, kw_only=True)
class SanitizerPart(Part):
    """The launches of `check` under one tool of compute-sanitizer, its own planted defect first."""

    tool: str = ""

    def jobs(self, settings: Settings) -> list[Job]:
        program = sanitizer.find()
        if program is None:
            return []
        jobs = []
        for name in self._planted_names:
            target = [sys.executable, "-m", "tests.gpu_report.planted", name]
            command = sanitizer.command(program, self.tool, self._log(settings, name), target)
            jobs.append(Job(self.name, f"planted {name}", command, self.seconds))
        for index, job in enumerate(super().jobs(settings)):
            command = sanitizer.command(
                program, self.tool, self._log(settings, str(index)), list(job.command)
            )
            jobs.append(Job(self.name, job.name, command, self.seconds))
        return jobs

    def _log(self, settings: Settings, name: str) -> Path:
        return settings.folder / f"{self.name}-{name}.log"

    def outcome(self, settings: Settings, ended: Sequence[Ended], rows: Mapping[str, KernelInfo]) -> Outcome:
        if not ended:
            missing = "compute-sanitizer was not found: put it on PATH or set COMPUTE_SANITIZER"
            return Outcome(self.name, self.what, FAILED, failures=[missing])
        shards = ended[len(self._planted_names) :]
        outcome = super().outcome(settings, shards, rows)
        outcome.seconds = _seconds(ended)
        logs = {
            f"process {end.job.name}": log_text(self._log(settings, str(i))) for i, end in enumerate(shards)
        }
        judged = sanitizer.judge(logs)
        outcome.failures += judged.failures + self._planted(settings)
        outcome.numbers["reports"] = judged.errors
        if outcome.failures:
            outcome.verdict = FAILED
        return outcome

    @property
    def _planted_names(self) -> tuple[str, str]:
        return (self.tool, "good")

    def _planted_log(self, settings: Settings, name: str) -> sanitizer.Log:
        return sanitizer.parse(log_text(self._log(settings, name)))

    def _planted(self, settings: Settings) -> list[str]:
        """The tool must report its planted defect, and nothing in a good kernel."""
        bad = self._planted_log(settings, self.tool)
        good = self._planted_log(settings, "good")
        found = []
        if not bad.errors:
            found.append(f"the planted defect `{planted.SOURCES[self.tool]}` was not reported")
        if good.errors != 0:
            found.append(f"a kernel without a defect gave {good.errors} errors")
        return found


def _seconds(ended: Sequence[Ended]) -> float:
    """From the first start to the last end."""
    return max((end.end for end in ended), default=0.0) - min((end.start for end in ended), default=0.0)


def _how(ended: Ended) -> str:
    reason = ended.cut_off or f"exit code {ended.status}"
    return f"{reason}; its last words: {ended.output.strip()[-1500:] or 'none'}"


def _read(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


_BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}
_GPU_PARTS = {
    "memcheck": "no access outside an allocation, none misaligned",
    "racecheck": "no two threads meet in shared memory without a barrier between them",
    "synccheck": "no barrier that some threads miss",
    "initcheck": "no read of device memory that nobody has written",
}

PARTS: tuple[Part, ...] = (
    Part(
        name="load", check="load", processes=0, needs_gpu=True,
        what="every kernel of the library loads on this GPU",
    ),
    *(
        SanitizerPart(
            name=tool, check="even-launches" if tool == "racecheck" else "launches", tool=tool, processes=0,
            needs_gpu=True, seconds=420.0,
            what=f"compute-sanitizer {tool}, every kernel at small odd sizes: {what}",
        )
        for tool, what in _GPU_PARTS.items()
    ),
    Part(
        name="canaries", check="canaries", processes=0,
        what="every option of every kernel: results within the numerics rule and complete (they start as "
        "NaN), 4 KiB in front of and behind each tensor and the workspace untouched, inputs unchanged",
    ),
    Part(
        name="guard-pages", check="guard-pages", processes=0,
        what="the same launches with each tensor ending, then beginning, at unmapped memory: no fault, the "
        "same bits",
    ),
    Part(
        name="twins", check="twins", processes=0,
        what="the GPU and the host library, or two tiles of the host library, on the same inputs: within the "
        "bound at the head of check_twins.py",
    ),
    Part(
        name="repeats", check="repeats", processes=0, repeats=True,
        what="every kernel, a small and a large problem, run after run into poisoned results: the same bits",
    ),
    Part(
        name="graphs", check="graphs", processes=0, needs_gpu=True,
        what="every kernel captured in a CUDA graph and replayed on new contents: the bits of a plain launch",
    ),
    Part(
        name="threads", check="threads",
        what="8 threads, on a GPU with 8 streams each, every kind of call: the bits of a call alone",
    ),
    Part(
        name="devices", check="devices", needs_gpu=True,
        what="the current device is restored after calls and errors; several devices give the same bits",
    ),
    Part(
        name="out-of-memory", check="out-of-memory", needs_gpu=True,
        what="an output and a workspace that do not fit: an error that says so, and the next call is right",
    ),
    Part(
        name="fault-of-another", check="fault-of-another", needs_gpu=True,
        what="another kernel's illegal access: our next launch is refused and names earlier work",
    ),
    Part(
        name="fault-of-ours", check="fault-of-ours", needs_gpu=True, environment=_BLOCKING,
        what="our own illegal access, launches blocking: the error names kernel and shape, nobody else",
    ),
    Part(
        name="fault-comes-late", check="fault-comes-late", needs_gpu=True,
        what="our own illegal access, launches not blocking: it surfaces at the next synchronisation",
    ),
    Part(
        name="soak", check="soak", processes=0, is_soak=True, seconds=3600.0,
        what="random problems for random kernels against float64",
    ),
    Part(
        name="soak-quantised", check="soak-quantised", processes=0, is_soak=True, seconds=3600.0,
        what="random problems for random quantised kernels, the worst head against their contract",
    ),
    Part(
        name="soak-gradients", check="soak-gradients", processes=0, is_soak=True, seconds=3600.0,
        what="random problems for random kernels of gradients against autograd in float64",
    ),
)  # fmt: skip


def as_json(outcome: Outcome) -> dict:
    return asdict(outcome)
