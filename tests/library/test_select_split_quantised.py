"""When split kernels of 8 bits are chosen, and with how many splits: what prices say of rows made here."""

from __future__ import annotations

import pytest

from sdpa_cutlass import Causal, DType, Family, KernelInfo, Problem
from sdpa_cutlass.choice.cost import estimate, model_of
from sdpa_cutlass.choice.legal import mismatches
from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.registry import Accuracy
from sdpa_cutlass.library.structs import MAX_TILES
from sdpa_cutlass.problem import MaskType
from tests.kernel_rows import GENERAL, SPLIT, kernel_row
from tests.library.cards import made_card

CARDS = [
    made_card("H200", (9, 0), 132, 2580),
    made_card("L4", (8, 9), 58, 1024),
    made_card("RTX 4090", (8, 9), 128, 512),
]
cards = pytest.mark.parametrize("card", CARDS, ids=lambda found: found.name)
ROW = {"family": Family.FMHA_FWD_Q8, "accuracy": Accuracy.INT8, "head_dim": 128}
TILES = kernel_row("tiles", GENERAL, stages=2, smem_bytes=41984, ctas_per_sm=2, **ROW)
SPLITS = kernel_row("split", SPLIT, block_m=16, kv_groups=4, smem_bytes=69632, ctas_per_sm=1, **ROW)


def problem(
    batch: int, heads: int, heads_kv: int, rows: int, keys: int, causal: Causal | None = None
) -> Problem:
    return Problem(
        dtype=DType.F16,
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads_kv,
        seqlen_q=rows,
        seqlen_k=keys,
        head_dim=128,
        head_dim_v=128,
        causal=causal,
    )


def cycles(row: KernelInfo, asked: Problem, card: DeviceInfo) -> float:
    return model_of(row, asked, card).cost(asked)[0]


@cards
@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("keys", [4096, 32768, 131072])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("heads", "heads_kv", "rows"), [(32, 8, 1), (32, 8, 4), (8, 8, 1), (16, 1, 1)])
def test_decoding_takes_them(
    card: DeviceInfo, causal: Causal | None, keys: int, batch: int, heads: int, heads_kv: int, rows: int
) -> None:
    """Where few tiles leave SMs idle, keys are shared out; every SM has CTAs, and none waits for another."""
    asked = problem(batch, heads, heads_kv, rows, keys, causal)
    found = estimate(SPLITS, asked, card)
    assert found.cycles < estimate(TILES, asked, card).cycles
    tiles = batch * heads_kv
    assert found.ctas == tiles * found.num_splits
    if 2 * tiles <= card.sms and keys > 4096:
        assert found.num_splits > 1
        assert found.ctas > card.sms // 2 or (heads_kv == 1 and found.num_splits >= 16)  # parts of 16 rows
    assert found.num_splits == 1 or found.ctas <= 2 * card.sms


@cards
@pytest.mark.parametrize("sizes", [(8, 16, 16, 2048, 2048), (1, 32, 8, 8192, 8192), (16, 16, 2, 512, 4096)])
def test_many_rows_do_not(card: DeviceInfo, sizes: tuple[int, int, int, int, int]) -> None:
    for causal in (None, Causal.BOTTOM_RIGHT):
        asked = problem(*sizes, causal)
        assert cycles(TILES, asked, card) < cycles(SPLITS, asked, card)
        assert estimate(SPLITS, asked, card).num_splits == 1


@cards
def test_their_own_limits(card: DeviceInfo) -> None:
    """Few keys, more tiles than there are counters, and masks, which they do not take."""
    assert estimate(SPLITS, problem(1, 8, 8, 1, 64), card).num_splits == 1
    many = problem(MAX_TILES + 1, 1, 1, 1, 1 << 20)
    assert estimate(SPLITS, many, card).num_splits == 1
    for split, masked in ((SPLITS, True), (TILES, False)):
        asked = Problem(
            dtype=DType.F16, batch=1, num_heads_q=8, num_heads_kv=8, seqlen_q=1, seqlen_k=4096, head_dim=128,
            head_dim_v=128, mask=MaskType.BOOL,
        )  # fmt: skip
        assert bool(mismatches(split, asked)) is masked


@cards
def test_prices_follow_the_sizes_that_the_choice_asks_for(card: DeviceInfo) -> None:
    """Within one block of keys, and one tile of rows, a price is the same."""
    for keys in (4033, 4090, 4096):
        assert cycles(SPLITS, problem(2, 32, 8, 1, keys), card) == cycles(
            SPLITS, problem(2, 32, 8, 1, 4096), card
        )
    assert cycles(SPLITS, problem(2, 32, 8, 33, 4096), card) == cycles(
        SPLITS, problem(2, 32, 8, 36, 4096), card
    )
    model = model_of(SPLITS, problem(1, 32, 8, 1, 4096), card)
    assert (model.keys_of_a_price, model.rows_of_a_price) == (64, 16)
    for rows in (1, 4, 5, 600):
        for batch in (1, 7, 40):
            asked = problem(batch, 32, 8, rows, 1 << 20)
            if not model.may_split(4 * rows, 8 * batch):
                assert estimate(SPLITS, asked, card).num_splits == 1
