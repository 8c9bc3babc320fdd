"""Registers, spills and shared memory as ptxas reports them, and the two scripts that collect that.

What the machine code itself must be, CTAs per SM included, is in test_static_gates.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import load_script, manifest_of

record_compile = load_script("cmake/record_compile.py")
resource_usage_script = load_script("cmake/resource_usage.py")

SM89_SMEM_BYTES = 101376  # of one CTA

PTXAS_OUTPUT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'fmha_fwd_a' for 'sm_89'
ptxas info    : Function properties for fmha_fwd_a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 222 registers, used 1 barriers, 496 bytes cmem[0]
ptxas info    : Compile time = 900.0 ms
ptxas info    : Compiling entry function 'softmax' for 'sm_89'
ptxas info    : Function properties for softmax
    16 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem
unit.cu(3): warning #177-D: variable "x" was declared but never referenced
"""


def kernels_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kernel["name"]: kernel for unit in report["units"] for kernel in unit["kernels"]}


def fused_rows(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The manifest's rows of fused kernels, for the space that the report is about."""
    return [row for row in manifest_of(report["space"])["kernels"] if row["family"] == "fmha_fwd"]


def test_ptxas_output_is_understood() -> None:
    fused, softmax = record_compile.parse_ptxas(PTXAS_OUTPUT)
    assert fused == {
        "name": "fmha_fwd_a",
        "arch": "sm_89",
        "stack_bytes": 0,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "registers": 222,
        "static_smem_bytes": 0,
    }
    assert (softmax["stack_bytes"], softmax["spill_store_bytes"], softmax["spill_load_bytes"]) == (16, 24, 28)
    assert (softmax["registers"], softmax["static_smem_bytes"]) == (255, 1024)


@pytest.fixture
def compiler(tmp_path: Path) -> list[str]:
    """A stand-in for nvcc: writes the file after -o and prints what ptxas prints."""
    script = tmp_path / "compiler.py"
    script.write_text(
        "import pathlib, sys\n"
        f"print({PTXAS_OUTPUT!r}, file=sys.stderr)\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('object')\n"
        "sys.exit(3 if 'fail' in sys.argv else 0)\n"
    )
    return [sys.executable, str(script)]


def test_launcher_records_and_passes_warnings_on(
    tmp_path: Path, compiler: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "unit.cu.o"
    assert record_compile.main(["--", *compiler, "-c", "-o", str(output)]) == 0
    record = json.loads((tmp_path / "unit.cu.o.usage.json").read_text())
    assert [kernel["name"] for kernel in record["kernels"]] == ["fmha_fwd_a", "softmax"]
    assert record["object_bytes"] == len("object")
    shown = capsys.readouterr().err
    assert "was declared but never referenced" in shown
    assert "ptxas info" not in shown


def test_launcher_keeps_the_seconds_of_an_unchanged_object(tmp_path: Path, compiler: list[str]) -> None:
    output = tmp_path / "unit.cu.o"
    record_file = tmp_path / "unit.cu.o.usage.json"
    record_compile.main(["--", *compiler, "-o", str(output)])
    record = json.loads(record_file.read_text())
    record_file.write_text(json.dumps({**record, "seconds": 1000.0}))
    record_compile.main(["--", *compiler, "-o", str(output)])
    assert json.loads(record_file.read_text())["seconds"] == 1000.0


def test_launcher_passes_a_failure_on(tmp_path: Path, compiler: list[str]) -> None:
    output = tmp_path / "unit.cu.o"
    assert record_compile.main(["--", *compiler, "fail", "-o", str(output)]) == 3
    assert not (tmp_path / "unit.cu.o.usage.json").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({}, None),
        ({"spill_store_bytes": 8}, "spill_store_bytes is 8"),
        ({"spill_load_bytes": 8}, "spill_load_bytes is 8"),
        ({"stack_bytes": 16}, "stack_bytes is 16"),
        ({"registers": 256}, "registers is 256; at most 255"),
        ({"name": "another"}, "no compiled unit holds it"),
    ],
)
def test_check_finds_what_breaks_a_limit(change: dict[str, Any], complaint: str | None) -> None:
    sizes = {"spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0}
    kernel = {"name": "fmha_fwd_a", "registers": 222, **sizes}
    row = {"name": "fmha_fwd_a", "symbols": ["fmha_fwd_a"]}
    manifest = {"kernels": [row, {"name": "b", "symbols": None}]}
    problems = resource_usage_script.find_problems([{"kernels": [kernel | change]}], manifest)
    assert [complaint in problem for problem in problems] == ([True] if complaint else [])


def test_every_function_of_a_kernel_is_checked() -> None:
    sizes = {"spill_store_bytes": 0, "spill_load_bytes": 0}
    kernels = [{"name": "a", "registers": 90, "stack_bytes": 0, **sizes}]
    kernels += [{"name": "a_bool", "registers": 90, "stack_bytes": 8, **sizes}]
    row = {"name": "a", "symbols": ["a", "a_bool", "a_bias16"]}
    assert resource_usage_script.find_problems([{"kernels": kernels}], {"kernels": [row]}) == [
        "a_bool: stack_bytes is 8; at most 0",
        "a_bias16: in the manifest, but no compiled unit holds it",
    ]


def test_report_is_of_this_generation(resource_usage: dict[str, Any]) -> None:
    assert resource_usage["digest"] == manifest_of(resource_usage["space"])["digest"]


def test_kernels_are_compiled_without_spills(resource_usage: dict[str, Any]) -> None:
    """And within the other limits, even if the build did not check them."""
    compiled = kernels_of(resource_usage)
    symbols = [symbol for row in fused_rows(resource_usage) for symbol in row["symbols"]]
    assert symbols
    manifest = manifest_of(resource_usage["space"])
    assert resource_usage_script.find_problems(resource_usage["units"], manifest) == []
    for kernel in map(compiled.__getitem__, symbols):
        assert kernel["static_smem_bytes"] + kernel["dynamic_smem_bytes"] <= SM89_SMEM_BYTES, kernel


def test_ptxas_never_sees_the_word_that_changes_its_mind(resource_usage: dict[str, Any]) -> None:
    """A lower-case "cutlass" in a symbol changes ptxas's register allocation."""
    fused = [name for name in kernels_of(resource_usage) if "fmha" in name]
    assert fused
    assert [name for name in fused if "cutlass" in name] == []
