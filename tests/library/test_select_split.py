"""When split kernels are chosen, with how many splits, and that decoding through them is right."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass import (
    Causal,
    DType,
    Family,
    KernelInfo,
    MaskType,
    Problem,
    attention,
    attention_varlen,
    kernels,
    scaled_dot_product_attention,
)
from sdpa_cutlass.choice.cost import ctas, estimate, fmha_fwd_sm90, splits
from sdpa_cutlass.choice.legal import mismatches
from sdpa_cutlass.choice.select import ranking
from sdpa_cutlass.cli.suites import SUITES, Case
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST, DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Op
from sdpa_cutlass.library.structs import MAX_TILES
from sdpa_cutlass.problem import ATTENTION_DTYPES
from tests.library.cards import made_card
from tests.library.reference import expect_close, rand, torchs_attention

CARDS = [
    made_card("H200", (9, 0), 132, 2580),
    made_card("L4", (8, 9), 58, 1024),
    made_card("RTX 4090", (8, 9), 128, 512),
]
cards = pytest.mark.parametrize("card", CARDS, ids=lambda found: found.name)
MASKS = {
    "padding": MaskType.BOOL,
    "dense": MaskType.BOOL,
    "document": MaskType.BOOL,
    "bias_f16": MaskType.F16,
    "bias_f32": MaskType.F32,
}


def problem(
    batch: int, heads: int, heads_kv: int, rows: int, keys: int, head_dim: int = 128, **options: object
) -> Problem:
    return Problem(
        dtype=DType.F16,
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads_kv,
        seqlen_q=rows,
        seqlen_k=keys,
        head_dim=head_dim,
        **options,
    )


DECODING = problem(1, 32, 8, 1, 8192)


def problem_of(case: Case) -> Problem:
    """With the kind of its mask, which Case.problem leaves out."""
    return dataclasses.replace(
        case.problem(),
        mask=MASKS.get(case.mask),
        has_lengths=case.mask in ("lengths", "lengths_full", "packed"),
        has_dropout=case.p_dropout > 0,
    )


def first(task: Problem, device: DeviceInfo) -> tuple[KernelInfo, int]:
    kernel, cost = ranking(library(Target.HOST), task, Family.FMHA_FWD, device)[0]
    return kernel, cost.num_splits


def split_rows(**fields: object) -> list[KernelInfo]:
    rows = [row for row in kernels(Target.HOST) if row.is_split and row.accuracy is Accuracy.EXACT]
    return [row for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


def test_there_are_split_kernels() -> None:
    for family, head_dims in (
        (Family.FMHA_FWD, (32, 64, 96, 128, 192, 256)),
        (Family.FMHA_FWD_SM90, (64, 80, 96, 128, 160, 192, 256)),
    ):
        found = {(row.head_dim, row.dtype) for row in split_rows(family=family)}
        assert found == set(itertools.product(head_dims, ATTENTION_DTYPES))
    assert all(row.is_general and not row.has_dropout for row in split_rows())
    assert {row.family for row in split_rows(packs_heads=True)} == {Family.FMHA_FWD}
    assert {row.kv_groups for row in split_rows()} == {1, 2, 4}


def test_they_take_lengths_and_no_masks() -> None:
    row = split_rows(head_dim=128, dtype=DType.F16)[0]
    for changes in (
        {},
        {"has_lengths": True},
        {"head_dim": 40, "head_dim_v": 8},
        {"causal": Causal.TOP_LEFT},
    ):
        assert mismatches(row, dataclasses.replace(DECODING, **changes)) == []
    refusals = [
        ({"mask": MaskType.BOOL}, "takes no mask"),
        ({"has_dropout": True}, "applies no dropout"),
        ({"head_dim": 136}, "head_dim is at most 128"),
        ({"dtype": DType.BF16}, "dtype is f16, not bf16"),
    ]
    for changes, reason in refusals:
        assert mismatches(row, dataclasses.replace(DECODING, **changes)) == [reason]


@cards
@pytest.mark.parametrize("suite", ["mission", "small", "long", "masks"])
def test_problems_that_fill_the_card_are_not_split(suite: str, card: DeviceInfo) -> None:
    chosen = {case.name: first(problem_of(case), card)[0] for case in SUITES[suite]()}
    assert chosen
    assert {name: kernel.name for name, kernel in chosen.items() if kernel.is_split} == {}


@cards
def test_general_kernels_stay_behind_plain_ones_without_a_gain(card: DeviceInfo) -> None:
    """Even where the model holds a split kernel to be faster, with one split and nothing to pack. Those that
    leave rows out have a gain, and those whose tile is no taller than the least plain one for few rows.
    """
    for task in (problem(64, 8, 8, 1, 64, 64), problem(1, 8, 8, 512, 512, 64), problem(9, 8, 8, 16, 512)):
        found = ranking(library(Target.HOST), task, Family.FMHA_FWD, card)
        least = min(kernel.block_m for kernel, _ in found if not kernel.is_general)
        gains = [
            not kernel.is_general
            or cost.num_splits > 1
            or cost.leaves_rows_out
            or (kernel.packs_heads and task.seqlen_q <= kernel.block_m <= least)
            for kernel, cost in found
        ]
        assert gains == sorted(gains, reverse=True)
        assert set(gains) == {True, False}


def test_general_kernels_that_leave_rows_out_are_ahead_over_long_keys() -> None:
    """On an H200 64 rows of a batch of 4 took 311.9 µs with the plain kernel, and 235.4 with the general one.

    With 6 there are tiles for nearly all SMs, and no keys to share out.
    """
    for rows, is_general in ((64, True), (128, False)):
        kernel, num_splits = first(problem(6, 20, 10, rows, 16384, 256), CARDS[0])
        assert num_splits <= 1
        assert (kernel.family, kernel.is_general) == (Family.FMHA_FWD_SM90, is_general)


@cards
def test_decoding_of_grouped_heads_is_split(card: DeviceInfo) -> None:
    for case in SUITES["decode"]():
        if case.num_heads_q > case.num_heads_kv:
            assert first(dataclasses.replace(case.problem()), card)[0].is_split, case.name
    kernel, num_splits = first(DECODING, card)
    assert kernel.head_dim == 128
    assert 1 < num_splits <= card.sms // 8


@cards
def test_long_caches_are_split_without_grouped_heads_too(card: DeviceInfo) -> None:
    kernel, num_splits = first(problem(1, 16, 16, 1, 8192, 64), card)
    assert kernel.is_split
    assert 1 < num_splits <= card.sms // 16


@cards
@pytest.mark.parametrize("head_dim", [136, 160, 192, 256])
def test_decoding_above_128_is_split(card: DeviceInfo, head_dim: int) -> None:
    for task in (
        problem(1, 8, 1, 1, 8003, head_dim),
        problem(1, 4, 4, 1, 18635, head_dim),
        problem(1, 32, 8, 4, 8192, head_dim),
    ):
        kernel, num_splits = first(task, card)
        assert kernel.is_split
        assert kernel.head_dim == (256 if head_dim == 256 else 192)
        assert num_splits > 1


@cards
def test_one_row_of_many_heads_takes_the_least_tile(card: DeviceInfo) -> None:
    """There are no keys to share out."""
    kernel, num_splits = first(problem(32, 8, 8, 1, 4096, 256), card)
    assert kernel.block_m == 16
    assert num_splits <= 1
    assert not first(problem(32, 8, 8, 64, 4096, 256), card)[0].is_split
    assert (
        first(problem(32, 16, 16, 1, 4096, 64), card)[0].block_m == 16
    )  # of a plain kernel or of one that packs


@cards
def test_the_number_of_splits_is_one_that_the_library_takes(card: DeviceInfo) -> None:
    sizes = itertools.product((1, 3, 40, 2000), ((1, 1), (8, 2), (32, 1)), (1, 5, 100), (1, 33, 1000, 10**6))
    for batch, (heads, heads_kv), rows, keys in sizes:
        for row in split_rows(dtype=DType.F16):
            task = problem(batch, heads, heads_kv, rows, keys, row.head_dim)
            cost = estimate(row, task, card)
            packed = heads // heads_kv if row.packs_heads else 1
            tiles = -(-rows * packed // row.block_m) * batch * heads // packed
            assert 1 <= cost.num_splits <= 64
            assert cost.ctas == tiles * cost.num_splits
            if cost.num_splits > 1:
                assert tiles <= MAX_TILES
                waves = splits.MOST_WAVES * ctas.resident_ctas(row, card) if row.kv_groups == 1 else 1
                if row.family is Family.FMHA_FWD_SM90:
                    waves = fmha_fwd_sm90.MOST_WAVES
                assert cost.ctas <= card.sms * waves
                assert cost.num_splits * row.kv_groups * row.block_n <= keys + row.kv_groups * row.block_n


@cards
def test_splitting_never_looks_slower_than_it_would_without(card: DeviceInfo) -> None:
    """The more keys, the more splits, up to what fills the card; with one key block there is one."""
    row = split_rows(head_dim=128, dtype=DType.F16, block_m=16)[0]
    numbers = [estimate(row, problem(1, 32, 8, 1, keys), card).num_splits for keys in (1, 512, 8192, 65536)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 1
    assert numbers[-1] > 1
    full = estimate(row, problem(card.sms, 8, 8, 1, 65536), card)
    assert full.num_splits == 1


def test_other_kernels_have_no_splits() -> None:
    for row in kernels(Target.HOST):
        if not row.is_split and row.op is Op.FORWARD:
            task = problem(1, 8, 2, 1, 512, row.head_dim, causal=Causal.TOP_LEFT if row.is_causal else None)
            assert estimate(row, task, HOST).num_splits == 0


# ---- through the public functions ----


def decoding(device: str, rows: int = 1, keys: int = 3000, head_dim: int = 64) -> list[torch.Tensor]:
    shapes = [(2, 8, rows, head_dim), (2, 2, keys, head_dim), (2, 2, keys, head_dim)]
    return [rand(*shape, device=device, seed=i) for i, shape in enumerate(shapes)]


def expect_split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> str:
    """The kernel that is chosen, which has to be a split one with several splits."""
    chosen = sdpa_cutlass.plan(q, k, v, **options)
    assert chosen.kernel.is_split
    assert chosen._plan.num_splits > 1
    assert chosen._plan.workspace_bytes > 0
    return chosen.kernel.name


@pytest.mark.parametrize("head_dim", [64, 72, 128, 160, 256])
def test_decoding_agrees_with_torch(device: str, head_dim: int) -> None:
    q, k, v = decoding(device, head_dim=head_dim)
    name = expect_split(q, k, v)
    assert sdpa_cutlass.explain(q, k, v).choice.kernel.name == name
    expected = torchs_attention(q, k, v, enable_gqa=True)
    expect_close(scaled_dot_product_attention(q, k, v, enable_gqa=True), expected)
    for _ in range(2):  # then by the known plan
        out, lse = attention(q, k, v, return_lse=True)
        expect_close(out, expected)
    scores = q.float() @ k.float().repeat_interleave(4, 1).mT / head_dim**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=1e-3, rtol=1e-4)


def test_several_queries_at_the_end_of_a_cache(device: str) -> None:
    q, k, v = decoding(device, rows=5)
    expect_split(q, k, v, causal="bottom_right")
    mask = torch.ones(5, 3000, dtype=torch.bool, device=device).tril(2995)
    expected = torchs_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    expect_close(attention(q, k, v, causal="bottom_right"), expected)


def test_lengths_of_caches(device: str) -> None:
    q, k, v = decoding(device)
    lengths = torch.tensor([2100, 7], dtype=torch.int32, device=device)
    expect_split(q, k, v, seqlens_k=lengths)
    out = attention(q, k, v, seqlens_k=lengths)
    for b, length in enumerate((2100, 7)):
        one = (t[b : b + 1, :, :length] for t in (k, v))
        expect_close(out[b : b + 1], torchs_attention(q[b : b + 1], *one, enable_gqa=True))


def test_packed_sequences(device: str) -> None:
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in decoding(device))
    starts = [
        torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1, 2], [0, 2500, 6000])
    ]
    out = attention_varlen(q, k, v, *starts, 1, 3500)
    for b, keys in enumerate((slice(0, 2500), slice(2500, 6000))):
        one = (t[None].transpose(1, 2) for t in (q[b : b + 1], k[keys], v[keys]))  # [1, heads, rows, 64]
        expect_close(out[b], torchs_attention(*one, enable_gqa=True)[0, :, 0])


def test_a_mask_or_dropout_takes_another_kernel(device: str) -> None:
    q, k, v = decoding(device, keys=300)
    mask = torch.ones(300, dtype=torch.bool, device=device)
    assert not sdpa_cutlass.plan(q, k, v, attn_mask=mask).kernel.is_split
    expect_close(attention(q, k, v, attn_mask=mask), attention(q, k, v))


def test_a_split_kernel_can_be_named(device: str) -> None:
    q, k, v = decoding(device)
    expected = torchs_attention(q, k, v, enable_gqa=True)
    for row in split_rows(dtype=DType.F16):
        if row.head_dim >= 64:
            expect_close(attention(q, k, v, kernel=row.name), expected)
