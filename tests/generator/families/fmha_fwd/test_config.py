"""Names of the fused kernels, what they take, and the resources that follow from a config."""

from __future__ import annotations

import keyword
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.core.arch import Arch
from generator.core.kernel import DType, Op, Takes
from generator.core.tags import InvalidNameError
from generator.families import FAMILIES
from generator.families.fmha_fwd import FMHA_FWD, config
from generator.families.fmha_fwd.config import FmhaFwd, FmhaTile

small = st.integers(1, 999_999)
tiles = st.builds(
    FmhaTile,
    block_m=small,
    block_n=small,
    stages=small,
    warps=small,
    kv_groups=small,
    q_in_regs=st.booleans(),
)
any_config = st.builds(
    FmhaFwd,
    arch=st.sampled_from(FmhaFwd.archs),
    dtype=st.sampled_from(DType),
    head_dim=small,
    tile=tiles,
    causal=st.booleans(),
    general=st.booleans(),
    dropout=st.booleans(),
    split=st.booleans(),
    unbiased=st.booleans(),
)
# Configs near what the rules allow, so that properties of legal ones are met often.
sane_tiles = st.builds(
    FmhaTile,
    block_m=st.sampled_from((16, 32, 64, 96, 128, 192)),
    block_n=st.sampled_from((16, 32, 48, 64, 96, 128)),
    stages=st.integers(1, 4),
    warps=st.sampled_from((1, 2, 3, 4, 6, 8, 16)),
    kv_groups=st.sampled_from((1, 1, 2, 4, 8)),
    q_in_regs=st.booleans(),
)
sane_config = st.builds(
    FmhaFwd,
    arch=st.sampled_from(FmhaFwd.archs),
    dtype=st.sampled_from(DType),
    head_dim=st.sampled_from((16, 32, 48, 64, 80, 96, 112, 128, 192, 256)),
    tile=sane_tiles,
    causal=st.booleans(),
)


@given(any_config)
def test_name_round_trip(c: FmhaFwd) -> None:
    assert FAMILIES.parse(c.name) == c


@given(tiles)
def test_tile_name_round_trip(tile: FmhaTile) -> None:
    assert FmhaTile.parse(tile.name) == tile


@given(any_config)
def test_name_is_a_symbol_that_ptxas_treats_like_any_other(c: FmhaFwd) -> None:
    assert c.name.isidentifier()
    assert c.name.isascii()
    assert not keyword.iskeyword(c.name)
    assert "cutlass" not in c.name


@given(any_config)
def test_name_begins_with_its_group(c: FmhaFwd) -> None:
    assert c.unit == f"units/{c.group}.cu"
    assert c.name.startswith(f"{c.group}_{c.dtype.value}")


def test_name_follows_the_grammar() -> None:
    assert FmhaFwd.grammar() == (
        "fmha_fwd_<arch>_d<head_dim>_m<block_m>n<block_n>_s<stages>_w<warps>[_g<kv_groups>][_qreg]_<dtype>"
        "[_causal][_general][_dropout][_split][_unbiased]"
    )
    c = FmhaFwd(
        arch=Arch.SM89,
        dtype=DType.BF16,
        head_dim=96,
        tile=FmhaTile(block_m=32, block_n=64, stages=3, warps=8, kv_groups=4, q_in_regs=True),
        causal=True,
        general=True,
        dropout=True,
        split=True,
        unbiased=True,
    )
    assert c.name == "fmha_fwd_sm89_d96_m32n64_s3_w8_g4_qreg_bf16_causal_general_dropout_split_unbiased"
    c = replace(c, unbiased=False)
    assert replace(c, causal=False, split=False).name.endswith("_bf16_general_dropout")
    assert replace(c, causal=False, dropout=False).name.endswith("_bf16_general_split")
    assert replace(c, general=False, dropout=False, split=False).name.endswith("_bf16_causal")


@pytest.mark.parametrize("name", ["m128n64", "m128n64_s2_w4_g1", "m128n64_s2_w4 ", "m128n64_w4_s2"])
def test_other_tile_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidNameError, match=re.escape(repr(name))):
        FmhaTile.parse(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_m", 0), ("block_n", -64), ("stages", True), ("warps", 4.0), ("block_m", "64"), ("q_in_regs", 1)],
)
def test_values_of_other_types_are_refused(field: str, value: object) -> None:
    good = {"block_m": 64, "block_n": 64, "stages": 1, "warps": 4}
    with pytest.raises(ValueError, match=field):
        FmhaTile(**{**good, field: value})  # type: ignore[arg-type]


def test_what_every_release_kernel_takes_is_what_its_words_mean() -> None:
    """As templates/src/c_api.cpp has it: check_is_plain, check_general and check_row."""
    for c in (c for c in FAMILIES.build("release").kernels if isinstance(c, FmhaFwd)):
        has_masks = c.general and not c.split
        due = {
            Takes.FULL: not c.causal,
            Takes.CAUSAL: c.causal or c.general,
            Takes.BOOL: has_masks,
            Takes.BIAS16: has_masks and not c.unbiased,
            Takes.BIAS32: has_masks and not c.unbiased,
            Takes.LENGTHS: c.general,
            Takes.PACKED: c.general,
            Takes.UNDROPPED: not c.dropout,
            Takes.DROPOUT: c.dropout,
            Takes.SMALLER_HEAD_DIM: c.general,
            Takes.SPLITS: c.split,
            Takes.WINDOW: c.general and not (c.dropout and c.tile.block_m == 128 and c.head_dim >= 64),
            Takes.SINKS: c.general,
        }
        assert {bit: bit in c.takes for bit in Takes} == due, c.name
        assert c.op is Op.FORWARD


def test_details_are_the_choices_of_the_tile() -> None:
    assert _fused("m32n64_s1_w8_g4", 64).details == {
        "block_m": 32,
        "block_n": 64,
        "stages": 1,
        "warps": 8,
        "kv_groups": 4,
        "q_in_regs": False,
    }


# Bytes counted by hand from the memory map in kernel_traits.cuh.
@pytest.mark.parametrize(
    ("tile", "head_dim", "smem_bytes"),
    [
        ("m128n64_s2_w4", 64, 128 * 64 * 2 + 2 * 2 * 64 * 64 * 2),
        ("m128n64_s1_w4", 80, 128 * 80 * 2 + 2 * 64 * 80 * 2),
        ("m128n128_s1_w8_qreg", 128, 2 * 128 * 128 * 2),  # V lies where Q was
        ("m128n32_s1_w8_qreg", 128, 128 * 128 * 2 + 32 * 128 * 2),  # Q is the larger of the two
        ("m32n128_s1_w4_g2", 64, 2 * 3 * 128 * 64 * 2),  # a ring of three tiles for each group, no Q
        ("m64n16_s1_w16_g4", 64, 4 * 64 * (64 + 8) * 4),  # the merge needs more than the ring
    ],
)
def test_smem_bytes(tile: str, head_dim: int, smem_bytes: int) -> None:
    assert _fused(tile, head_dim).smem_bytes == smem_bytes


# FlashAttention-2's tile for head_dim 64: two MMA row blocks a warp, O 64 registers, S 128, P 64.
def test_registers() -> None:
    c = _fused("m128n128_s1_w4", 64)
    assert c.accumulator_registers == 64 + 128
    assert c.registers == 64 + 128 + 64 + config.OTHER_REGISTERS
    assert _fused("m128n128_s1_w4_qreg", 64).registers == c.registers + 32
    assert _fused("m128n128_s1_w8", 64).accumulator_registers == c.accumulator_registers // 2


# A step's mask: two rows of a thread for each MMA row block, four registers for each 32 keys.
@pytest.mark.parametrize(
    ("tile", "mask_registers"),
    [("m64n64_s1_w4", 2 * 2 * 4), ("m128n64_s1_w4", 4 * 2 * 4), ("m32n128_s1_w4_g2", 2 * 4 * 4)],
)
def test_registers_of_general_kernels(tile: str, mask_registers: int) -> None:
    plain = _fused(tile, 64)
    general = replace(plain, general=True)
    dropout = replace(general, dropout=True)
    assert general.registers == plain.registers + mask_registers
    assert dropout.registers == plain.registers + config.DROPOUT_REGISTERS
    assert plain.accumulator_registers == general.accumulator_registers == dropout.accumulator_registers


def test_a_function_for_each_kind_of_mask() -> None:
    general = replace(_fused("m64n64_s1_w4", 64), general=True)
    words = {
        name: [function.symbol.removeprefix(config.name) for function in config.functions]
        for name, config in {
            "plain": replace(general, general=False),
            "general": general,
            "unbiased": replace(general, unbiased=True),
            "split": replace(general, split=True),
        }.items()
    }
    assert words == {
        "plain": [""],
        "general": ["", "_bool", "_bias16", "_bias32"],
        "unbiased": ["", "_bool"],
        "split": ["", "_merge"],
    }


def test_split_kernels_need_no_registers_for_masks() -> None:
    plain = _fused("m32n64_s1_w8_g4", 64)
    split = replace(plain, general=True, split=True)
    assert (split.registers, split.ctas_per_sm) == (plain.registers, plain.ctas_per_sm)


def test_masks_can_cost_a_cta() -> None:
    plain = _fused("m64n96_s1_w4", 32)
    general = replace(plain, general=True)
    assert (plain.ctas_per_sm, general.ctas_per_sm) == (3, 2)
    assert replace(general, dropout=True).ctas_per_sm == 3


@pytest.mark.parametrize(
    ("tile", "head_dim", "ctas_per_sm", "bound"),
    [
        ("m128n64_s2_w4", 64, 2, "shared memory"),  # 102400 // (49152 + 1024)
        ("m64n64_s1_w4", 32, 4, "registers"),  # 65536 // (128 * 128)
        ("m32n64_s1_w8_g4", 64, 1, "shared memory"),
        ("m128n64_s1_w8_qreg", 128, 1, "registers"),  # 65536 // (256 * 208)
    ],
)
def test_ctas_per_sm(tile: str, head_dim: int, ctas_per_sm: int, bound: str) -> None:
    c = _fused(tile, head_dim)
    assert c.ctas_per_sm == ctas_per_sm
    assert c.ctas_per_sm_by[bound] == min(c.ctas_per_sm_by.values())


def test_promised_ctas_fit_one_sm() -> None:
    legal = 0
    for m, n, warps, groups, q_in_regs, head_dim in product(
        (32, 128, 256), (64, 128), (1, 2, 4, 8, 12, 16), (1, 4), (False, True), (32, 64, 80, 128, 256)
    ):
        tile = FmhaTile(block_m=m, block_n=n, stages=1, warps=warps, kv_groups=groups, q_in_regs=q_in_regs)
        c = _fused(tile.name, head_dim)
        if FMHA_FWD.refusal(c) is not None:
            continue
        legal += 1
        limits = c.arch.limits
        assert c.ctas_per_sm * (c.smem_bytes + limits.smem_reserved_per_cta) <= limits.smem_per_sm
        assert c.ctas_per_sm * tile.threads <= limits.threads_per_sm
        registers = min(c.registers, limits.registers_for(tile.threads))
        assert c.ctas_per_sm * tile.threads * registers <= limits.registers_per_sm
    assert legal > 50


@given(sane_config)
def test_resources_do_not_depend_on_the_variant(c: FmhaFwd) -> None:
    """One unit holds all variants and asserts shared memory once; masks and dropout cost registers."""
    for dtype, causal, general, dropout, split, unbiased in product(DType, *[(False, True)] * 5):
        flags = {
            "causal": causal,
            "general": general,
            "dropout": dropout,
            "split": split,
            "unbiased": unbiased,
        }
        other = replace(c, dtype=dtype, **flags)
        assert other.unit == c.unit
        assert other.smem_bytes == c.smem_bytes
        assert other.ctas_per_sm <= c.ctas_per_sm
        has_masks = general and not split
        assert has_masks or dropout or other.ctas_per_sm == c.ctas_per_sm


@given(any_config)
def test_resources_are_defined_for_any_config(c: FmhaFwd) -> None:
    assert c.smem_bytes > 0
    assert c.registers > 0
    assert c.ctas_per_sm >= 1


def _fused(tile: str, head_dim: int) -> FmhaFwd:
    return FmhaFwd.parse(f"fmha_fwd_sm89_d{head_dim}_{tile}_f16")
