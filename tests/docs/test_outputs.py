"""The output of commands that documents show is what the commands print now."""

from __future__ import annotations

from pathlib import Path

import pytest

from sdpa_cutlass._c_api import library
from sdpa_cutlass._locate import Target
from sdpa_cutlass.errors import LibraryNotFoundError
from sdpa_cutlass.machine_code import gates, kernels, tools

from .outputs import commands, refresh

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/profiling.md"
GATES = ROOT / "tests/build/sass_gates.md"


def test_outputs_are_fresh() -> None:
    """Of the release library and its compiler; with another one, other numbers are right."""
    try:
        native = library(Target.CUDA)
        code = kernels.read(native.path, arch=gates.ARCH)
    except (LibraryNotFoundError, tools.MachineCodeError) as error:
        pytest.skip(str(error))
    compilers = {kernel.compiler for kernel in code}
    if native.build.space != "release" or compilers != {
        gates.compilers_of(GATES.read_text(encoding="utf-8"))
    }:
        pytest.skip(
            f"the library is {native.build.space} by ptxas {compilers}; the document shows another one"
        )
    text = DOCUMENT.read_text(encoding="utf-8")
    assert commands(text)
    assert refresh(text) == text, "python -m tests.docs.outputs docs/profiling.md makes it again"


def test_a_command_that_fails_is_not_shown() -> None:
    with pytest.raises(RuntimeError, match="ends with 2"):
        refresh("<!-- output: profile --shape 1,2 -->\nold\n<!-- end output -->")
