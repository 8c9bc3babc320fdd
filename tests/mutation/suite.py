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
    library = workshop.library(kernels, None, observed=observed)
    outcome = probe(library, kernels, observed=observed)
    workshop.discard(library)
    return outcome


def check_baseline(workshop: Workshop, kernels: Kernels, tests: Sequence[str], *, observed: bool) -> None:
    """Raises BaselineError when one of `tests`, which found mutants, fails without any defect."""
    library = workshop.library(kernels, None, observed=observed)
    failures = probe(library, kernels, observed=observed, tests=tests).failures if tests else ()
    workshop.discard(library)
    if failures:
        first = failures[0]
        raise BaselineError(f"{kernels.name} fails without a defect: {first.test}: {first.message}")


def run_mutant(
    workshop: Workshop, mutant: Mutant, *, every_check: bool = False, lines: bool = False
) -> Result:
    """Never raises for what the defect does; RuntimeError when pytest cannot run.

    Tests end when the check that has to find the defect has found it, or, with `every_check`, when all have
    run. With `lines`, messages about races name source lines, which takes longer to compile.
    """
    started = time.monotonic()
    failures: dict[Check, list[Failure]] = {}
    note = mutant.why_stale() or ""
    if note:
        return Result(mutant=mutant, verdict=Verdict.STALE, failures={}, note=note, seconds=0.0)
    try:
        library = workshop.library(mutant.kernels, mutant, observed=mutant.observed, lines=lines)
        stop_at = None if every_check else mutant.by
        outcome = probe(library, mutant.kernels, observed=mutant.observed, stop_at=stop_at)
        failures = outcome.by_check()
        workshop.discard(library)
    except BuildError as error:
        lines = [line for line in str(error).splitlines() if "error" in line]
        message = (lines or [str(error)])[0][-300:]
        failures = {Check.COMPILER: [Failure(check=Check.COMPILER, test="g++", message=message)]}
    if not failures:
        verdict, note = Verdict.SURVIVED, "every test passed"
    elif mutant.by not in failures:
        verdict = Verdict.OTHERWISE
        note = f"{mutant.by.value} did not find it"
    else:
        verdict = Verdict.CAUGHT
    seconds = time.monotonic() - started
    return Result(mutant=mutant, verdict=verdict, failures=failures, note=note, seconds=seconds)


def run_mutants(
    mutants: Sequence[Mutant],
    folder: Path,
    jobs: int,
    done: Callable[[Result], None],
    *,
    every_check: bool = False,
    lines: bool = False,
) -> list[Result]:
    """The results in the order of `mutants`; `done` hears of each as it comes.

    Raises BaselineError when a test that found a mutant fails without any.
    """
    workshop = Workshop.open(folder)

    def run(mutant: Mutant) -> Result:
        result = run_mutant(workshop, mutant, every_check=every_check, lines=lines)
        done(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        try:
            results = list(pool.map(run, mutants))
            found = _tests_that_found(results)
            baselines = [
                pool.submit(check_baseline, workshop, kernels, tests, observed=observed)
                for (kernels, observed), tests in found.items()
            ]
            for baseline in baselines:
                baseline.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


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
