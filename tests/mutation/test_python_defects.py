"""Defects in Python (defects_python.py, defects_choice.py): the tests that each names find it.

The mutants of the headers need a compiler; these need a copy of the package with one line changed. The tests
run on the host library as it is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sdpa_cutlass.library import abi
from sdpa_cutlass.library.locate import Target
from tests.mutation.defects_choice import CHOICE
from tests.mutation.defects_python import PYTHON, PythonMutant
from tests.mutation.model import ROOT

PACKAGE = "sdpa_cutlass"
MUTANTS = (*PYTHON, *CHOICE)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without a defect, in which all of the tests pass."""
    place = tmp_path_factory.mktemp("sound")
    _copy(ROOT, place)
    tests = dict.fromkeys(mutant.tests for mutant in MUTANTS)
    assert _run(place, *tests) == 0
    return place


def _copy(source: Path, place: Path) -> None:
    for folder in (PACKAGE, "tests/library"):
        ignored = shutil.ignore_patterns("__pycache__", "cli", "simt")
        shutil.copytree(source / folder, place / folder, ignore=ignored)
    (place / "tests/build").mkdir()
    for file in ("pyproject.toml", "tests/conftest.py", "tests/kernel_rows.py", "tests/build/sass_gates.md"):
        shutil.copy(source / file, place / file)


@pytest.mark.slow
@pytest.mark.in_turns
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_found(mutant: PythonMutant, sound: Path, tmp_path: Path) -> None:
    text = (sound / PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    _copy(sound, tmp_path)
    (tmp_path / PACKAGE / mutant.file).write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    assert _run(tmp_path, mutant.tests) == 1


def _run(place: Path, *tests: str) -> int:
    """pytest's exit status of `tests` in the copy at `place`."""
    library = str(abi.library(Target.HOST).path)
    environment = {**os.environ, Target.HOST.environment_variable: library, "SDPA_CUTLASS_LAUNCHER": "off"}
    command = [sys.executable, "-m", "pytest", "-q", "--device", "cpu", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, cwd=place, env=environment, stdout=subprocess.DEVNULL).returncode
