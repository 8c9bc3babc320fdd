"""Every rule refuses what it is there for, and lets its nearest legal neighbour pass."""

from __future__ import annotations

import pytest

from generator.families import FAMILIES
from generator.families.unfused.rules import RULES

# rule, a kernel that breaks it, a word of the reason, a legal neighbour
EXAMPLES = [
    ("head_dim", "unfused_sm89_d144_m64n64_s3_w4_f16", "up to 128", "unfused_sm89_d128_m64n64_s3_w4_f16"),
    ("stages", "unfused_sm89_d64_m64n64_s2_w4_f16", "2", "unfused_sm89_d64_m64n64_s3_w4_f16"),
    ("unfused_warps", "unfused_sm89_d64_m64n128_s3_w2_f16", "2", "unfused_sm89_d64_m64n128_s3_w4_f16"),
    ("unfused_block", "unfused_sm89_d64_m96n128_s3_w4_f16", "96", "unfused_sm89_d64_m128n128_s3_w4_f16"),
    ("unfused_warp_tile", "unfused_sm89_d64_m64n64_s3_w8_f16", "512", "unfused_sm89_d64_m64n128_s3_w8_f16"),
    ("smem", "unfused_sm89_d64_m256n128_s5_w8_f16", "122880", "unfused_sm89_d64_m256n128_s4_w8_f16"),
    ("registers", "unfused_sm89_d64_m256n128_s3_w4_f16", "311", "unfused_sm89_d64_m256n128_s3_w8_f16"),
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
