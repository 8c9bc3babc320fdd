"""What a check in a child process is given, and how it reports back.

    @check
    def canaries(context): ...      `python -m tests.gpu_report.child canaries --result FILE` runs it

A check counts what it does in `context.numbers`, calls `context.fail` for every defect, and looks at
`context.time_is_up` where it can stop early. What it raises is a failure too.
"""

from __future__ import annotations

import fnmatch
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, KernelInfo, Op, read_kernels

_ROOT = Path(__file__).parents[2]
MOST_FAILURES = 20  # with their text; more are only counted


def named(rows: Sequence[KernelInfo], glob: str) -> list[KernelInfo]:
    """The rows of attention whose name matches, but quantised ones, whose errors have their own rule."""
    usual = [row for row in rows if row.op is Op.FORWARD and not is_quantised(row)]
    return [row for row in usual if fnmatch.fnmatchcase(row.name, glob)]


def is_quantised(row: KernelInfo) -> bool:
    """Whether it multiplies bytes."""
    return row.accuracy in (Accuracy.INT8_QK, Accuracy.INT8)


@dataclass
class Context:
    """One child process: where it runs, which part of the work is its own, and what it found."""

    device: str  # "cuda" or "cpu"
    shard: int = 0
    shards: int = 1
    seconds: float = 1e9
    seed: int = 0
    examples: int = 0
    kernels: str = "*"
    numbers: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    progress: str = ""  # what is running, for the failure that an exception becomes
    _start: float = field(default_factory=time.monotonic)

    def fail(self, message: str) -> None:
        """Notes a defect. Paths of tracebacks begin at the root of the repository: reports are published."""
        self.numbers["failures"] += 1
        if len(self.failures) < MOST_FAILURES:
            self.failures.append(message.replace(f"{_ROOT}/", ""))

    def at(self, what: str) -> None:
        """Says what runs next: the last line of a process that a fault ends."""
        self.progress = what
        print(what, file=sys.stderr, flush=True)

    def keep_largest(self, name: str, value: float) -> None:
        """Remembers the largest value of `name`; NaN counts as the largest of all."""
        if not value <= self.largest.get(name, float("-inf")):
            self.largest[name] = value

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() - self._start > self.seconds

    @property
    def library(self) -> Library:
        return library(Target.CUDA if self.device == "cuda" else Target.HOST)

    def rows(self) -> list[KernelInfo]:
        """This shard's kernels. Neighbours in the registry share a unit, which is loaded as a whole."""
        rows = named(read_kernels(self.library), self.kernels)
        first, end = (len(rows) * part // self.shards for part in (self.shard, self.shard + 1))
        return rows[first:end]

    def each_row(self) -> Iterator[KernelInfo]:
        """The kernels of the shard, counted; those for which no time is left are a failure."""
        for row in self.rows():
            if self.time_is_up:
                self.fail(f"not checked, the time was up: {row.name}")
                continue
            yield row
            self.numbers["kernels"] += 1


Check = Callable[[Context], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Makes `function` a check under its own name, with dashes for underscores."""
    CHECKS[function.__name__.replace("_", "-")] = function
    return function
