"""The machine code of the CUDA library as it was built, against its tiles and against the committed table.

After a change that moves a number on purpose:

    python -m sdpa_cutlass profile --static --write-gates tests/build/sass_gates.md
    git diff tests/build/sass_gates.md
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

from sdpa_cutlass.library.abi import Library, Target, load
from sdpa_cutlass.library.registry import KernelInfo, read_kernels
from sdpa_cutlass.machine_code import expected, gates, gates_q8, gates_q8_sm90, gates_sm90, kernels, tools
from sdpa_cutlass.machine_code.kernels import KernelCode

from .conftest import FILTERED, LIBRARIES, built

TABLE = Path(__file__).with_name("sass_gates.md")


@pytest.fixture(scope="module")
def native() -> Library:
    return load(built(LIBRARIES["cuda"], "make cuda"), Target.CUDA)


@pytest.fixture(scope="module")
def infos(native: Library) -> dict[str, KernelInfo]:
    return gates.fused_rows(read_kernels(native))


@pytest.fixture(scope="module")
def code(native: Library) -> list[KernelCode]:
    """Every kernel's machine code; without a disassembler tests skip, or fail where a build is required."""
    try:
        tools.find("nvdisasm")
        tools.find("cuobjdump")
    except tools.MachineCodeError as error:
        if os.environ.get("SDPA_REQUIRE_BUILD") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))
    return kernels.read(native.path, arch=gates.ARCH)


def test_every_gate_holds(code: list[KernelCode], infos: dict[str, KernelInfo]) -> None:
    assert [line for kernel in code for line in gates.problems(kernel, infos.get(kernel.name))] == []


@pytest.mark.parametrize("rule", [gates_sm90, gates_q8_sm90], ids=["exact", "quantised"])
def test_hoppers_code_is_what_its_tiles_imply(
    rule: ModuleType, code: list[KernelCode], native: Library
) -> None:
    """`code`, of another architecture, is asked for the disassembler's sake."""
    rows = rule.rows(read_kernels(native))
    found = {kernel.name: kernel for kernel in kernels.read(native.path, arch=gates_sm90.ARCH)}
    assert rows.keys() == found.keys() & rows.keys()
    assert [line for name in rows for line in rule.problems(found[name], rows[name])] == []


def test_quantised_code_is_what_its_tiles_imply(code: list[KernelCode], native: Library) -> None:
    rows = gates_q8.rows(read_kernels(native))
    found = {kernel.name: kernel for kernel in code}
    assert rows.keys() <= found.keys()
    assert [line for name in rows for line in gates_q8.problems(found[name], rows[name])] == []


def test_every_fused_kernel_has_machine_code(code: list[KernelCode], infos: dict[str, KernelInfo]) -> None:
    assert infos
    assert infos.keys() <= {kernel.name for kernel in code}


def test_counts_are_not_trivially_right(code: list[KernelCode], infos: dict[str, KernelInfo]) -> None:
    """Every kind that is counted occurs in every main loop, so that no gate compares nothing with nothing."""
    for kernel in code:
        if kernel.name in infos:
            assert kernel.main_loop is not None, kernel.name
            assert all(expected.counted(kernel.main_loop.mix).values()), kernel.name


def test_table_is_that_of_the_library(
    code: list[KernelCode], infos: dict[str, KernelInfo], native: Library
) -> None:
    if native.build.space not in ("release", FILTERED):
        pytest.skip(f"the library holds the space {native.build.space!r}; the table is of release")
    committed, now = TABLE.read_text(encoding="utf-8"), gates.render(code, infos)
    if gates.compilers_of(committed) != gates.compilers_of(now):
        pytest.skip(
            f"the table is of ptxas {gates.compilers_of(committed)}, the library of "
            f"{gates.compilers_of(now)}; what the tiles imply is checked all the same"
        )
    if native.build.space == FILTERED:
        committed = gates.only(committed, {kernel.name for kernel in code})
    differences = gates.differences(committed, now)
    assert differences == [], f"if this is wanted: {gates.COMMAND}"
    assert committed == now


def test_an_element_type_changes_no_number() -> None:
    """So a library with the kernels of one of them tells what changed in both.

    Quantised and backward kernels convert elements one by one, which takes other instructions.
    """
    table = gates.parse(TABLE.read_text(encoding="utf-8"))
    fused = {name: row for name, row in table.items() if name.startswith("fmha_fwd_sm89")}
    f16 = {name: row for name, row in fused.items() if "_f16" in name}
    bf16 = {name.replace("_bf16", "_f16"): row for name, row in fused.items() if "_bf16" in name}
    assert f16
    assert {name: {**row, "kernel": name} for name, row in bf16.items()} == f16
