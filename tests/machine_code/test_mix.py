"""Instruction mixes: groups, widths of accesses, and the cycles of each unit."""

from __future__ import annotations

import pytest

from sdpa_cutlass.machine_code.mix import GROUPS, Mix, access_bytes, group_of

from .listings import NESTED, code


@pytest.mark.parametrize(
    ("opcode", "group"),
    [
        ("HMMA.16816.F32.BF16", "HMMA"),
        ("LDSM.16.MT88.4", "LDSM"),
        ("LDGSTS.E.BYPASS.LTC128B.128", "LDGSTS"),
        ("LDG.E.U8", "LDG"),
        ("LDGDEPBAR", "barrier"),
        ("STG.E.128", "STG"),
        ("STS.64", "STS"),
        ("LDL.LU.64", "LDL"),
        ("MUFU.EX2", "MUFU"),
        ("FFMA", "FP32"),
        ("IMAD.MOV.U32", "IMAD"),
        ("F2FP.BF16.F32.PACK_AB", "convert"),
        ("SHFL.BFLY", "shuffle"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("BRA.DIV", "branch"),
        ("UIADD3", "uniform"),
        ("FMNMX", "ALU"),
        ("ISETP.GE.AND", "ALU"),
        ("LOP3.LUT", "ALU"),
    ],
)
def test_groups(opcode: str, group: str) -> None:
    assert group_of(opcode) == group


@pytest.mark.parametrize(
    ("opcode", "size"),
    [("LDG.E.128", 16), ("LDG.E.64", 8), ("STG.E", 4), ("LDG.E.U16", 2), ("LDG.E.U8", 1), ("LDS.128", 16),
     ("LDGSTS.E.BYPASS.LTC128B.128", 16), ("LDGSTS.E.BYPASS.LTC128B", 4)],
)  # fmt: skip
def test_widths(opcode: str, size: int) -> None:
    assert access_bytes(opcode) == size


def test_what_never_executes_is_a_nop() -> None:
    mix = Mix.of(code(NESTED))
    assert mix.instructions == 13
    assert mix.groups["LDS"] == 0
    assert mix.groups["other"] == 1
    assert sum(mix.groups.values()) == mix.instructions
    assert set(mix.groups) == set(GROUPS)
    assert mix.widths("LDSM") == {4: 1}


def test_counts_by_pattern() -> None:
    mix = Mix({"LDSM.16.M88.4": 3, "LDSM.16.MT88.4": 5, "LDGSTS.E.BYPASS.128": 7})
    assert mix.count(r"LDSM\.16\.M88") == 3
    assert mix.count("LDSM") == 8
    assert mix.count("LDS") == 8


def test_cycles_of_a_quarter_sm() -> None:
    mix = Mix(
        {"HMMA.16816.F32": 10, "LDSM.16.M88.4": 2, "LDGSTS.E.BYPASS.LTC128B.128": 1, "LDS": 1, "STS.64": 1,
         "SHFL.BFLY": 1, "MUFU.EX2": 3, "FFMA": 8, "IMAD": 6, "FMNMX": 4, "F2FP.F16.F32.PACK_AB": 1}
    )  # fmt: skip
    cycles = mix.cycles(1024)
    assert cycles["tensor"] == 10 * 4096 / 256
    assert cycles["issue"] == 38
    assert cycles["xu"] == 3 * 8
    assert cycles["alu"] == 5 * 2
    assert cycles["fma"] == 14
    assert cycles["shared"] == 4 * (2 * 4 + 4 + 1 + 2 + 1)
    assert mix.cycles(512)["tensor"] == 2 * cycles["tensor"]


def test_bytes_are_multiplied_at_a_rate_of_their_own() -> None:
    mix = Mix({"IMMA.16832.S8.S8": 3, "HMMA.16816.F32": 2})
    assert mix.cycles(1024)["tensor"] == 3 * 8192 / 512 + 2 * 4096 / 256
    assert mix.cycles(512)["tensor"] == 3 * 8192 / 512 + 2 * 4096 / 128
    assert mix.groups["IMMA"] == 3
    assert mix.cycles(1024)["alu"] == 0


def test_integer_multiplies_use_half_of_the_lanes() -> None:
    assert Mix({"IMAD": 6, "FADD": 2}).cycles(1024)["fma"] == 12
