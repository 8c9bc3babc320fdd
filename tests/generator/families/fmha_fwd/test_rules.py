"""Every rule refuses what it is there for, and lets its nearest legal neighbour pass."""

from __future__ import annotations

import re

import pytest

from generator.core.arch import Arch
from generator.core.family import TEMPLATES
from generator.families import FAMILIES
from generator.families.fmha_fwd.rules import RULES, load_rows_per_pass

# rule, a kernel that breaks it, a word of the reason, a legal neighbour
EXAMPLES = [
    (
        "dropout",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_dropout",
        "only the general",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general_dropout",
    ),
    (
        "dropout",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_causal_dropout",
        "only the general",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_causal",
    ),
    (
        "split",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_f16_split",
        "a split kernel is general",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_f16_general_split",
    ),
    (
        "split",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_f16_general_dropout_split",
        "no dropout",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_f16_general_dropout",
    ),
    (
        "split",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_qreg_f16_general_split",
        "no Q in registers",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general_split",
    ),
    (
        "unbiased",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_unbiased",
        "an unbiased kernel is general",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general_unbiased",
    ),
    (
        "unbiased",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general_dropout_unbiased",
        "without dropout",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general_dropout",
    ),
    (
        "unbiased",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_f16_general_split_unbiased",
        "not split",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_f16_general_split",
    ),
    (
        "general_causal",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_causal_general",
        "run time",
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general",
    ),
    ("head_dim", "fmha_fwd_sm89_d72_m64n64_s1_w4_f16", "72", "fmha_fwd_sm89_d80_m64n64_s1_w4_f16"),
    ("head_dim", "fmha_fwd_sm89_d272_m32n32_s1_w2_f16", "272", "fmha_fwd_sm89_d256_m32n32_s1_w2_f16"),
    ("warps", "fmha_fwd_sm89_d64_m288n144_s1_w18_f16", "18", "fmha_fwd_sm89_d64_m256n64_s1_w16_f16"),
    ("kv_groups", "fmha_fwd_sm89_d96_m32n48_s1_w6_g3_f16", "3", "fmha_fwd_sm89_d96_m32n48_s1_w4_g2_f16"),
    (
        "kv_groups_divide_warps",
        "fmha_fwd_sm89_d32_m32n32_s1_w5_g4_f16",
        "5",
        "fmha_fwd_sm89_d32_m32n32_s1_w8_g4_f16",
    ),
    (
        "kv_groups_divide_head_dim",
        "fmha_fwd_sm89_d80_m32n32_s1_w8_g4_f16",
        "do not divide head_dim 80",
        "fmha_fwd_sm89_d96_m32n32_s1_w8_g4_f16",
    ),
    ("block_m", "fmha_fwd_sm89_d64_m96n64_s1_w4_f16", "64", "fmha_fwd_sm89_d64_m128n64_s1_w4_f16"),
    ("block_n", "fmha_fwd_sm89_d64_m16n24_s1_w1_f16", "24", "fmha_fwd_sm89_d64_m16n32_s1_w1_f16"),
    (
        "general_block_n",
        "fmha_fwd_sm89_d64_m64n48_s1_w4_f16_general",
        "do not divide block_n 48",
        "fmha_fwd_sm89_d64_m64n48_s1_w4_f16",
    ),
    (
        "general_block_n",
        "fmha_fwd_sm89_d64_m64n48_s1_w4_f16_general_dropout",
        "do not divide block_n 48",
        "fmha_fwd_sm89_d64_m64n32_s1_w4_f16_general_dropout",
    ),
    (
        "general_block_n",
        "fmha_fwd_sm89_d64_m32n48_s1_w4_g2_f16_general",
        "do not divide block_n 48",
        "fmha_fwd_sm89_d64_m32n48_s1_w4_g2_f16_general_split",
    ),
    ("stages", "fmha_fwd_sm89_d32_m64n64_s5_w4_f16", "5", "fmha_fwd_sm89_d32_m64n64_s4_w4_f16"),
    (
        "kv_groups_stages",
        "fmha_fwd_sm89_d32_m32n32_s2_w4_g2_f16",
        "rings of 3",
        "fmha_fwd_sm89_d32_m32n32_s1_w4_g2_f16",
    ),
    (
        "q_in_regs",
        "fmha_fwd_sm89_d64_m32n64_s1_w4_g2_qreg_f16",
        "2",
        "fmha_fwd_sm89_d64_m32n64_s1_w2_qreg_f16",
    ),
    ("load", "fmha_fwd_sm89_d80_m64n32_s1_w4_f16", "64", "fmha_fwd_sm89_d80_m64n64_s1_w4_f16"),
    ("load", "fmha_fwd_sm89_d96_m64n48_s1_w4_f16", "32", "fmha_fwd_sm89_d96_m64n96_s1_w4_f16"),
    ("smem", "fmha_fwd_sm89_d128_m128n64_s3_w8_f16", "131072", "fmha_fwd_sm89_d128_m128n64_s2_w8_f16"),
    (
        "registers",
        "fmha_fwd_sm89_d128_m128n128_s1_w4_f16",
        "311",
        "fmha_fwd_sm89_d128_m128n64_s1_w4_f16",
    ),
]


@pytest.mark.parametrize(("rule", "refused", "word", "legal"), EXAMPLES)
def test_rule(rule: str, refused: str, word: str, legal: str) -> None:
    kernel = FAMILIES.parse(refused)
    complaints = {rule.name: why for rule in RULES if (why := rule.why_not(kernel)) is not None}
    assert next(iter(complaints)) == rule
    assert set(complaints) <= {rule, "registers"}  # many warps also leave each of them few registers
    assert word in complaints[rule]
    assert FAMILIES.refusal(kernel) == f"{rule}: {complaints[rule]}"
    assert FAMILIES.refusal(FAMILIES.parse(legal)) is None


def test_every_rule_has_an_example() -> None:
    assert {rule for rule, *_ in EXAMPLES} == {rule.name for rule in RULES}


# What FlashAttention 2 and 3 chose for these cards has to stay within reach of the tuner.
@pytest.mark.parametrize(
    "name",
    [
        "fmha_fwd_sm89_d64_m128n128_s1_w4_f16",
        "fmha_fwd_sm89_d64_m128n112_s1_w4_f16",
        "fmha_fwd_sm89_d96_m128n64_s1_w4_f16",
        "fmha_fwd_sm89_d128_m128n32_s1_w4_f16",
        "fmha_fwd_sm89_d128_m64n64_s1_w4_f16",
        "fmha_fwd_sm89_d128_m128n128_s1_w8_qreg_f16",
    ],
)
def test_known_good_tiles_are_legal(name: str) -> None:
    assert FAMILIES.refusal(FAMILIES.parse(name)) is None


def test_the_loads_of_q_need_no_rule() -> None:
    """Rows of one pass of a group's loads divide block_m whenever the MMA's rows do, for every head_dim."""
    checked = 0
    for head_dim in range(16, 257, 16):
        for warps in range(1, 17):
            for mma_m in (1, 2, 3):
                block_m = 16 * warps * mma_m
                c = FAMILIES.parse(f"fmha_fwd_sm89_d{head_dim}_m{block_m}n64_s1_w{warps}_f16")
                assert block_m % load_rows_per_pass(c) == 0
                checked += 1
    assert checked == 16 * 16 * 3


def test_the_kernels_assert_the_shared_memory_that_the_rules_grant() -> None:
    text = (TEMPLATES / "include/sdpa/fmha_fwd/kernel_traits.cuh").read_text(encoding="utf-8")
    granted = re.findall(r"^inline constexpr int kMaxSmemBytes = (\d+);$", text, re.MULTILINE)
    assert granted == [str(Arch.SM89.limits.smem_per_cta)]
