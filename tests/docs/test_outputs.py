"""The output of commands that documents show is what the commands print now."""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from generator.space import build
from sdpa_cutlass._c_api import library
from sdpa_cutlass._locate import Target
from sdpa_cutlass.errors import LibraryNotFoundError
from sdpa_cutlass.machine_code import gates, kernels, tools
from sdpa_cutlass.registry import read_kernels

from .outputs import commands, refresh

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/profiling.md"
RESULTS = ROOT / "docs/results.md"
GATES = ROOT / "tests/build/sass_gates.md"


def test_outputs_are_fresh() -> None:
    """Of the release kernels and their compiler; with others, other numbers are right."""
    try:
        native = library(Target.CUDA)
        code = kernels.read(native.path, arch=gates.ARCH)
    except (LibraryNotFoundError, tools.MachineCodeError) as error:
        pytest.skip(str(error))
    compilers = {kernel.compiler for kernel in code}
    text = DOCUMENT.read_text(encoding="utf-8")
    globs = [shlex.split(command)[-1] for command in commands(text)]
    assert globs
    shown = {
        config.name for config in build("release").kernels for glob in globs if fnmatchcase(config.name, glob)
    }
    missing = shown - {kernel.name for kernel in read_kernels(native)}
    if missing or compilers != {gates.compilers_of(GATES.read_text(encoding="utf-8"))}:
        pytest.skip(
            f"the library is {native.build.space} by ptxas {compilers}; the document shows another one"
        )
    assert refresh(text) == text, "python -m tests.docs.outputs docs/profiling.md makes it again"


def test_saved_profiles_are_shown_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = RESULTS.read_text(encoding="utf-8")
    assert [shlex.split(command)[:2] for command in commands(text)] == [["profile", "--from"]]
    assert refresh(text) == text, "python -m tests.docs.outputs docs/results.md makes it again"


def test_a_command_that_fails_is_not_shown() -> None:
    with pytest.raises(RuntimeError, match="ends with 2"):
        refresh("<!-- output: profile --shape 1,2 -->\nold\n<!-- end output -->")
