"""The counts derived from a tile, what breaks a gate, and the committed table's text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sdpa_cutlass.library.registry import KernelInfo, Takes
from sdpa_cutlass.machine_code import expected, gates
from sdpa_cutlass.machine_code.kernels import KernelCode, LoopCode
from sdpa_cutlass.machine_code.mix import Mix
from tests.kernel_rows import GENERAL, SPLIT, dropping, kernel_row

INFO = kernel_row("fmha_fwd_sm89_d64_m64n64_s1_w4_f16")


def variant(takes: Takes = INFO.takes, name: str = INFO.name, **details: Any) -> KernelInfo:
    """INFO with other words."""
    return kernel_row(name, takes, **details)


LOOP = {
    "HMMA.16816.F32": 64, "LDSM.16.M88.4": 20, "LDSM.16.MT88.4": 16, "LDGSTS.E.BYPASS.LTC128B.128": 8,
    "MUFU.EX2": 34, "SHFL.BFLY": 4, "BAR.SYNC.DEFER_BLOCKING": 3, "FFMA": 32,
}  # fmt: skip


def loop(address: int = 0x100, **changes: int) -> LoopCode:
    """LOOP with some counts changed: names with _ for the dots."""
    opcodes = LOOP | {name.replace("_", "."): count for name, count in changes.items()}
    mix = Mix({name: count for name, count in opcodes.items() if count})
    return LoopCode(address=address, always=mix.instructions, mix=mix, whole=mix)


GOOD = KernelCode(
    name=INFO.name, arch=89, compiler="13.0.88", registers=142, stack_bytes=0, static_smem_bytes=0,
    code_bytes=26880, mix=Mix({"STG.E.128": 5, "STG.E": 3, "LDGSTS.E.BYPASS.LTC128B.128": 28}),
    loops=(loop(0x100, FFMA=90), loop(0x200)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "counts"),
    [
        # 16 rows a warp: S and O take 1·8·4 MMAs; K 4·4 ldmatrix, Q 4, V 4·4; K and V 64·64/8/128 cp.async
        ({}, (64, 20, 16, 8, 34, 4)),
        # 32 rows a warp, Q in registers
        ({"block_m": 128, "q_in_regs": True}, (128, 16, 16, 8, 68, 8)),
        # two groups of two warps: each group loads its own tiles, Q comes straight from global memory
        ({"block_m": 32, "kv_groups": 2}, (64, 16, 16, 16, 34, 4)),
        ({"head_dim": 80}, (80, 25, 20, 10, 34, 4)),
        ({"head_dim": 256, "block_m": 128, "block_n": 32, "warps": 8}, (128, 48, 32, 8, 18, 4)),
    ],
)
def test_counts_follow_from_the_tile(changes: dict[str, Any], counts: tuple[int, ...]) -> None:
    assert tuple(expected.loop_counts(variant(**changes)).values()) == counts


def test_a_good_kernel_has_no_problems() -> None:
    assert gates.problems(GOOD, INFO) == []


@pytest.mark.parametrize(
    ("code", "info", "complaint"),
    [
        ({"stack_bytes": 16}, {}, "stack is 16 bytes"),
        ({"stack_bytes": 8}, {"takes": dropping(GENERAL)}, "stack is 8 bytes"),
        ({"mix": Mix({"STL": 1, "LDL.64": 2})}, {}, "3 loads and stores of local memory"),
        ({"mix": Mix({"LDG.E.128": 1})}, {}, "LDG of other widths than none bytes: 16:1"),
        ({"mix": Mix({"LDG.E.128": 1})}, {"kv_groups": 2}, "LDG of other widths than 4 bytes: 16:1"),
        ({"mix": Mix({"STG.E.64": 2})}, {}, "STG of other widths than 4, 16 bytes: 8:2"),
        ({"mix": Mix({"LDGSTS.E": 2})}, {}, "LDGSTS of other widths than 16 bytes: 4:2"),
        ({"loops": (loop(),)}, {}, "1 main loops; there must be 2"),
        ({"loops": (loop(), loop(HMMA_16816_F32=63))}, {}, "63 HMMA in the loop at 0x100; its tile takes 64"),
        ({"loops": (loop(), loop(SHFL_BFLY=5))}, {}, "5 SHFL"),
        ({"loops": (loop(), loop(LDSM_16_M88_4=19))}, {}, "19 LDSM in"),
        ({"loops": (loop(), loop(LDSM_16_MT88_4=0, LDSM_16_MT88_2=16))}, {}, "0 LDSM.T in"),
        ({"registers": 176}, {}, "2 CTAs fit on an SM of sm_89; the launch bounds promise 3"),
    ],
)
def test_each_gate_is_noticed(code: dict[str, Any], info: dict[str, Any], complaint: str) -> None:
    found = gates.problems(dataclasses.replace(GOOD, **code), variant(**info))
    assert any(complaint in line for line in found), found
    assert all(line.startswith(GOOD.name) for line in found)


@pytest.mark.parametrize(
    ("mask", "has_dropout", "loads", "are_allowed"),
    [
        ("", False, ("LDG.E",), True),  # lengths
        ("", False, ("LDG.E.U8",), False),
        ("", True, ("LDG.E", "LDG.E.64"), True),  # and Philox's seed
        ("_bool", False, ("LDG.E.U8", "LDG.E.64"), True),
        ("_bool", False, ("LDG.E.128",), False),
        ("_bool", True, ("LDG.E.U8", "LDG.E.U16"), True),
        ("_bias16", False, ("LDG.E.U16", "LDG.E.128"), True),
        ("_bias16", False, ("LDG.E.U8",), False),
        ("_bias32", False, ("LDG.E", "LDG.E.128"), True),
        ("_bias32", False, ("LDG.E.U8",), False),
        ("", False, ("LDG.E.U16",), True),  # a sink
    ],
)
def test_each_function_loads_its_own_kind_of_mask(
    mask: str, has_dropout: bool, loads: tuple[str, ...], are_allowed: bool
) -> None:
    info = variant(dropping(GENERAL) if has_dropout else GENERAL)
    assert info.name + mask in expected.symbols(info)
    code = dataclasses.replace(GOOD, name=info.name + mask, mix=Mix(dict.fromkeys(loads, 1)))
    assert (gates.problems(code, info) == []) is are_allowed


def test_split_kernels_have_two_loops_and_exchange_parts() -> None:
    info = variant(SPLIT, f"{INFO.name}_general_split")
    mix = Mix({"LDG.E": 2, "LDG.E.128.STRONG.GPU": 8, "STG.E.64": 1, "ATOMG.E.INC.STRONG.GPU": 1})
    code = dataclasses.replace(GOOD, mix=mix)
    assert gates.problems(code, info) == []
    assert gates.problems(dataclasses.replace(code, mix=Mix({"LDG.E.U8": 1})), info) != []
    assert gates.problems(dataclasses.replace(code, loops=(*code.loops, loop(0x300))), info) != []


def test_kernels_outside_the_fused_family() -> None:
    code = dataclasses.replace(GOOD, name="_Zsoftmax", loops=(), mix=Mix({"LDG.E.128": 2, "STG.E": 1}))
    assert gates.problems(code, None) == []
    assert gates.problems(dataclasses.replace(code, mix=Mix({"LDG.E.64": 1})), None) != []


def test_table_says_what_was_found_beside_what_is_derived() -> None:
    text = gates.render([GOOD, dataclasses.replace(GOOD, name="_Zother", loops=())], {INFO.name: INFO})
    rows = gates.parse(text)
    assert list(rows) == [INFO.name, "_Zother"]
    cells = rows[INFO.name]
    assert (cells["registers"], cells["smem"], cells["CTAs/SM"], cells["loops"]) == (
        "142",
        "24576",
        "3 ≥ 3",
        "2",
    )
    assert (cells["slots"], cells["HMMA"], cells["LDSM.T"], cells["LDGSTS"]) == (
        "181",
        "64 = 64",
        "16 = 16",
        "8 = 8",
    )
    assert (cells["BAR"], cells["loads"], cells["stores"]) == ("3", "-", "16:5 4:3")
    assert rows["_Zother"]["HMMA"] == "-"
    assert gates.compilers_of(text) == "13.0.88"


def test_differences_name_kernel_column_and_both_numbers() -> None:
    before = gates.render([GOOD, dataclasses.replace(GOOD, name="_Zgone")], {INFO.name: INFO})
    now = gates.render(
        [dataclasses.replace(GOOD, registers=150), dataclasses.replace(GOOD, name="_Znew")], {INFO.name: INFO}
    )
    assert gates.differences(before, before) == []
    assert gates.differences(before, now) == [
        "_Zgone: not in the library",
        "_Znew: not in the table",
        f"{INFO.name}: registers was 142, is 150",
    ]


def test_a_part_of_a_table_keeps_its_head_and_its_other_lines() -> None:
    whole = gates.render([GOOD, dataclasses.replace(GOOD, name="_Zgone")], {INFO.name: INFO})
    assert gates.only(whole, {INFO.name}) == gates.render([GOOD], {INFO.name: INFO})
    assert gates.only(whole, gates.parse(whole).keys()) == whole
