"""Reading kernels: loops of interest, the cache, and programs that are missing or fail."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sdpa_cutlass.machine_code import kernels, tools

from .listings import NESTED, code, listing

USAGE_TEXT = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:88
 Function fmha_a:
  REG:142 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Zb:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:608 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


class FakeTools:
    """Stands in for both programs; counts how often something is disassembled."""

    def __init__(self, archs: tuple[int, ...] = (89,)) -> None:
        self.archs = archs
        self.disassembled = 0

    def __call__(self, tool: str, *arguments: str, cwd: Path | None = None) -> str:
        if arguments[0] == "-xelf":
            assert cwd is not None
            for number, arch in enumerate(self.archs, start=1):
                content = b"Cuda compilation tools, release 13.0, V13.0.88\n" + bytes([arch])
                (cwd / f"lib.so.{number}.sm_{arch}.cubin").write_bytes(content)
            return ""
        if arguments[0] == "-res-usage":
            return USAGE_TEXT
        assert tool == "nvdisasm"
        self.disassembled += 1
        return listing("fmha_a", NESTED) + listing("_Zb", "EXIT")


@pytest.fixture
def fake_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTools:
    fake = FakeTools()
    monkeypatch.setattr(tools, "_run", fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def test_usage_is_read() -> None:
    assert tools.parse_usage(USAGE_TEXT) == {
        "fmha_a": tools.Usage(142, 16, 1024),
        "_Zb": tools.Usage(40, 0, 0),
    }


def test_kernels_of_a_library(fake_tools: FakeTools) -> None:
    other, fused = kernels.read(Path("lib.so"))
    assert (fused.name, fused.arch, fused.compiler) == ("fmha_a", 89, "13.0.88")
    assert (fused.registers, fused.stack_bytes, fused.static_smem_bytes) == (142, 16, 1024)
    assert fused.code_bytes == 13 * 16
    assert (other.name, other.loops, other.main_loop) == ("_Zb", (), None)


def test_of_nested_loops_the_one_that_multiplies_counts() -> None:
    found = kernels.analyse("f", code(NESTED), usage=tools.Usage(1, 0, 0), arch=89, compiler="x")
    assert [loop.address for loop in found.loops] == [2 * 16]  # the outer one only surrounds it
    assert found.main_loop is found.loops[0]
    assert (found.loops[0].mmas, found.loops[0].mix.instructions, found.loops[0].always) == (1, 8, 5)


def test_the_main_loop_is_the_shortest() -> None:
    body = "\n".join(
        f".L_x_{n}:\nHMMA.16816.F32 R4, R8, R2, R4\n{'NOP' + chr(10) if n != 1 else ''}@P0 BRA `(.L_x_{n})"
        for n in range(3)
    )
    found = kernels.analyse("f", code(body), usage=tools.Usage(1, 0, 0), arch=89, compiler="x")
    assert len(found.mma_loops) == 3
    assert found.main_loop is found.mma_loops[1]


def test_a_cubin_is_disassembled_once(fake_tools: FakeTools) -> None:
    first = kernels.read(Path("lib.so"))
    assert kernels.read(Path("lib.so")) == first
    assert fake_tools.disassembled == 1


def test_nothing_is_disassembled_for_other_names(fake_tools: FakeTools) -> None:
    assert kernels.read(Path("lib.so"), "fmha_z*") == []
    assert [kernel.name for kernel in kernels.read(Path("lib.so"), "fmha_*")] == ["fmha_a"]
    assert fake_tools.disassembled == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 0, "kernels": []}', '{"format": 2, "kernels": [{}]}']
)
def test_a_damaged_cache_file_is_made_again(fake_tools: FakeTools, tmp_path: Path, content: str) -> None:
    first = kernels.read(Path("lib.so"))
    (place,) = (tmp_path / "cache/sdpa_cutlass/machine_code").iterdir()
    place.write_text(content)
    assert kernels.read(Path("lib.so")) == first
    assert fake_tools.disassembled == 2
    assert json.loads(place.read_text())["kernels"]


def test_a_cache_that_cannot_be_written_does_no_harm(fake_tools: FakeTools, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert len(kernels.read(Path("lib.so"))) == 2


def test_of_several_architectures_the_newest_or_the_one_asked_for(fake_tools: FakeTools) -> None:
    fake_tools.archs = (80, 89)
    assert {kernel.arch for kernel in kernels.read(Path("lib.so"))} == {89}
    assert {kernel.arch for kernel in kernels.read(Path("lib.so"), arch=80)} == {80}


def test_a_missing_program_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(tools, "_TOOLKIT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    tools.find.cache_clear()
    try:
        with pytest.raises(tools.MachineCodeError, match="pip install nvidia-cuda-nvdisasm"):
            tools.find("nvdisasm")
    finally:
        tools.find.cache_clear()


def test_a_program_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="nvdisasm fatal   : Unsupported SM\n")
    monkeypatch.setattr(tools, "find", lambda name: name)
    monkeypatch.setattr(tools.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(tools.MachineCodeError, match="Unsupported SM"):
        tools.disassemble(Path("x.sm_89.cubin"))


def test_a_library_without_machine_code_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tools, "_run", lambda *args, **kwargs: "")
    with pytest.raises(tools.MachineCodeError, match="only PTX"):
        tools.extract(tmp_path / "lib.so", tmp_path)
