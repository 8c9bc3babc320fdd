"""Prices of decoding whose keys come from the DRAM, and how many CTAs share them there, on an H200."""

from __future__ import annotations

import pytest

from sdpa_cutlass import Family
from sdpa_cutlass.choice import select
from sdpa_cutlass.choice.cost import model_of
from sdpa_cutlass.choice.cost.model import beside_dram
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from tests.library.decoding import H200_WITH_DRAM, made_problem, price, row_of


def splits_of(tile: str, **sizes: int) -> int:
    """CTAs that should share a tile of one query, on an H200."""
    name = f"fmha_fwd_sm89_{tile}_f16_general_split"
    row = row_of(name)
    problem = made_problem(**sizes)
    return model_of(row, problem, H200_WITH_DRAM).cost(problem)[1]


@pytest.mark.parametrize(("heads", "num_splits"), [(67, 3), (68, 3), (132, 1), (133, 5), (600, 1)])
def test_tiles_come_even_where_the_dram_waits_for_a_few_sms(heads: int, num_splits: int) -> None:
    """16K keys, head_dim 184: 68 heads took 233 µs on an H200 with a CTA each, 207 with three."""
    for keys, expected in ((16384, num_splits), (512, 1)):  # the second lie in the L2 cache of an H200
        sizes = {"num_heads_q": heads, "num_heads_kv": heads, "seqlen_k": keys, "head_dim": 184}
        assert splits_of("d192_m16n16_s1_w4_g4", **sizes) == expected


def test_few_heads_of_keys_come_even_too() -> None:
    """16 x 3 heads of head_dim 80, 41,350 keys: 150 µs on an H200 with five CTAs each, 178 by wgmma."""
    sizes = {"batch": 16, "num_heads_q": 3, "num_heads_kv": 3, "seqlen_k": 41350, "head_dim": 80}
    assert splits_of("d128_m16n32_s1_w4_g4", **sizes) == 5


def test_tiles_of_two_kv_groups_come_even() -> None:
    """16 batches of 38 heads over 19, head_dim 32: 72 µs on an H200 with a CTA each, 59 with two.

    What is chosen is three, which was not timed.
    """
    sizes = {"batch": 16, "num_heads_q": 38, "num_heads_kv": 19, "seqlen_k": 5795, "head_dim": 32}
    assert splits_of("d64_m16n32_s1_w2_g2", **sizes) > 1


def test_tiles_that_are_a_few_more_than_run_at_once_are_split() -> None:
    """352 tiles of head_dim 40 next to 16K keys took 277 µs on an H200 with a CTA each, 230 with three."""
    sizes = {"batch": 8, "num_heads_q": 44, "num_heads_kv": 44, "seqlen_k": 16384, "head_dim": 40}
    assert splits_of("d64_m16n64_s1_w4_g4", **sizes) > 1
    assert splits_of("d64_m16n64_s1_w4_g4", **sizes | {"batch": 16}) == 1


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("fmha_fwd_sm89_d32_m32n128_s1_w4_g2_f16", 32), ("fmha_fwd_sm90_d128_m128n128_s2_w12_f16", 128)],
)
def test_no_price_is_below_what_the_dram_takes(name: str, head_dim: int) -> None:
    """The SMs alone would take less."""
    for batch in (16, 28, 64):
        problem = made_problem(
            batch=batch, num_heads_q=14, num_heads_kv=14, seqlen_q=16, seqlen_k=16384, head_dim=head_dim
        )
        assert price(name, problem) > H200_WITH_DRAM.dram_us(problem.bytes)
    assert beside_dram(1000.0, 0.0) == 1000.0
    assert 1000 < beside_dram(1000.0, 500.0) < 1001
    assert 1050 < beside_dram(1000.0, 1000.0) < 1100


def test_the_last_tiles_of_keys_from_the_dram_share_sms_as_the_first_do() -> None:
    """448 tiles of head_dim 32 next to 16K keys, of which 396 run at once: 269 µs on an H200."""
    prices = [
        price(
            "fmha_fwd_sm89_d32_m32n128_s1_w4_g2_f16",
            made_problem(batch=batch, num_heads_q=14, num_heads_kv=14, seqlen_k=16384, head_dim=32),
        )
        for batch in (28, 32)
    ]
    assert prices[1] > 1.25 * prices[0]


def test_split_kernels_compete_where_their_tiles_are_no_taller_than_plain_ones() -> None:
    """The same problem took 269 µs with the plain kernel and 219 with a split one that splits nothing."""
    problem = made_problem(batch=32, num_heads_q=14, num_heads_kv=14, seqlen_k=16384, head_dim=32)
    kernel, _ = select.ranking(library(Target.HOST), problem, Family.FMHA_FWD, H200_WITH_DRAM)[0]
    assert kernel.is_split
