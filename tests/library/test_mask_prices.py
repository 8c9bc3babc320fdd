"""Prices of masks: in blocks of few and of many keys, from the L2 cache and from the DRAM, on an H200."""

from __future__ import annotations

import pytest

from sdpa_cutlass import MaskType, Problem
from sdpa_cutlass.problem import MASK_ALIGNMENT
from tests.library.decoding import made_problem, price, row_of

HOPPER = "fmha_fwd_sm90_d96_m128n128_s2_w12_f16_general"


def masked(
    mask: MaskType | None, heads: int, rows: int, head_dim: int = 96, *, alignment: int = MASK_ALIGNMENT
) -> Problem:
    """As many keys as rows, and a mask that the heads share."""
    sizes = {"num_heads_q": heads, "num_heads_kv": heads, "seqlen_q": rows, "seqlen_k": rows}
    elements = rows * rows if mask else 0
    return made_problem(
        **sizes, head_dim=head_dim, mask=mask, mask_alignment=alignment, mask_elements=elements
    )


@pytest.mark.parametrize(
    ("name", "us"),
    [
        ("fmha_fwd_sm89_d96_m32n64_s1_w4_g2_f16_general", 138.3),
        (HOPPER, 160.8),
        ("fmha_fwd_sm89_d96_m128n64_s1_w4_f16_general_unbiased", 245.0),
    ],
)
def test_a_large_dense_mask_of_one_head_is_priced_as_it_was_timed(name: str, us: float) -> None:
    """8192 queries and keys of head_dim 96 (2026-11-29-h200-f16-random-eighth.json)."""
    assert price(name, masked(MaskType.BOOL, 1, 8192)) == pytest.approx(us, rel=0.2)


def wait(name: str, mask: MaskType, heads: int, rows: int, alignment: int = MASK_ALIGNMENT) -> float:
    """Microseconds that a mask adds for each block of keys of one CTA."""
    without, with_mask = (masked(kind, heads, rows, alignment=alignment) for kind in (None, mask))
    row = row_of(name)
    blocks = rows / (row.block_n * row.kv_groups)
    return (price(name, with_mask) - price(name, without)) / blocks


@pytest.mark.parametrize("mask", [MaskType.F16, MaskType.BOOL])
def test_a_warp_waits_longer_for_what_comes_from_the_dram(mask: MaskType) -> None:
    """One head: a CTA has its SM for itself. 50 MiB of L2 keep 12 of a mask next to K and V."""
    kept, too_large = (2048, 4096) if mask is MaskType.F16 else (3072, 8192)
    for name in ("fmha_fwd_sm89_d96_m64n64_s1_w4_f16_general", HOPPER):
        assert wait(name, mask, 1, too_large) > 1.15 * wait(name, mask, 1, kept)


def test_a_block_of_twice_the_keys_waits_less_than_twice_as_long() -> None:
    small, large = (f"fmha_fwd_sm89_d64_{tile}_f16_general" for tile in ("m64n64_s1_w4", "m32n128_s1_w4_g2"))
    ratio = wait(large, MaskType.F16, 1, 2048) / wait(small, MaskType.F16, 1, 2048)
    assert 1.5 < ratio < 2


def test_elements_of_16_bits_that_are_read_one_by_one_cost_more_than_booleans() -> None:
    name = "fmha_fwd_sm89_d96_m64n64_s1_w4_f16_general"
    booleans, halves = (wait(name, mask, 1, 2048, alignment=2) for mask in (MaskType.BOOL, MaskType.F16))
    assert 1.2 < halves / booleans < 2


def test_a_full_card_hides_what_hopper_waits_for() -> None:
    """Of 16 bits the most, of booleans from the DRAM all: their blocks may be hidden, and left out. With
    64 heads an SM has 32 tiles.
    """
    for mask, most in ((MaskType.F16, 0.75), (MaskType.BOOL, 0.6)):
        assert wait(HOPPER, mask, 64, 8192) / 32 < most * wait(HOPPER, mask, 1, 8192)


@pytest.mark.parametrize(("rows", "batch_heads"), [(2048, 256), (8192, 64)])
def test_hopper_is_chosen_under_booleans_that_may_hide_blocks(rows: int, batch_heads: int) -> None:
    """Masks of documents took 419 and 833 µs there, by the kernel for sm_89 689 and 2613; dense ones 1074 and
    4486, and 1043 and 4181 (tuning/2026-11-26-h200-hopper-masks.json).
    """
    problem = masked(MaskType.BOOL, batch_heads, rows, head_dim=64)
    hopper = price("fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general", problem)
    assert hopper < price("fmha_fwd_sm89_d64_m128n64_s2_w4_qreg_f16_general", problem)
