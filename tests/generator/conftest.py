"""Fixtures of the generator's tests, and the option that rewrites the goldens:

pytest tests/generator --update-goldens
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from generator.core.render import Sources
from generator.core.space import Space
from generator.families import FAMILIES

TINY = (
    "combine_sm89_d256_s4_w4_f16",
    "combine_sm89_d256_s4_w4_f32",
    "fmha_fwd_q8_sm89_d64_m128n64_s2_w4_bf16_int8",
    "fmha_fwd_q8_sm89_d64_m128n64_s2_w4_f16_int8qk",
    "fmha_fwd_q8_sm90_d128_m128n64_s4_w12_bf16_int8",
    "fmha_fwd_q8_sm90_d128_m128n64_s4_w12_f16_int8",
    "fmha_bwd_sm89_d64_m64n64_s2_w4_q64k64_bf16_dropout",
    "fmha_bwd_sm89_d64_m64n64_s2_w4_q64k64_f16",
    "fmha_bwd_fused_sm89_d64_m32n128_s2_w4_bf16",
    "fmha_bwd_fused_sm89_d64_m32n128_s2_w4_f16",
    "fmha_fwd_sm89_d64_m128n64_s2_w4_bf16_causal",
    "fmha_fwd_sm89_d64_m128n64_s2_w4_f16",
    "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general",
    "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general_dropout",
    "fmha_fwd_sm89_d64_m128n64_s2_w4_f16_general_unbiased",
    "fmha_fwd_sm89_d64_m32n64_s1_w8_g4_f16",
    "fmha_fwd_sm89_d64_m32n64_s1_w8_g4_f16_general_split",
    "fmha_fwd_sm90_d128_m128n128_s2_w12_f16_general",
    "fmha_fwd_sm90_d128_m128n128_s2_w12_f16_general_dropout",
    "fmha_fwd_sm90_d128_m192n80_s3_w16_bf16_causal",
    "fmha_fwd_sm90_d128_m192n80_s3_w16_f16",
    "fmha_fwd_sm90_d128_m192n80_s3_w16_f16_general",
    "unfused_sm89_d32_m64n64_s4_w4_bf16_causal",
    "unfused_sm89_d64_m64n64_s4_w4_f16",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="rewrite tests/generator/goldens")


@pytest.fixture
def update_goldens(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--update-goldens", default=False))


@pytest.fixture
def goldens() -> Path:
    return Path(__file__).parent / "goldens"


@pytest.fixture
def tiny() -> Space:
    """Units of every family: of the fused ones for both architectures, of the quantised ones too."""
    return Space(name="tiny", kernels=tuple(FAMILIES.parse(name) for name in TINY))


@pytest.fixture
def sources() -> Sources:
    """The real templates; the digest of the headers is fixed, since goldens are not about these."""
    return replace(Sources.load(), digest="0" * 64)
