"""What is derived for Hopper's kernels, and what breaks a gate."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sdpa_cutlass.library.registry import Family, KernelInfo, Takes
from sdpa_cutlass.machine_code import gates_sm90
from sdpa_cutlass.machine_code.kernels import KernelCode
from sdpa_cutlass.machine_code.mix import Mix
from tests.kernel_rows import kernel_row

INFO = kernel_row(
    "fmha_fwd_sm90_d80_m192n112_s3_w16_f16", family=Family.FMHA_FWD_SM90, arch=90, head_dim=80,
    block_m=192, block_n=112, stages=3, warps=16,
)  # fmt: skip
# Q Kᵀ twice in 5 steps, P V twice in 7; 2 · (2 · 28 + 2) ex2; five boxes of 16 columns
GOOD_MIX = {
    "HGMMA.64x112x16.F32": 10, "HGMMA.64x80x16.F32": 14, "MUFU.EX2": 116, "MUFU.RCP": 2, "UTMASTG.4D": 5,
    "UTMALDG.4D": 40, "USETMAXREG.DEALLOC.CTAPOOL": 1, "USETMAXREG.TRY_ALLOC.CTAPOOL": 1, "STG.E": 2,
    "WARPGROUP.ARRIVE": 4,
}  # fmt: skip


GENERAL = dataclasses.replace(
    INFO,
    name=f"{INFO.name}_general",
    takes=INFO.takes | Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.WINDOW | Takes.SINKS,
)


def code(stack_bytes: int = 0, setmaxnreg: tuple[int, ...] = (32, 160, 31), **changes: int) -> KernelCode:
    """GOOD_MIX with some counts changed: names with _ for the dots."""
    opcodes = GOOD_MIX | {name.replace("_", "."): count for name, count in changes.items()}
    return KernelCode(
        name=INFO.name, arch=90, compiler="13.0.88", registers=128, stack_bytes=stack_bytes,
        static_smem_bytes=0, code_bytes=1, mix=Mix({name: count for name, count in opcodes.items() if count}),
        loops=(), setmaxnreg=setmaxnreg,
    )  # fmt: skip


def test_good_code_has_no_problems() -> None:
    assert gates_sm90.problems(code(), INFO) == []


def test_a_shape_that_serves_both_products_is_counted_once() -> None:
    square = dataclasses.replace(
        INFO, head_dim=128, details=(("block_m", 128), ("block_n", 128), ("warps", 12))
    )
    assert gates_sm90.expected(square)["HGMMA 64x128x16"] == 32


def test_a_general_kernel_reads_lengths_and_sinks() -> None:
    assert gates_sm90.problems(code(MUFU_EX2=120, LDG_E=31, LDG_E_U16=2), GENERAL) == []
    assert any("116 MUFU.EX2" in line for line in gates_sm90.problems(code(LDG_E=31), GENERAL))
    loads = gates_sm90.problems(code(MUFU_EX2=120, LDG_E_128=1), GENERAL)
    assert any("loads of [16] bytes from global memory" in line for line in loads), loads


SPLIT = dataclasses.replace(GENERAL, name=f"{GENERAL.name}_split", takes=GENERAL.takes | Takes.SPLITS)


def test_a_split_kernel_leaves_parts_and_merges_them() -> None:
    merge = f"{SPLIT.name}_merge"
    assert gates_sm90.rows((INFO, SPLIT)) == {INFO.name: INFO, SPLIT.name: SPLIT, merge: SPLIT}
    assert gates_sm90.problems(code(MUFU_EX2=120, STG_E_64=40), SPLIT) == []
    assert gates_sm90.problems(code(MUFU_EX2=120, STG_E_64=40), GENERAL) != []
    merging = dataclasses.replace(
        code(), name=merge, mix=Mix({"LDG.E.128": 16, "LDG.E.64": 16, "STG.E.64": 1})
    )
    assert gates_sm90.problems(merging, SPLIT) == []
    for opcode in ("LDG.E.U8", "STG.E.128", "STL"):
        wrong = dataclasses.replace(merging, mix=Mix({**merging.mix.opcodes, opcode: 1}))
        assert len(gates_sm90.problems(wrong, SPLIT)) == 1


PAIR = kernel_row(
    "fmha_fwd_sm90_d256_m128n64_s2_w12_c2_f16_causal", family=Family.FMHA_FWD_SM90, arch=90, head_dim=256,
    block_m=128, block_n=64, stages=2, warps=12, cluster=2,
)  # fmt: skip


def pair_code(setmaxnreg: tuple[int, ...] = (40, 232, 24), **changes: int) -> KernelCode:
    """What a pair of CTAs has, with some counts changed."""
    barrier = {name: changes.pop(name, 1) for name in ("UCGABAR_ARV", "UCGABAR_WAIT")}
    usual = {
        "HGMMA_64x112x16_F32": 0, "HGMMA_64x80x16_F32": 0, "HGMMA_64x64x16_F32": 32, "HGMMA_64x256x16_F32": 8,
        "MUFU_EX2": 68, "UTMASTG_4D": 4, "UTMALDG_4D": 16, "UTMALDG_4D_MULTICAST": 16,
    }  # fmt: skip
    made = code(setmaxnreg=setmaxnreg, **usual | changes)
    return dataclasses.replace(made, registers=168, mix=Mix({**made.mix.opcodes, **barrier}))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, ""),
        ({"UTMALDG_4D_MULTICAST": 0}, "0 UTMALDG.MULTICAST; pairs of CTAs load K and V so"),
        ({"UCGABAR_WAIT": 0}, "0 UCGABAR_WAIT; its tile takes 1"),
        ({"setmaxnreg": (24, 240, 20)}, "24 and 240 registers are dealt out; pairs have (40, 232)"),
    ],
)
def test_what_pairs_of_ctas_have(changes: dict[str, Any], complaint: str) -> None:
    found = gates_sm90.problems(pair_code(**changes), PAIR)
    assert len(found) == bool(complaint), found
    assert all(complaint in line for line in found)


MASKED = dataclasses.replace(GENERAL, takes=GENERAL.takes | Takes.BOOL | Takes.BIAS16 | Takes.BIAS32)
DROPPING = dataclasses.replace(
    MASKED, name=f"{MASKED.name}_dropout", takes=MASKED.takes & ~Takes.UNDROPPED | Takes.DROPOUT
)


def test_a_row_has_a_function_for_each_kind_of_mask_and_one_for_blocks() -> None:
    words = ("bool", "bias16", "bias32", "mask_blocks")
    names = [MASKED.name, *(f"{MASKED.name}_{word}" for word in words)]
    assert gates_sm90.rows((INFO, MASKED)) == {INFO.name: INFO, **dict.fromkeys(names, MASKED)}


@pytest.mark.parametrize(
    ("kernel", "mask", "widths"),
    [
        (MASKED, "", {2, 4}),
        (MASKED, "_bool", {1, 2, 4, 8, 16}),
        (MASKED, "_mask_blocks", {16}),
        (MASKED, "_bias16", {2, 4}),
        (MASKED, "_bias32", {2, 4, 8}),
        (DROPPING, "", {2, 4, 8}),
        (DROPPING, "_bool", {1, 2, 4, 8, 16}),
    ],
)
def test_a_masks_function_reads_its_elements_in_pairs_or_one_by_one(
    kernel: KernelInfo, mask: str, widths: set[int]
) -> None:
    opcodes = {1: "LDG_E_U8", 2: "LDG_E_U16", 4: "LDG_E", 8: "LDG_E_64", 16: "LDG_E_128"}
    for width, opcode in opcodes.items():
        made = dataclasses.replace(code(MUFU_EX2=120, **{opcode: 1}), name=kernel.name + mask)
        found = gates_sm90.problems(made, kernel)
        assert bool(found) == (width not in widths), (opcode, found)
        assert all(f"loads of [{width}] bytes" in line for line in found)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"stack_bytes": 16}, "stack is 16 bytes"),
        ({"STL": 1, "LDL": 2}, "3 loads and stores of local memory"),
        ({"HGMMA_64x112x16_F32": 0, "HGMMA_64x16x16_F32": 70}, "70 HGMMA 64x16x16; its tile takes 0"),
        ({"HGMMA_64x80x16_F32": 7}, "7 HGMMA 64x80x16; its tile takes 14"),
        ({"MUFU_EX2": 118}, "118 MUFU.EX2; its tile takes 116"),
        ({"USETMAXREG_DEALLOC_CTAPOOL": 0}, "0 USETMAXREG.DEALLOC; its tile takes 1"),
        ({"WARPGROUP_ARRIVE": 24}, "24 WARPGROUP.ARRIVE; its tile takes 4"),
        ({"UTMASTG_4D": 0}, "0 UTMASTG; its tile takes 5"),
        ({"UTMALDG_4D": 0}, "no UTMALDG"),
        ({"UTMALDG_4D_MULTICAST": 4}, "4 UTMALDG.MULTICAST; pairs of CTAs"),
        ({"setmaxnreg": (32, 160, 32)}, "R32 in warps that keep 32 registers"),
        ({"setmaxnreg": (40, 160, 31)}, "520 registers are dealt out to 4 threads; the launch gave 512"),
        ({"setmaxnreg": ()}, "no USETMAXREG"),
        ({"LDG_E": 1}, "loads of [4] bytes from global memory other than by TMA"),
        ({"STG_E_128": 1}, "stores of [16] bytes to global memory other than by TMA"),
    ],
)
def test_what_breaks_a_gate_is_named(changes: dict[str, Any], complaint: str) -> None:
    found = gates_sm90.problems(code(**changes), INFO)
    assert any(complaint in line for line in found), found
    assert all(line.startswith(f"{INFO.name}: ") for line in found)
