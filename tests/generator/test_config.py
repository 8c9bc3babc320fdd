"""Names, and the resources that follow from a config."""

from __future__ import annotations

import keyword
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator import config, rules
from generator.config import Arch, DType, Family, InvalidNameError, KernelConfig, Tile, parse

small = st.integers(1, 999_999)
tiles = st.builds(
    Tile, block_m=small, block_n=small, stages=small, warps=small, kv_groups=small, q_in_regs=st.booleans()
)
any_config = st.builds(
    KernelConfig,
    family=st.sampled_from(Family),
    arch=st.sampled_from(Arch),
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
    Tile,
    block_m=st.sampled_from((16, 32, 64, 96, 128, 192)),
    block_n=st.sampled_from((16, 32, 48, 64, 96, 128)),
    stages=st.integers(1, 4),
    warps=st.sampled_from((1, 2, 3, 4, 6, 8, 16)),
    kv_groups=st.sampled_from((1, 1, 2, 4, 8)),
    q_in_regs=st.booleans(),
)
sane_config = st.builds(
    KernelConfig,
    family=st.sampled_from(Family),
    arch=st.sampled_from(Arch),
    dtype=st.sampled_from(DType),
    head_dim=st.sampled_from((16, 32, 48, 64, 80, 96, 112, 128, 192, 256)),
    tile=sane_tiles,
    causal=st.booleans(),
)


@given(any_config)
def test_name_round_trip(c: KernelConfig) -> None:
    assert parse(c.name) == c


@given(tiles)
def test_tile_name_round_trip(tile: Tile) -> None:
    assert Tile.parse(tile.name) == tile


@given(any_config)
def test_name_is_a_symbol_that_ptxas_treats_like_any_other(c: KernelConfig) -> None:
    assert c.name.isidentifier()
    assert c.name.isascii()
    assert not keyword.iskeyword(c.name)
    assert "cutlass" not in c.name


@given(any_config)
def test_name_begins_with_its_group(c: KernelConfig) -> None:
    assert c.unit == f"units/{c.group}.cu"
    if c.family is Family.FMHA_FWD:
        assert c.name.startswith(f"{c.group}_{c.dtype.value}")
    else:
        assert c.name.replace(f"_d{c.head_dim}", "").startswith(f"{c.group}_{c.dtype.value}")


def test_name_follows_the_grammar() -> None:
    c = KernelConfig(
        family=Family.FMHA_FWD,
        arch=Arch.SM89,
        dtype=DType.BF16,
        head_dim=96,
        tile=Tile(block_m=32, block_n=64, stages=3, warps=8, kv_groups=4, q_in_regs=True),
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


@pytest.mark.parametrize(
    "name",
    [
        "",
        "fmha_fwd",
        "fmha_fwd_sm89_d64_m128n64_s2_w4",  # a group
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f32",
        "fmha_fwd_sm90_d64_m128n64_s2_w4_f16",
        "fmha_bwd_sm89_d64_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d064_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d0_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_g1_f16",  # two names for one kernel
        "fmha_fwd_sm89_d64_m128n64_s2_w4_qreg_g2_f16",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_dropout_causal",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general_causal",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_dropout_general",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_split_general",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general_split_dropout",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_unbiased_general",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_causal ",
        "fmha_fwd_sm89_d64_m128n64_s2_w4_f16\n",
        "fmha_fwd_sm89_d64_m128n64_s٢_w4_f16",  # a digit, but not an ASCII one
        "xfmha_fwd_sm89_d64_m128n64_s2_w4_f16",
        "fmha_fwd_sm89_d64_m99999999n64_s2_w4_f16",
    ],
)
def test_other_names_are_refused_with_the_grammar(name: str) -> None:
    with pytest.raises(InvalidNameError, match="not a kernel name; the grammar is") as error:
        parse(name)
    assert repr(name) in str(error.value)


@pytest.mark.parametrize("name", ["m128n64", "m128n64_s2_w4_g1", "m128n64_s2_w4 ", "m128n64_w4_s2"])
def test_other_tile_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidNameError, match=re.escape(repr(name))):
        Tile.parse(name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_m", 0), ("block_n", -64), ("stages", True), ("warps", 4.0), ("block_m", "64"), ("q_in_regs", 1)],
)
def test_values_of_other_types_are_refused(field: str, value: object) -> None:
    good = {"block_m": 64, "block_n": 64, "stages": 1, "warps": 4}
    with pytest.raises(ValueError, match=field):
        Tile(**{**good, field: value})  # type: ignore[arg-type]


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
    assert c.registers == 64 + 128 + 64 + config.REGISTERS_BESIDE_ACCUMULATORS
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
        "split": [""],
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
        tile = Tile(block_m=m, block_n=n, stages=1, warps=warps, kv_groups=groups, q_in_regs=q_in_regs)
        c = _fused(tile.name, head_dim)
        if rules.refusal(c) is not None:
            continue
        legal += 1
        limits = c.arch.limits
        assert c.ctas_per_sm * (c.smem_bytes + limits.smem_reserved_per_cta) <= limits.smem_per_sm
        assert c.ctas_per_sm * tile.threads <= limits.threads_per_sm
        registers = min(c.registers, limits.registers_for(tile.threads))
        assert c.ctas_per_sm * tile.threads * registers <= limits.registers_per_sm
    assert legal > 50


@given(sane_config)
def test_resources_do_not_depend_on_the_variant(c: KernelConfig) -> None:
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
def test_resources_are_defined_for_any_config(c: KernelConfig) -> None:
    assert c.smem_bytes > 0
    assert c.registers > 0
    assert c.ctas_per_sm >= 1


def _fused(tile: str, head_dim: int) -> KernelConfig:
    return parse(f"fmha_fwd_sm89_d{head_dim}_{tile}_f16")
