"""The output of commands that documents show is what the commands print now."""

from __future__ import annotations

import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from generator.families import FAMILIES
from sdpa_cutlass.errors import LibraryNotFoundError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import read_kernels
from sdpa_cutlass.machine_code import gates, kernels, tools

from .outputs import block, commands, refresh

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/profiling.md"
GATES = ROOT / "tests/build/sass_gates.md"


def test_outputs_are_fresh() -> None:
    """Of the release kernels and their compiler; with others, other numbers are right.

    A library with some of the kernels tells the outputs of which it has all, and of tables the rows it has.
    """
    try:
        native = library(Target.CUDA)
        code = kernels.read(native.path, arch=gates.ARCH)
    except (LibraryNotFoundError, tools.MachineCodeError) as error:
        pytest.skip(str(error))
    compilers = {kernel.compiler for kernel in code}
    if compilers != {gates.compilers_of(GATES.read_text(encoding="utf-8"))}:
        pytest.skip(f"the library is by ptxas {compilers}; the document shows another one")
    text = DOCUMENT.read_text(encoding="utf-8")
    held = {kernel.name for kernel in read_kernels(native)}
    assert commands(text)
    is_compared = False
    for command in commands(text):
        glob = shlex.split(command)[-1]
        shown = {
            config.name for config in FAMILIES.build("release").kernels if fnmatchcase(config.name, glob)
        }
        assert shown
        is_compared |= bool(shown & held)
        if shown <= held:
            assert block(command) in text, "python -m tests.docs.outputs docs/profiling.md makes it again"
        elif shown & held:
            rows = rows_of(block(command))
            assert len(rows) >= len(shown & held)
            assert rows <= rows_of(text)
    if not is_compared:
        pytest.skip("the library has none of the kernels that the document shows")


def test_the_table_of_kernels_is_that_of_the_gates() -> None:
    """Where a library has few of the kernels or none, the committed table of machine code tells."""
    gate_rows = {}
    for line in GATES.read_text(encoding="utf-8").splitlines():
        if line.startswith("| fmha_fwd"):
            kernel, registers, stack, _, smem, _, _, slots, mma, *_ = (
                cell.strip() for cell in line.strip("|").split("|")
            )
            gate_rows[kernel] = registers, stack, smem, slots, mma.split(" = ")[0]
    rows = [row for row in rows_of(DOCUMENT.read_text(encoding="utf-8")) if len(row) > 1]
    assert rows
    for kernel, registers, stack, smem, _, slots, mma, *_ in rows:
        assert (registers, stack, smem, slots, mma) == gate_rows[kernel], (
            f"{kernel}: python -m tests.docs.outputs docs/profiling.md makes it again"
        )


def rows_of(text: str) -> set[tuple[str, ...]]:
    """The cells of all lines that begin with a kernel's name."""
    return {tuple(line.split()) for line in text.splitlines() if line.startswith("fmha_fwd")}


@pytest.mark.parametrize("name", ["results", "fmha_bwd"])
def test_saved_profiles_are_shown_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    assert [shlex.split(command)[:2] for command in commands(text)] == [["profile", "--from"]]
    assert refresh(text) == text, f"python -m tests.docs.outputs docs/{name}.md makes it again"


def test_a_command_that_fails_is_not_shown() -> None:
    with pytest.raises(RuntimeError, match="ends with 2"):
        refresh("<!-- output: profile --shape 1,2 -->\nold\n<!-- end output -->")
