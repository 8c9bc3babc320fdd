"""A choice is the readable rule: rows that mismatch nothing, sorted by `order`; asking writes nothing."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_cutlass import Causal, DType, Family, MaskType, Problem, attention, kernels
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.choice import legal, select
from sdpa_cutlass.choice.cost import MODELS, ctas, estimate, model_of
from sdpa_cutlass.choice.cost.model import Model
from sdpa_cutlass.choice.cost.splits import MERGED_BY_LAST_CTA, MOST_WAVES, merges_in_second_launch
from sdpa_cutlass.choice.visible_keys import CausalRows, floor_sum
from sdpa_cutlass.errors import ArgumentTypeError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST, DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.problem import ATTENTION_DTYPES
from tests.library.decoding import H200, L4, asked_params, made_problem


def random_problems(count: int, seed: int = 0) -> Iterator[Problem]:
    """Of all kinds; sizes from 1 to a few ten thousands, one of them often much larger than the other."""
    draw = random.Random(seed)

    def length() -> int:
        return draw.choice((1, 1, 5, 64, 65, 512, int(2 ** draw.uniform(0, 16))))

    for _ in range(count):
        is_general = draw.random() < 0.4
        heads_kv = draw.choice((1, 2, 8, 16))
        head_dim = draw.choice((8, 32, 64, 64, 72, 80, 96, 128, 128, 200, 256, 512))
        yield Problem(
            dtype=draw.choice(ATTENTION_DTYPES),
            batch=draw.choice((1, 1, 2, 16, 700)),
            num_heads_q=heads_kv * draw.choice((1, 1, 3, 4, 8)),
            num_heads_kv=heads_kv,
            seqlen_q=length(),
            seqlen_k=length(),
            head_dim=head_dim,
            head_dim_v=draw.choice((head_dim, head_dim, head_dim, 64)),
            causal=draw.choice((None, *Causal)),
            mask=draw.choice((None, *MaskType)) if is_general else None,
            has_dropout=is_general and draw.random() < 0.3,
            has_lengths=is_general and draw.random() < 0.5,
        )


def readable_rule(problem: Problem, family: Family, device: DeviceInfo) -> list[tuple[str, int]]:
    found = [
        (row, estimate(row, problem, device))
        for row in kernels(Target.HOST)
        if row.serves(family)
        and (device is H200 or not row.is_for_one_arch)
        and not legal.mismatches(row, problem)
    ]
    tallest_first = sorted((row for row, _ in found if not row.is_general), key=lambda row: -row.block_m)
    # The most rows of a split kernel's tile that competes with plain ones: those of the smallest of these.
    plain = {row.family: row.block_m for row in tallest_first}
    found.sort(key=lambda pair: select.order(pair[0], pair[1], problem, plain))
    return [(row.name, cost.num_splits) for row, cost in found]


@pytest.mark.parametrize("card", [HOST, L4, H200], ids=lambda found: found.name.split()[0])
@pytest.mark.parametrize("family", [family for family in MODELS if family is not Family.FMHA_BWD_FUSED])
def test_a_ranking_is_the_readable_rule(family: Family, card: DeviceInfo) -> None:
    """FMHA_BWD stands for both families of gradients."""
    native = library(Target.HOST)
    num_ranked = 0
    for problem in random_problems(400):
        expected = readable_rule(problem, family, card)
        offer = select.offer(native, problem, family, card)
        assert [(row.name, splits) for row, splits in offer.ranked(problem)] == expected, problem
        ranking = select.ranking(native, problem, family, card)
        assert [(row.name, cost.num_splits) for row, cost in ranking] == expected, problem
        num_ranked += len(expected)
    runs = any(
        row.serves(family) and (card is H200 or not row.is_for_one_arch) for row in kernels(Target.HOST)
    )
    assert num_ranked > 150 if runs else num_ranked == 0


def test_larger_kernels_of_the_same_tile_are_priced_when_they_may_win() -> None:
    """Few are outclassed at head_dim 72: the kernels for 80 load rows in shorter pieces than those for 96."""
    problem = Problem(
        dtype=DType.F16, batch=1, num_heads_q=32, num_heads_kv=32, seqlen_q=128, seqlen_k=128, head_dim=72,
        mask=MaskType.F16,
    )  # fmt: skip
    offer = select.offer(library(Target.HOST), problem, Family.FMHA_FWD, HOST)
    expected = readable_rule(problem, Family.FMHA_FWD, HOST)
    assert "_d96_" in expected[0][0]
    assert [(row.name, splits) for row, splits in offer.ranked(problem)] == expected


def merges_apart(model: Model, problem: Problem) -> bool:
    rows = min(model.kernel.block_m, problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv)
    return merges_in_second_launch(model.kernel, rows, model.cost(problem)[1])


@pytest.mark.parametrize("card", [HOST, L4, H200], ids=lambda found: found.name.split()[0])
def test_outclassed_kernels_cost_no_less(card: DeviceInfo) -> None:
    num_outclassed = 0
    for problem in random_problems(400, seed=5):
        models = [
            model for _, model in select.offer(library(Target.HOST), problem, Family.FMHA_FWD, card).models
        ]
        for model in models:
            for other in models:
                if model.outclasses(other):
                    num_outclassed += 1
                    # A tie of two waves, or of two numbers of splits, may go the other way, more so where
                    # the larger one's parts alone are merged by a second launch.
                    merges = [merges_apart(one, problem) for one in (model, other)]
                    slack = 0.95 if merges[0] == merges[1] else 0.92
                    assert other.cost(problem)[0] >= slack * model.cost(problem)[0], problem
    assert num_outclassed > 500


@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT, Causal.BOTTOM_RIGHT], ids=str)
@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_a_ranking_while_a_key_cache_grows(rows: int, family: Family, causal: Causal | None) -> None:
    """Prices are kept from one length to the next, unless another batch comes between."""
    native = library(Target.HOST)
    decoding = Problem(
        dtype=DType.F16, batch=2, num_heads_q=8, num_heads_kv=2, seqlen_q=rows, seqlen_k=1, head_dim=64,
        causal=causal,
    )  # fmt: skip
    offer = select.Offer(native, decoding, family, H200)
    lengths = [*range(1, 150), *range(4000, 4100), 4096, 4095, 4097, 20]
    for seqlen_k in lengths:
        for batch in (2, 2, 3) if seqlen_k % 50 == 0 else (2,):
            problem = dataclasses.replace(decoding, seqlen_k=seqlen_k, batch=batch)
            found = [(row.name, splits) for row, splits in offer.ranked(problem)]
            assert found == readable_rule(problem, family, H200), problem


@pytest.mark.parametrize(("diagonal", "window"), [(None, None), (7, None), (None, (20, 3))], ids=str)
@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT, Causal.BOTTOM_RIGHT], ids=str)
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (21, 3)], ids=str)
def test_prices_are_kept_while_all_lengths_grow(
    heads: tuple[int, int],
    family: Family,
    causal: Causal | None,
    diagonal: int | None,
    window: tuple[int, int] | None,
) -> None:
    """They are those of whole tiles, so every length that has as many costs the same, to the last bit."""
    first = Problem(
        dtype=DType.F16, batch=2, num_heads_q=heads[0], num_heads_kv=heads[1], seqlen_q=1, seqlen_k=1,
        head_dim=64, causal=causal,
    )  # fmt: skip
    offers: dict[Any, select.Offer] = {}
    num_kept = 0
    for ahead in (0, -3, 3000):
        for rows in [*range(1, 20), *range(30, 36), *range(125, 150), *range(2040, 2070)]:
            problem = dataclasses.replace(
                first,
                seqlen_q=rows,
                seqlen_k=max(rows + ahead, 1),
                diagonal=diagonal,
                window=window,
            )
            if problem.kind not in offers:
                offers[problem.kind] = select.Offer(library(Target.HOST), problem, family, H200)
            offer = offers[problem.kind]
            models = dict(offer.models)
            before = len(offer._known)
            for cycles, _, kernel, splits in [
                price for prices in offer._priced(problem)[1:3] for price in prices
            ]:
                assert (cycles, splits) == models[kernel].cost(problem), (problem, kernel.name)
            num_kept += len(offer._known) == before
    assert num_kept > 50 or window is not None or offer._rows_of_a_price == 1


def test_legality_depends_on_the_kind_of_a_problem_alone() -> None:
    """What `offer` keeps for a kind was found with other sizes."""
    problems = list(random_problems(300, seed=1))
    seen = {problem.kind: problem for problem in problems}
    assert len(seen) < len(problems)
    for problem in problems:
        other = seen[problem.kind]
        for row in kernels(Target.HOST):
            assert legal.mismatches(row, problem) == legal.mismatches(row, other)


def readable_rounds(problem: Problem, block_m: int, heads: int, keys_a_round: int) -> list[int]:
    m_blocks = -(-problem.seqlen_q * heads // block_m)
    rounds = []
    for m_block in range(m_blocks - 1, -1, -math.ceil(m_blocks / 64)):
        last_row = min((m_block + 1) * block_m, problem.seqlen_q * heads) - 1
        keys = min(max(last_row // heads + problem.causal_offset + 1, 0), problem.seqlen_k)
        rounds.append(-(-keys // keys_a_round))
    return rounds


def test_rounds_under_a_causal_mask_are_counted_as_one_by_one() -> None:
    draw = random.Random(2)
    for problem in random_problems(2000, seed=3):
        causal = dataclasses.replace(problem, causal=draw.choice(list(Causal)))
        block_m, heads = draw.choice((16, 32, 48, 128)), draw.choice((1, 1, 3, 4))
        keys_a_round = draw.choice((16, 64, 96, 128, 7 * 64 * 4))
        expected = readable_rounds(causal, block_m, heads, keys_a_round)
        rows = CausalRows(causal, block_m, heads)
        assert rows.count == len(expected)
        assert [rows.rounds(place, keys_a_round) for place in range(rows.count)] == expected
        assert rows.all_rounds(keys_a_round) == sum(expected)


def test_floor_sums_are_those_of_a_loop() -> None:
    draw = random.Random(4)
    for _ in range(2000):
        count, start, step = draw.randrange(40), draw.randrange(200), draw.randrange(100)
        divisor = draw.randrange(1, 90)
        expected = sum((start + i * step) // divisor for i in range(count))
        assert floor_sum(count, start, step, divisor) == expected


def test_prices_and_kernels_agree_on_which_parts_a_second_launch_merges() -> None:
    header = Path(__file__).parents[2] / "templates" / "include" / "sdpa" / "fmha_fwd" / "launch.cuh"
    found = re.search(r"kMergedByLastCta = (\d+) << (\d+);", header.read_text(encoding="utf-8"))
    assert found is not None
    assert int(found[1]) << int(found[2]) == MERGED_BY_LAST_CTA


@pytest.mark.parametrize("card", [L4, H200], ids=lambda found: found.name)
def test_the_number_of_splits_is_the_cheapest_of_all(card: DeviceInfo) -> None:
    draw = random.Random(5)
    several = 0
    rows_of_splits = [row for row in kernels(Target.HOST) if row.is_split]
    for row in (row for row in rows_of_splits if row.family is Family.FMHA_FWD):
        problem = made_problem(dtype=row.dtype, head_dim=row.head_dim)
        model = model_of(row, problem, card)
        waves = MOST_WAVES * ctas.resident_ctas(row, card) if row.kv_groups == 1 else 1
        for _ in range(300):
            tiles, rows = draw.choice((1, 2, 5, 8, 40, 200, 2000)), draw.randint(1, row.block_m)
            blocks = int(2 ** draw.uniform(0, 12))
            if tiles > model.splits.most_cached_tiles:
                continue
            most = min(waves * card.sms // tiles, blocks // row.kv_groups, 64)
            prices = {
                count: model.splits.rounds(tiles, count, blocks) + model.splits.merging(tiles, rows, count)
                for count in range(1, max(most, 1) + 1)
            }
            chosen, meeting = model.splits.choose(tiles, blocks, rows, 0.0)
            assert meeting == model.splits.merging(tiles, rows, chosen)
            assert prices[chosen] <= 1.05 * min(prices.values())
            several += chosen > 1
    assert several > 100


def test_prices_know_where_masks_are_read_one_by_one_and_where_they_are_copied() -> None:
    by_family = {
        "fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general": 4,  # bytes, of a boolean mask: its runs have 8
        "fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general": 1,
    }
    rows = {row.name: row for row in kernels(Target.HOST)}
    for name, alignment in by_family.items():
        for heads in (1, 64):
            aligned = made_problem(
                num_heads_q=heads, num_heads_kv=heads, seqlen_q=1024, seqlen_k=1024, mask=MaskType.BOOL
            )
            problems = [
                dataclasses.replace(aligned, mask_alignment=alignment, mask_elements=elements)
                for elements in (2**20, 2**24)
            ]
            costs = [model_of(rows[name], one, H200).cost(one)[0] for one in (aligned, *problems)]
            assert costs[1] > 1.05 * costs[0]
            assert (costs[2] > costs[1]) == (heads == 64)  # one head has too few scores for a copy
            twice = dataclasses.replace(aligned, mask_alignment=2 * alignment)
            assert model_of(rows[name], twice, H200).cost(twice)[0] == costs[0]


def test_hopper_takes_padding_before_other_boolean_masks() -> None:
    """16,384 keys of head_dim 56, 8 heads of 1024 rows: 152 µs on an H200, the other kernel 187."""
    sizes = {"batch": 2, "num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 1024, "seqlen_k": 16384}
    dense = made_problem(**sizes, head_dim=56, mask=MaskType.BOOL)
    padding = dataclasses.replace(dense, mask_has_one_row=True)
    rows = {row.name: row for row in kernels(Target.HOST)}
    row = rows["fmha_fwd_sm90_d64_m128n128_s3_w12_f16_general"]
    assert model_of(row, padding, H200).cost(padding)[0] < 0.85 * model_of(row, dense, H200).cost(dense)[0]
    assert select.ranking(library(Target.HOST), padding, Family.FMHA_FWD, H200)[0][0] == row


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 160, 192, 256])
def test_chunks_of_prompts_in_few_heads_are_split_on_hopper(head_dim: int) -> None:
    """512 rows in the heads that one of eight GPUs has: by its own kernels, and not where tiles are many."""
    for keys in (8192, 65536):
        chunk = made_problem(
            num_heads_kv=1, seqlen_q=512, seqlen_k=keys, head_dim=head_dim, causal=Causal.BOTTOM_RIGHT
        )
        kernel, cost = select.ranking(library(Target.HOST), chunk, Family.FMHA_FWD, H200)[0]
        assert kernel.family is Family.FMHA_FWD_SM90
        assert cost.num_splits > 1
        many = dataclasses.replace(chunk, batch=48)
        assert select.ranking(library(Target.HOST), many, Family.FMHA_FWD, H200)[0][1].num_splits <= 1


def test_causal_tiles_that_fill_a_hopper_gpu_are_not_split() -> None:
    """They are dealt out evenly as they are. Where they leave SMs idle they are split all the same."""
    for rows, splits in ((24201, False), (12000, True)):
        task = made_problem(
            num_heads_q=1, num_heads_kv=1, seqlen_q=rows, seqlen_k=rows, head_dim=168, causal=Causal.TOP_LEFT
        )
        found = select.ranking(library(Target.HOST), task, Family.FMHA_FWD, H200)
        hopper = [cost for kernel, cost in found if kernel.is_split and kernel.family is Family.FMHA_FWD_SM90]
        assert hopper
        assert any(cost.num_splits > 1 for cost in hopper) == splits


# ---- asking ----


def test_a_question_writes_nothing() -> None:
    native, problem = library(Target.HOST), made_problem()
    params = asked_params(problem)
    before = bytes(params)
    choice = select.choose(native, problem, Family.FMHA_FWD, HOST, params)
    assert bytes(params) == before
    assert choice.kernel.is_split
    assert choice.num_splits > 1
    named = select.choose(native, problem, Family.FMHA_FWD, HOST, params, name=choice.kernel.name)
    assert (named.kernel, named.num_splits) == (choice.kernel, choice.num_splits)
    assert bytes(params) == before
    assert select.refusal(native, choice.kernel, problem, HOST, params) is None
    assert bytes(params) == before
    select.candidates(native, problem, Family.FMHA_FWD, HOST, params)
    assert bytes(params) == before


def test_a_kernel_that_cannot_split_has_no_splits() -> None:
    problem = made_problem(seqlen_q=512, seqlen_k=512, num_heads_kv=8)
    q = torch.zeros(1, 8, 512, 64).half()
    params = make_params(problem, 0.125, q, q, q, torch.empty_like(q), None)
    params.num_splits = 3  # of another question
    choice = select.choose(library(Target.HOST), problem, Family.FMHA_FWD, HOST, params)
    assert (choice.kernel.is_split, choice.num_splits) == (False, 0)


@pytest.mark.parametrize("name", [3, b"fmha_fwd", ["fmha_fwd"], True])
def test_a_kernel_is_named_by_a_string(name: Any) -> None:
    q = torch.zeros(1, 2, 9, 64).half()
    with pytest.raises(ArgumentTypeError, match=r"kernel=.* is a .*; allowed is a kernel's name"):
        attention(q, q, q, kernel=name)
