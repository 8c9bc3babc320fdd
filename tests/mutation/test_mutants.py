"""The mutation suite in pytest: its list is sound, and a part of it that changes from day to day is caught.

    SDPA_MUTANTS='mask_*' .venv/bin/python -m pytest tests/mutation     # those of this name instead

`python -m tests.mutation` runs all of them.
"""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import pytest

from tests.mutation import suite
from tests.mutation.build import Workshop
from tests.mutation.catalogue import MUTANTS
from tests.mutation.model import HEADERS, Check, Kernels, Mutant
from tests.mutation.probe import Failure, Outcome, check_of
from tests.mutation.suite import Verdict, run_baseline, run_mutant

A_DAY = 4  # mutants; all of them have had their turn within four months
BESIDE = tuple(mutant for mutant in MUTANTS if mutant.kernels is Kernels.COMBINE)[:3]
"""Which run each day: their library, of several behind switches, is built in seconds."""


def _todays() -> list[Mutant]:
    glob = os.environ.get("SDPA_MUTANTS")
    if glob:
        return [mutant for mutant in MUTANTS if fnmatchcase(mutant.name, glob)]
    first = datetime.date.today().toordinal() * A_DAY
    return [MUTANTS[(first + i) % len(MUTANTS)] for i in range(A_DAY)]


def test_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_old_text_occurs_once(mutant: Mutant) -> None:
    """A mutant whose text has changed has to follow the headers."""
    assert mutant.why_stale() is None
    assert mutant.new != mutant.old


@pytest.mark.parametrize("check", [c for c in Check if c not in (Check.HANG, Check.OTHER)])
def test_every_check_has_to_find_something(check: Check) -> None:
    """So a check that finds nothing any more is noticed."""
    assert any(mutant.by is check for mutant in MUTANTS)


@pytest.mark.parametrize(
    ("kind", "message", "check"),
    [
        ("HostCheckError", "kernel k, block 0: data race at byte 0", Check.RACES),
        ("HostCheckError", "deadlock: no thread can go on", Check.RULES),
        ("AssertionError", "k: (a) max error 1, allowed 0; (c) 3 rows", Check.NUMERICS),
        ("AssertionError", "k: (c) 3 of 4 rows of softmax_lse", Check.LSE),
        ("AssertionError", "out: 3 elements outside the tensor were written", Check.OUTSIDE),
        ("AssertionError", "softmax_lse: 3 elements were never written", Check.OUTSIDE),
        ("AssertionError", "exit code -11 in: case", Check.GUARD_PAGES),
        ("AssertionError", "schedule seed 3\nassert False", Check.SCHEDULES),
        ("AssertionError", "k: 8 bank conflicts in 32 passes of ldmatrix", Check.BANKS),
        ("AssertionError", "assert False", Check.IDENTITIES),
        ("TypeError", "(a) max error", Check.OTHER),
    ],
)
def test_failures_are_sorted_by_check(kind: str, message: str, check: Check) -> None:
    assert check_of(kind, message) is check


class NoCompiler:
    """A workshop whose libraries are names: "mutant" or "unchanged"."""

    def library(self, kernels: Kernels, mutants: Sequence[Mutant], **_: bool) -> Path:
        return Path("mutant" if mutants else "unchanged")

    def discard(self, library: Path) -> None:
        pass


@pytest.mark.parametrize("broken", [False, True])
def test_a_test_that_fails_without_a_mutant_has_found_none(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.by is Check.NUMERICS)
    found = Failure(check=Check.NUMERICS, test="test_fused.py::test_x[a]", message="(a) max error")
    asked: list[object] = []

    def probe(library: Path, kernels: Kernels, **how: object) -> Outcome:
        asked.append(how.get("tests"))
        fails = broken or library.name == "mutant"
        return Outcome(passed=1, failures=(found,) if fails else ())

    monkeypatch.setattr(suite, "probe", probe)
    workshop = cast(Workshop, NoCompiler())
    if broken:
        with pytest.raises(suite.BaselineError, match=r"fails without a defect: test_fused.py::test_x\[a\]"):
            suite.run_mutants(workshop, [mutant], 1, lambda result: None)
    else:
        (result,) = suite.run_mutants(workshop, [mutant], 1, lambda result: None)
        assert result.verdict is Verdict.CAUGHT
    assert asked == [None, [found.test]]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder: Path = tmp_path_factory.mktemp("mutation")
    return Workshop.open(folder)


@pytest.mark.slow
def test_todays_mutants_are_caught(workshop: Workshop) -> None:
    """And with no switch on, the tests that found them pass, or run_mutants raises."""
    mutants = list(dict.fromkeys((*_todays(), *BESIDE)))
    results = suite.run_mutants(workshop, mutants, 2, lambda result: None)
    assert [result.mutant for result in results] == mutants
    survivors = [result for result in results if result.verdict is not Verdict.CAUGHT]
    assert not survivors, [f"{r.mutant.name}: {r.verdict.value} ({r.note})" for r in survivors]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("addr2line") is None, reason="needs addr2line, of binutils")
@pytest.mark.parametrize(
    ("name", "accesses"),
    [
        (
            "no_syncwarp_before_o_is_stored",
            [
                ("attention/staged_rows.cuh", "vector_at(first, j / 2)) = word(i, j);"),
                ("attention/staged_rows.cuh", "*>(to_row) =\n"),
            ],
        ),
        (
            "no_barrier_before_v_ring2",
            [
                ("fmha_fwd/tile_copy.cuh", "cute::copy("),
                ("fmha_fwd/mainloop.cuh", "gemm<true, CopyAtom, CopyAtomT>("),
            ],
        ),
    ],
)
def test_a_missing_barrier_is_reported_with_both_lines(
    workshop: Workshop, name: str, accesses: list[tuple[str, str]]
) -> None:
    """Of plain accesses in an observed build, of cp.async and ldmatrix in one that is not."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    message = run_mutant(workshop, mutant, lines=True).failures[Check.RACES][0].message
    for header, text in accesses:
        lines = (HEADERS / header).read_text(encoding="utf-8").splitlines(keepends=True)
        (number,) = (i for i, line in enumerate(lines, start=1) if text in line)
        assert f"{Path(header).name}:{number} < " in message, message


@pytest.mark.slow
@pytest.mark.in_turns
@pytest.mark.parametrize(
    "kernels",
    [k for k in Kernels if k.is_of_fmha_fwd or k is Kernels.BACKWARD_FUSED],
    ids=lambda kernels: kernels.name,
)
def test_kernels_do_not_race(workshop: Workshop, kernels: Kernels) -> None:
    """With every plain load and store of shared memory observed, next to cp.async and ldmatrix.

    Not Hopper's: the shadow knows nothing of what mbarriers order. Their rules are async_rules.hpp's. Those
    that merge partial results share no memory.
    """
    outcome = run_baseline(workshop, kernels, observed=True)
    assert outcome.passed > 0
    assert not outcome.failures, outcome.failures[0].message
