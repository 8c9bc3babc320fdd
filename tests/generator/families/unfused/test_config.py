"""Names of the baseline's rows, what they take, and the resources of their first GEMM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generator.core.kernel import DType, Op, Takes, Tile
from generator.core.tags import InvalidNameError
from generator.families import FAMILIES
from generator.families.unfused.config import Unfused

small = st.integers(1, 999_999)
any_config = st.builds(
    Unfused,
    arch=st.sampled_from(Unfused.archs),
    dtype=st.sampled_from(DType),
    head_dim=small,
    tile=st.builds(Tile, block_m=small, block_n=small, stages=small, warps=small),
    causal=st.booleans(),
)
ROW = Unfused.parse("unfused_sm89_d64_m128n128_s3_w4_f16")


@given(any_config)
def test_name_round_trip(c: Unfused) -> None:
    assert FAMILIES.parse(c.name) == c


@given(any_config)
def test_a_unit_holds_all_head_dims_dtypes_and_variants(c: Unfused) -> None:
    assert c.unit == f"units/{c.group}.cu"
    assert c.name.replace(f"_d{c.head_dim}", "").startswith(f"{c.group}_{c.dtype.value}")
    assert replace(c, head_dim=1, dtype=DType.F16, causal=False).unit == c.unit


@given(any_config)
def test_resources_are_defined_for_any_config(c: Unfused) -> None:
    assert c.smem_bytes > 0
    assert c.registers > 0
    assert c.ctas_per_sm >= 1


def test_name_follows_the_grammar() -> None:
    assert Unfused.grammar() == (
        "unfused_<arch>_d<head_dim>_m<block_m>n<block_n>_s<stages>_w<warps>_<dtype>[_causal]"
    )


@pytest.mark.parametrize("word", ["general", "dropout", "split", "unbiased", "general_split"])
def test_a_gemm_has_no_masks_dropout_or_splits(word: str) -> None:
    with pytest.raises(InvalidNameError, match="the grammar is unfused_"):
        FAMILIES.parse(f"{ROW.name}_{word}")


@pytest.mark.parametrize("tile", ["m64n64_s3_w4_g2", "m64n64_s3_w4_qreg"])
def test_a_gemm_has_neither_kv_groups_nor_q_in_registers(tile: str) -> None:
    with pytest.raises(InvalidNameError, match="the grammar is unfused_"):
        FAMILIES.parse(f"unfused_sm89_d64_{tile}_f16")


def test_what_a_row_takes() -> None:
    assert ROW.takes == Takes.FULL | Takes.UNDROPPED
    assert replace(ROW, causal=True).takes == Takes.CAUSAL | Takes.UNDROPPED
    assert ROW.op is Op.FORWARD
    assert ROW.details == {"block_m": 128, "block_n": 128, "stages": 3, "warps": 4}
    assert ROW.functions == ()


def test_resources() -> None:
    """Of the first GEMM: three stages of 32 columns of both operands, 128 outputs a thread."""
    assert ROW.smem_bytes == 3 * (128 + 128) * 32 * 2
    assert ROW.accumulator_registers == 128
    assert ROW.ctas_per_sm == 2  # 102400 // (49152 + 1024); registers: 65536 // (128 * 192)
