"""Builds random mutants, runs the tests on each, and judges.

A mutant is built into one group of kernels after the other until a test fails. Where the library comes out
the same to the byte, the mutant is not in these kernels, and no test runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.mutation.build import BuildError, Workshop
from tests.mutation.model import Kernels
from tests.mutation.probe import Failure, probe
from tests.mutation.random_defects import RandomMutant, kernels_of
from tests.mutation.suite import BaselineError


class Fate(Enum):
    """What became of a mutant. Only SURVIVED is bad."""

    CAUGHT = "caught"
    REFUSED = "refused by the compiler"
    SAME = "the same machine code"
    SURVIVED = "survived"


@dataclass(frozen=True, kw_only=True)
class RandomResult:
    """`failure` and `kernels` are set where a test failed."""

    mutant: RandomMutant
    fate: Fate
    seconds: float
    kernels: Kernels | None = None
    failure: Failure | None = None

    def __str__(self) -> str:
        text = f"{self.mutant}: {self.fate.value}"
        if self.failure is not None and self.kernels is not None:
            text += f" by {self.failure.check.value} in {self.kernels.name}, {self.failure.test}"
        return f"{text} ({self.seconds:.0f} s)"


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    library: bytes
    timeout_s: float  # for the tests of a mutant


class _Baselines:
    """The unchanged libraries, each built and tested when it is first asked for."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop
        self._lock = threading.Lock()
        self._known: dict[Kernels, _Baseline] = {}

    def of(self, kernels: Kernels) -> _Baseline:
        """Raises BaselineError when a test fails without a defect."""
        with self._lock:
            if kernels not in self._known:
                library = self._workshop.library(kernels, (), observed=False)
                content = library.read_bytes()
                started = time.monotonic()
                outcome = probe(library, kernels, observed=False)
                if outcome.failures:
                    first = outcome.failures[0]
                    raise BaselineError(f"{kernels.name} fails unchanged: {first.test}: {first.message}")
                self._workshop.discard(library)
                seconds = time.monotonic() - started
                self._known[kernels] = _Baseline(library=content, timeout_s=60 + 4 * seconds)
            return self._known[kernels]


def _run(workshop: Workshop, baselines: _Baselines, mutant: RandomMutant) -> RandomResult:
    started = time.monotonic()

    def result(fate: Fate, kernels: Kernels | None = None, failure: Failure | None = None) -> RandomResult:
        seconds = time.monotonic() - started
        return RandomResult(mutant=mutant, fate=fate, seconds=seconds, kernels=kernels, failure=failure)

    fate = Fate.SAME
    for kernels in kernels_of(mutant.header):
        baseline = baselines.of(kernels)
        try:
            library = workshop.library(kernels, (mutant.as_mutant(),), observed=False)
        except BuildError:
            return result(Fate.REFUSED)
        if library.read_bytes() != baseline.library:
            fate = Fate.SURVIVED
            outcome = probe(
                library, kernels, observed=False, stop_at_first=True, timeout_s=baseline.timeout_s
            )
            if outcome.failures:
                workshop.discard(library)
                return result(Fate.CAUGHT, kernels, outcome.failures[0])
        workshop.discard(library)
    return result(fate)


def run_random(
    mutants: Sequence[RandomMutant], folder: Path, jobs: int, done: Callable[[RandomResult], None]
) -> list[RandomResult]:
    """The results in the order of `mutants`; `done` hears of each as it comes. Raises BaselineError."""
    workshop = Workshop.open(folder)
    baselines = _Baselines(workshop)

    def run(mutant: RandomMutant) -> RandomResult:
        result = _run(workshop, baselines, mutant)
        done(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(run, mutants))
