"""What is derived for Hopper's quantised kernels, and what breaks a gate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sdpa_cutlass.library.registry import Accuracy, Family, Takes
from sdpa_cutlass.machine_code import gates_q8, gates_q8_sm90, gates_sm90
from sdpa_cutlass.machine_code.kernels import KernelCode, LoopCode
from sdpa_cutlass.machine_code.mix import Mix
from tests.kernel_rows import UNBIASED, kernel_row

NAME = "fmha_fwd_q8_sm90_d128_m128n64_s4_w12_f16_int8"
INFO = kernel_row(
    NAME, UNBIASED & ~Takes.BOOL, family=Family.FMHA_FWD_Q8_SM90, accuracy=Accuracy.INT8, arch=90,
    code="90a-real", head_dim=128, block_m=128, block_n=64, stages=4, warps=12,
)  # fmt: skip
# Q Kᵀ in 4 steps of 32 columns of head_dim, P V in 2 of 32 keys
LOOP = {"IGMMA.64x64x32.S8.S8": 4, "IGMMA.64x128x32.U8.S8": 2, "WARPGROUP.ARRIVE": 2, "LDG.E.128": 8}
CODE = {
    "IGMMA.64x64x32.S8.S8": 8, "IGMMA.64x128x32.U8.S8": 4, "WARPGROUP.ARRIVE": 4, "UTMALDG.4D": 10,
    "USETMAXREG.DEALLOC.CTAPOOL": 1, "USETMAXREG.TRY_ALLOC.CTAPOOL": 1,
    "LDG.E": 6, "LDG.E.U16": 3, "LDG.E.64": 16, "LDG.E.128": 24, "STG.E": 3, "STG.E.128": 9,
}  # fmt: skip
PASS = {"LDG.E": 6, "LDG.E.128": 24, "STG.E": 4, "STG.E.128": 8}


def mix(opcodes: dict[str, int], **changes: int) -> Mix:
    """Some counts changed: names with _ for the dots."""
    changed = opcodes | {name.replace("_", "."): count for name, count in changes.items()}
    return Mix({name: count for name, count in changed.items() if count})


def loop(**changes: int) -> LoopCode:
    made = mix(LOOP, **changes)
    return LoopCode(address=0x7900, always=made.instructions, mix=made, whole=made)


WAITING = Mix({"SYNCS.PHASECHK.TRANS64.TRYWAIT": 2})
OTHER_LOOP = LoopCode(address=0x4580, always=2, mix=WAITING, whole=WAITING)


def code(name: str = NAME, opcodes: dict[str, int] | None = None, /, **changes: Any) -> KernelCode:
    """What a kernel has, or its pass over K and V; `changes`: fields, and counts of the whole function."""
    fields = {"stack_bytes": 0, "setmaxnreg": (24, 240, 16), "loops": (OTHER_LOOP, loop()), "registers": 168}
    given = {field: changes.pop(field, usual) for field, usual in fields.items()}
    return KernelCode(
        name=name, arch=90, compiler="13.0.88", static_smem_bytes=0, code_bytes=1,
        mix=mix(CODE if opcodes is None else opcodes, **changes), **given,
    )  # fmt: skip


def making_bytes(**changes: Any) -> KernelCode:
    return code(f"{NAME}_quantize", PASS, loops=(), setmaxnreg=(), **changes)


def test_good_code_has_no_problems() -> None:
    assert gates_q8_sm90.problems(code(), INFO) == []
    assert gates_q8_sm90.problems(making_bytes(), INFO) == []


def test_counts_follow_from_the_tile() -> None:
    narrow = dataclasses.replace(INFO, head_dim=64)
    assert gates_q8_sm90.loop_counts(narrow) == {
        "IGMMA 64x64x32.S8.S8": 2, "IGMMA 64x64x32.U8.S8": 2, "WARPGROUP.ARRIVE": 2,
    }  # fmt: skip
    assert gates_q8_sm90.problems(code(), narrow) != []


def test_rows_have_two_functions_and_are_of_this_family_alone() -> None:
    others = [
        dataclasses.replace(INFO, name=family.value, family=family)
        for family in (Family.FMHA_FWD_Q8, Family.FMHA_FWD_SM90)
    ]
    rows = (INFO, *others)
    assert gates_q8_sm90.rows(rows) == {NAME: INFO, f"{NAME}_quantize": INFO}
    assert NAME not in gates_q8.rows(rows) | gates_sm90.rows(rows)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"stack_bytes": 16}, "stack is 16 bytes; it must be 0"),
        ({"STL": 1, "LDL_64": 2}, "3 loads and stores of local memory; there must be none"),
        ({"IGMMA_64x64x32_S8_S8": 12}, "12 IGMMA 64x64x32.S8.S8; its tile takes 8"),
        ({"IGMMA_64x128x32_U8_S8": 3}, "3 IGMMA 64x128x32.U8.S8; its tile takes 4"),
        ({"IGMMA_64x16x32_U8_S8": 32}, "32 IGMMA 64x16x32.U8.S8; its tile takes 0"),
        ({"HGMMA_64x128x16_F32": 4}, "4 HGMMA 64x128x16.F32; its tile takes 0"),
        ({"WARPGROUP_ARRIVE": 12}, "12 WARPGROUP.ARRIVE; its tile takes 4"),
        ({"USETMAXREG_DEALLOC_CTAPOOL": 0}, "0 USETMAXREG.DEALLOC; its tile takes 1"),
        ({"UTMALDG_4D": 0}, "no UTMALDG: its tiles do not come by TMA"),
        ({"LDG_E_U8": 1}, "loads of [1] bytes"),
        ({"STG_E_64": 1}, "stores of [8] bytes"),
        (
            {"loops": (OTHER_LOOP, loop(IGMMA_64x64x32_S8_S8=5))},
            "5 IGMMA 64x64x32.S8.S8 in the loop at 0x7900; its tile takes 4",
        ),
        (
            {"loops": (loop(IGMMA_64x128x32_U8_S8=0),)},
            "0 IGMMA 64x128x32.U8.S8 in the loop at 0x7900; its tile takes 2",
        ),
        (
            {"loops": (loop(WARPGROUP_ARRIVE=6),)},
            "6 WARPGROUP.ARRIVE in the loop at 0x7900; its tile takes 2",
        ),
        ({"loops": (OTHER_LOOP,)}, "0 main loops; there must be 1"),
        ({"loops": (loop(), loop())}, "2 main loops; there must be 1"),
        ({"setmaxnreg": (24, 240, 24)}, "R24 in warps that keep 24 registers"),
        ({"registers": 160}, "504 registers are dealt out to 3 threads; the launch gave 480"),
        ({"setmaxnreg": ()}, "no USETMAXREG with a number before its loads"),
    ],
    ids=str,
)
def test_what_breaks_a_gate_is_named(changes: dict[str, Any], complaint: str) -> None:
    assert gates_q8_sm90.problems(code(**changes), INFO) == [f"{NAME}: {complaint}"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"stack_bytes": 8}, "stack is 8 bytes; it must be 0"),
        ({"STL": 1}, "1 loads and stores of local memory; there must be none"),
        ({"LDG_E_64": 1}, "loads of [8] bytes"),
        ({"STG_E_U8": 1}, "stores of [1] bytes"),
    ],
    ids=str,
)
def test_the_pass_that_makes_bytes_is_looked_at_too(changes: dict[str, Any], complaint: str) -> None:
    name = f"{NAME}_quantize"
    assert gates_q8_sm90.problems(making_bytes(**changes), INFO) == [f"{name}: {complaint}"]
