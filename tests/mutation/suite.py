"""Builds mutants, runs the tests on each, and judges: caught, by which checks, or survived."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from tests.mutation.build import BuildError, Workshop
from tests.mutation.model import Check, Kernels, Mutant
from tests.mutation.probe import OUTSIDE_TESTS, Failure, Outcome, probe
from tests.mutation.switches import together


class Verdict(Enum):
    """What became of a mutant. Only CAUGHT is good."""

    CAUGHT = "caught"
    OTHERWISE = "caught otherwise"  # by other checks than the one that has to find it
    SURVIVED = "survived"
    STALE = "stale"  # the headers have changed: its old text is not there


@dataclass(frozen=True, kw_only=True)
class Result:
    """One mutant's fate; `failures` is empty unless it was caught."""

    mutant: Mutant
    verdict: Verdict
    failures: dict[Check, list[Failure]]
    note: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.mutant.name,
            "header": self.mutant.header,
            "defect": self.mutant.defect,
            "kernels": list(self.mutant.kernels.names),
            "by": self.mutant.by.value,
            "verdict": self.verdict.value,
            "note": self.note,
            "seconds": round(self.seconds, 1),
            "checks": {
                check.value: {"failures": len(found), "test": found[0].test, "message": found[0].message}
                for check, found in self.failures.items()
            },
        }


class BaselineError(RuntimeError):
    """The headers as they are fail: what the tests found says nothing of mutants."""


def run_baseline(workshop: Workshop, kernels: Kernels, *, observed: bool) -> Outcome:
    """Builds and tests the unchanged headers. Raises BuildError."""
    library = workshop.library(kernels, (), observed=observed)
    outcome = probe(library, kernels, observed=observed)
    workshop.discard(library)
    return outcome


def run_mutant(
    workshop: Workshop, mutant: Mutant, *, every_check: bool = False, lines: bool = False
) -> Result:
    """Builds and tests one. Never raises for what the defect does; RuntimeError when pytest cannot run.

    Tests end when the check that has to find the defect has found it, or, with `every_check`, when all have
    run. With `lines`, messages about races name source lines, which takes longer to compile.
    """
    started = time.monotonic()
    note = mutant.why_stale()
    if note is not None:
        return Result(mutant=mutant, verdict=Verdict.STALE, failures={}, note=note, seconds=0.0)
    try:
        library = workshop.library(mutant.kernels, (mutant,), observed=mutant.observed, lines=lines)
    except BuildError as error:
        message = _first_error(error)
        failures = {Check.COMPILER: [Failure(check=Check.COMPILER, test="g++", message=message)]}
        return _judged(mutant, failures, started)
    failures = _failures_on(library, mutant, every_check=every_check)
    workshop.discard(library)
    return _judged(mutant, failures, started)


def _failures_on(
    library: Path, mutant: Mutant, *, every_check: bool, switch: int = 0
) -> dict[Check, list[Failure]]:
    stop_at = None if every_check else mutant.by
    outcome = probe(library, mutant.kernels, observed=mutant.observed, stop_at=stop_at, switch=switch)
    return outcome.by_check()


def _judged(mutant: Mutant, failures: dict[Check, list[Failure]], started: float) -> Result:
    if not failures:
        verdict, note = Verdict.SURVIVED, "every test passed"
    elif mutant.by not in failures:
        verdict, note = Verdict.OTHERWISE, f"{mutant.by.value} did not find it"
    else:
        verdict, note = Verdict.CAUGHT, ""
    seconds = time.monotonic() - started
    return Result(mutant=mutant, verdict=verdict, failures=failures, note=note, seconds=seconds)


def _first_error(error: BuildError) -> str:
    lines = [line for line in str(error).splitlines() if "error" in line]
    return (lines or [str(error)])[0][-300:]


class _Run:
    """One run of many mutants: what they share, and the libraries that the last step asks once more."""

    def __init__(
        self, workshop: Workshop, done: Callable[[Result], None], *, every_check: bool, lines: bool
    ) -> None:
        self._workshop = workshop
        self._done = done
        self._every_check = every_check
        self._lines = lines
        self._switched: dict[tuple[Kernels, bool], Path] = {}

    def builds(self, mutants: Sequence[Mutant]) -> list[tuple[Mutant, ...]]:
        """What is built together, the longest first."""
        kinds: dict[tuple[Kernels, bool], list[Mutant]] = {}
        for mutant in mutants:
            kinds.setdefault((mutant.kernels, mutant.observed), []).append(mutant)
        found: list[tuple[Mutant, ...]] = []
        for of_kind in kinds.values():
            fit, alone = ([], of_kind) if self._lines else together(of_kind)
            found += [tuple(fit)] * bool(fit) + [(mutant,) for mutant in alone]
        return sorted(found, key=len, reverse=True)

    def results(self, mutants: tuple[Mutant, ...]) -> list[Result]:
        """Of what is built together. Raises BuildError if it cannot be."""
        first, *others = mutants
        if not others:
            result = run_mutant(self._workshop, first, every_check=self._every_check, lines=self._lines)
            self._done(result)
            return [result]
        try:
            library = self._workshop.library(first.kernels, mutants, observed=first.observed)
        except BuildError as error:
            raise BuildError(
                f"{first.kernels.name} with {len(mutants)} switches: mark what decides types or constants "
                f"`alone` (tests/mutation/model.py): {_first_error(error)}"
            ) from error
        found = []
        for switch, mutant in enumerate(mutants, start=1):
            started = time.monotonic()
            failures = _failures_on(library, mutant, every_check=self._every_check, switch=switch)
            found.append(_judged(mutant, failures, started))
            self._done(found[-1])
        self._switched[first.kernels, first.observed] = library
        return found

    def check_baseline(self, kernels: Kernels, tests: Sequence[str], *, observed: bool) -> None:
        """Raises BaselineError when one of `tests`, which found mutants, fails with no switch on."""
        library = self._switched.get((kernels, observed))
        if library is None:
            library = self._workshop.library(kernels, (), observed=observed)
        failures = probe(library, kernels, observed=observed, tests=tests).failures if tests else ()
        self._workshop.discard(library)
        if failures:
            first = failures[0]
            raise BaselineError(f"{kernels.name} fails without a defect: {first.test}: {first.message}")


def run_mutants(
    workshop: Workshop,
    mutants: Sequence[Mutant],
    jobs: int,
    done: Callable[[Result], None],
    *,
    every_check: bool = False,
    lines: bool = False,
) -> list[Result]:
    """The results in the order of `mutants`; `done` hears of each as it comes.

    Mutants of the same kernels are built together, each behind a switch, unless `lines` are asked for. Raises
    BaselineError when a test that found a mutant fails without any, BuildError when switches do not compile.
    """
    run = _Run(workshop, done, every_check=every_check, lines=lines)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            results = [result for some in pool.map(run.results, run.builds(mutants)) for result in some]
            baselines = [
                pool.submit(run.check_baseline, kernels, tests, observed=observed)
                for (kernels, observed), tests in _tests_that_found(results).items()
            ]
            for baseline in baselines:
                baseline.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    by_name = {result.mutant.name: result for result in results}
    return [by_name[mutant.name] for mutant in mutants]


def _tests_that_found(results: Sequence[Result]) -> dict[tuple[Kernels, bool], list[str]]:
    """The tests that failed in each kind of build; none where the compiler alone found something."""
    found: dict[tuple[Kernels, bool], set[str]] = {}
    for result in results:
        if result.verdict is Verdict.STALE:
            continue
        tests = found.setdefault((result.mutant.kernels, result.mutant.observed), set())
        for check, failures in result.failures.items():
            if check is not Check.COMPILER:
                tests.update(failure.test for failure in failures)
    return {build: sorted(tests - {OUTSIDE_TESTS}) for build, tests in found.items()}
