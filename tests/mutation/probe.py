"""Runs the tests of tests/kernels on one library, in a process of its own, and says which checks failed."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch

from sdpa_cutlass.library.locate import Target
from tests.mutation.model import ROOT, Check, Kernels
from tests.mutation.switches import VARIABLE
from tests.source_lines import with_lines

OUTSIDE_TESTS = "outside any test"  # in place of a test's name
TIMEOUT_S = 300
ENGINE_TIMEOUT_S = 120
_FOLDER = "tests/kernels/"
_PLAIN = (
    "test_fused.py",
    "test_causal_offsets.py",
    "test_limits.py",
    "test_hidden_keys.py",
    "test_operand_strides.py",
    "test_growing_scores.py",
    "test_large_scores.py",
    "test_bank_conflicts.py",
)
_GENERAL = (
    "test_general.py",
    "test_causal_offsets.py",
    "test_limits.py",
    "test_operand_strides.py",
    "test_masks.py",
    "test_large_scores.py",
    "test_lengths.py",
    "test_window.py",
    "test_sinks.py",
    "test_guard_pages.py",
    "test_bank_conflicts.py",
)
_SPLITS = (Kernels.SPLIT, Kernels.SPLIT_ALONE, Kernels.HOPPER_SPLIT)
_OF_SPLITS = (
    "test_split.py",
    "test_causal_offsets.py",
    "test_limits.py",
    "test_operand_strides.py",
    "test_large_scores.py",
    "test_lengths.py",
    "test_window.py",
    "test_sinks.py",
    "test_general.py",
    "test_guard_pages.py",
    "test_bank_conflicts.py",
)
_QUANTIZED = (
    "test_quantized_model.py",
    "test_quantized.py",
    "test_quantized_masks.py",
    "test_quantized_traps.py",
    "test_bank_conflicts.py",
)
_TESTS: dict[Kernels, tuple[str, ...]] = {
    Kernels.GENERAL: _GENERAL,
    Kernels.HOPPER_GENERAL: (*_GENERAL, "test_mask_blocks.py", "test_tiles_in_turn.py"),
    Kernels.DROPOUT: ("test_dropout.py", "test_large_scores.py", *_GENERAL),
    Kernels.HOPPER_DROPOUT: ("test_dropout.py",),
    Kernels.COMBINE: ("test_merge.py",),
    Kernels.QUANTIZED: _QUANTIZED,
    Kernels.QUANTIZED_BF16: _QUANTIZED,
    Kernels.QUANTIZED_HOPPER: _QUANTIZED,
    Kernels.QUANTIZED_SPLIT: ("test_quantized_split.py", "test_quantized_model.py", "test_bank_conflicts.py"),
    Kernels.BACKWARD: ("test_backward.py", "test_bias_gradient.py"),
    Kernels.BACKWARD_DROPOUT: ("test_backward.py", "test_bias_gradient.py"),
    Kernels.BACKWARD_TURNS: ("test_backward.py", "test_bias_gradient.py"),
    Kernels.BACKWARD_FUSED: ("test_backward.py",),
    Kernels.SPLIT: _OF_SPLITS,
    Kernels.SPLIT_ALONE: _OF_SPLITS,
    Kernels.HOPPER_SPLIT: _OF_SPLITS,
}
_FIRST: dict[Check, tuple[str, ...]] = {
    Check.IDENTITIES: ("test_limits.py", "test_operand_strides.py", "test_hidden_keys.py"),
    Check.GUARD_PAGES: ("test_guard_pages.py",),
    Check.BANKS: ("test_bank_conflicts.py",),
}
"""Which files find most of the mutants of a check: they run before the others."""
# Split kernels take seconds for some of their tests: one layout, some of the row counts and, for the slowest,
# one kind of causal mask are enough here.
_SPLIT = (
    "not (head-major or (test_rows and (cpu-13 or cpu-21 or cpu-25 or cpu-29 or cpu-33))"
    " or (test_packed_sequences and not bottom_right)"
    " or (leave_splits_empty and (top_left or bottom_right)))"
)
# Observed kernels are slow: small problems only.
_OBSERVED = "bank_conflicts or tile-1 or tile+1 or scales or grouped or lengths or (dropout and numerics)"
_OBSERVED_SPLIT = "bank_conflicts or tile-1 or tile+1 or scales or different_weight"
_RULE_ERROR = "HostCheckError"
_OUTSIDE = (
    "elements outside the tensor were written",
    "elements were never written",
    "bytes around the workspace were written",
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One failed test: which check it stands for, and what it said."""

    check: Check
    test: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the tests said of one library."""

    passed: int
    failures: tuple[Failure, ...]

    def by_check(self) -> dict[Check, list[Failure]]:
        """The failures of each check that failed, in the order of Check."""
        found = {check: [f for f in self.failures if f.check is check] for check in Check}
        return {check: failures for check, failures in found.items() if failures}


def check_of(kind: str, message: str) -> Check:
    """The check that an exception of type `kind` stands for."""
    if kind == _RULE_ERROR:
        return Check.RACES if "data race" in message else Check.RULES
    if kind != "AssertionError":
        return Check.OTHER
    for check, signs in (
        (Check.OUTSIDE, _OUTSIDE),
        (Check.BANKS, ("bank conflicts in",)),
        (Check.GUARD_PAGES, ("exit code -",)),
        (Check.SCHEDULES, ("schedule seed",)),
        (Check.NUMERICS, ("(a) max error", "(b) ")),
        (Check.LSE, ("(c) ",)),
    ):
        if any(sign in message for sign in signs):
            return check
    return Check.IDENTITIES


def probe(
    library: Path,
    kernels: Kernels,
    *,
    observed: bool,
    tests: Sequence[str] = (),
    stop_at: Check | None = None,
    stop_at_first: bool = False,
    timeout_s: float = TIMEOUT_S,
    switch: int = 0,
) -> Outcome:
    """Runs the tests, or some of them on observed kernels, until `stop_at`, or any check, finds something.

    `tests`: those of earlier failures alone. `switch`: of the mutant that is on, 0 for none. Raises
    RuntimeError when pytest fails to work.
    """
    if kernels is Kernels.ENGINE:
        return _probe_engine(library, switch)
    record = library.with_suffix(".jsonl")
    record.unlink(missing_ok=True)
    names = list(dict.fromkeys(_TESTS.get(kernels, _PLAIN)))
    if stop_at in _FIRST and kernels not in _SPLITS:
        names.sort(key=lambda name: name not in _FIRST[stop_at])
    paths = [str(ROOT / _FOLDER / name) for name in tests or names]
    arguments = ["-q", "--tb=no", "-p", "no:cacheprovider"]
    arguments += ["-p", "tests.mutation.recorder", f"--record={record}", "--device=cpu", *paths]
    if stop_at is not None:
        arguments.append(f"--stop-at={stop_at.value}")
    if stop_at_first:
        arguments.append("--exitfirst")
    if observed:
        arguments += ["-k", _OBSERVED_SPLIT if kernels in _SPLITS else _OBSERVED]
    elif kernels in _SPLITS:
        arguments += ["-k", _SPLIT]
    log = library.with_suffix(".log")
    process = _imported().Process(target=_run_pytest, args=(arguments, library, log, switch))
    process.start()
    process.join(timeout_s)
    hung = process.exitcode is None
    if hung:
        process.kill()
        process.join()
    code = process.exitcode if process.exitcode is not None and not hung else 0
    output = log.read_text()[-2000:] if log.exists() else ""
    events = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    failures = list(_failures(events, library))
    ended = {event["test"] for event in events if event["event"] != "started"}
    unfinished = [event["test"] for event in events if event["test"] not in ended]
    if hung or code < 0:
        where = unfinished[-1].removeprefix(_FOLDER) if unfinished else OUTSIDE_TESTS
        check = Check.HANG if hung else Check.GUARD_PAGES
        message = f"no end after {timeout_s:.0f} s" if hung else f"signal {-code}"
        failures.append(Failure(check=check, test=where, message=message))
    elif code not in (0, 1):
        raise RuntimeError(f"pytest ended with status {code}:\n{output}")
    passed = sum(event["event"] == "passed" for event in events)
    if passed == 0 and not failures:
        raise RuntimeError(f"no test ran:\n{output}")
    return Outcome(passed=passed, failures=tuple(failures))


@cache
def _imported() -> ForkServerContext:
    """Its processes start with torch imported, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["numpy", "torch"])
    return context


def _run_pytest(arguments: list[str], library: Path, log: Path, switch: int) -> None:
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    os.environ |= {
        Target.HOST.environment_variable: str(library),
        VARIABLE: str(switch),
        "OMP_NUM_THREADS": "1",
    }
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing them takes seconds
    os.environ.pop("PYTEST_ADDOPTS", None)
    torch.set_num_threads(1)  # torch has read its variable
    sys.exit(pytest.main(arguments))


def _probe_engine(program: Path, switch: int) -> Outcome:
    """Runs the cases of the engine's test program, all in one process."""
    try:
        run = subprocess.run(
            [program],
            capture_output=True,
            text=True,
            check=False,
            timeout=ENGINE_TIMEOUT_S,
            env=os.environ | {VARIABLE: str(switch)},
        )
    except subprocess.TimeoutExpired:
        message = f"no end after {ENGINE_TIMEOUT_S} s"
        return Outcome(passed=0, failures=(Failure(check=Check.HANG, test="simt_test", message=message),))
    failures = []
    for line in run.stdout.splitlines():
        if line.startswith("FAILED "):
            test, _, message = line.removeprefix("FAILED ").partition(": ")
            failures.append(Failure(check=Check.ENGINE, test=test, message=message))
    passed = run.stdout.count("passed ")
    if run.returncode < 0:
        message = f"signal {-run.returncode} after {passed} cases"
        failures.append(Failure(check=Check.ENGINE, test="simt_test", message=message))
    return Outcome(passed=passed, failures=tuple(failures))


def _failures(events: list[dict[str, str]], library: Path) -> Iterator[Failure]:
    for event in events:
        if event["event"] == "failed":
            check = check_of(event["kind"], event["message"])
            test = event["test"].removeprefix(_FOLDER)
            message = with_lines(event["message"], library)
            yield Failure(check=check, test=test, message=f"{event['kind']}: {message}")
