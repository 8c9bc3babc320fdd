"""Commands in processes of their own, a few at a time, each with a time limit, all within one budget."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

_KEPT = 4000  # characters of a command's output
DEADLINE = "SDPA_REPORT_DEADLINE"
"""Environment variable: when a command had better stop by itself and keep its result, by time.monotonic()."""


@dataclass(frozen=True)
class Job:
    """One command. `seconds` is its own limit; `environment` is added to this process's."""

    part: str
    name: str
    command: Sequence[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How a job ended: `status` is its exit code, or None with the reason in `cut_off`."""

    job: Job
    status: int | None
    start: float
    end: float
    output: str = ""
    cut_off: str = ""


Runner = Callable[[Job, float], Ended]


def run_process(job: Job, seconds: float) -> Ended:
    """Runs the command in a process group of its own and ends that when `seconds` have passed."""
    start = time.monotonic()
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            list(job.command),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **job.environment, DEADLINE: str(start + seconds - max(5.0, 0.05 * seconds))},
            start_new_session=True,
        )
        cut_off = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            cut_off = f"ended after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT))
        output = file.read().decode(errors="replace")
    status = None if cut_off else process.returncode
    return Ended(job, status, start, time.monotonic(), output, cut_off)


def run_all(
    jobs: Sequence[Job],
    *,
    workers: int,
    budget: float,
    runner: Runner = run_process,
    say: Callable[[str], None] = lambda line: None,
) -> list[Ended]:
    """Runs the jobs in order, `workers` at a time, within `budget` seconds from now. None is left out:
    those that could not start, or were cut off by the budget, say so.
    """
    deadline = time.monotonic() + budget
    lock = threading.Lock()

    def work(job: Job) -> Ended:
        left = deadline - time.monotonic()
        if left <= 0:
            now = time.monotonic()
            return Ended(job, None, now, now, cut_off="not started: the budget was spent")
        ended = runner(job, min(job.seconds, left))
        with lock:
            outcome = ended.cut_off or f"exit code {ended.status}"
            say(f"{ended.end - ended.start:6.1f} s  {job.part} {job.name}: {outcome}")
        return ended

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(work, jobs))


def log_text(path: Path) -> str:
    """The text of a log, empty when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
