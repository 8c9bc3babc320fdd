"""`window` and `sinks` of the public functions: what they mean, what is refused, which kernels run."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from sdpa_cutlass import (
    Causal,
    DType,
    Family,
    Problem,
    attention,
    attention_varlen,
    explain,
    plan,
    unfused_attention,
)
from sdpa_cutlass.choice.visible_keys import WindowRows
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, NoKernelError
from tests.library.reference import decoding, expect_close, rand, softmax_lse, torchs_attention
from tests.library.test_lengths import int32, starts

ROWS, KEYS = 40, 130
WINDOWS = ((30, -1), (0, 0), (12, 5), (-1, 9))


def inputs(device: str, heads_kv: int = 2) -> list[torch.Tensor]:
    sizes = ((4, ROWS), (heads_kv, KEYS), (heads_kv, KEYS))
    return [rand(2, *size, 64, device=device, seed=seed) for seed, size in enumerate(sizes)]


def seen_by(rows: int, keys: int, causal: Causal | None, window: tuple[int, int]) -> torch.Tensor:
    """[rows, keys]: the definition, pair by pair."""
    left, right = window
    offset = 0 if causal is Causal.TOP_LEFT else keys - rows
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for i, j in itertools.product(range(rows), range(keys)):
        own = i + offset
        seen[i, j] = (
            (left < 0 or j >= own - left) and (right < 0 or j <= own + right) and (causal is None or j <= own)
        )
    return seen


def with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, softmax_lse) in float32 with one more key of value 0, whose score is the head's sink."""
    k, v = (x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q.float() @ k.mT / math.sqrt(q.shape[-1])).masked_fill(~seen, -math.inf)
    column = sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
    scores = torch.cat([scores, column], -1)
    return scores.softmax(-1)[..., :-1] @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [None, *Causal])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_is_a_mask(device: str, causal: Causal | None, window: tuple[int, int]) -> None:
    q, k, v = inputs(device)
    mask = seen_by(ROWS, KEYS, causal, window).to(device)
    reference = torchs_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    for _ in range(3):  # checked, known, compiled
        out, lse = attention(q, k, v, causal=causal, window=window, return_lse=True)
        expect_close(out, reference)
        expected = softmax_lse(q, k.repeat_interleave(2, 1), attn_mask=mask)
        torch.testing.assert_close(lse, expected, atol=2e-3, rtol=1e-4)
    planned = plan(q, k, v, causal=causal, window=list(window))
    out = torch.full_like(q, math.nan)
    planned.run(q, k, v, out)
    expect_close(out, reference)


def test_windows_are_told_apart(device: str) -> None:
    """Calls of the same sizes, in turns, also those that a float or another type would make equal."""
    q, k, v = inputs(device)
    for _ in range(3):
        for window in (*WINDOWS, None):
            mask = None if window is None else seen_by(ROWS, KEYS, None, window).to(device)
            expect_close(
                attention(q, k, v, window=window),
                torchs_attention(q, k, v, attn_mask=mask, enable_gqa=True),
            )
        for bad in ((30.0, -1), (True, 5)):
            with pytest.raises(ArgumentTypeError, match="window="):
                attention(q, k, v, window=bad)


def test_packed_sequences(device: str) -> None:
    lengths_q, lengths_k = (17, 0, 30), (60, 9, 30)
    q = rand(sum(lengths_q), 4, 64, device=device, seed=1)
    k, v = (rand(sum(lengths_k), 2, 64, device=device, seed=seed) for seed in (2, 3))
    sinks = rand(4, device=device, dtype=torch.float32)
    for _ in range(3):
        out, lse = attention_varlen(
            q, k, v, starts(lengths_q, device), starts(lengths_k, device), 30, 60,
            window=(11, 3), sinks=sinks, return_lse=True,
        )  # fmt: skip
        row = key = 0
        for rows, keys in zip(lengths_q, lengths_k, strict=True):
            one = (
                x.transpose(0, 1)[None]
                for x in (q[row : row + rows], k[key : key + keys], v[key : key + keys])
            )
            seen = seen_by(rows, keys, None, (11, 3)).to(device)
            expected, expected_lse = with_sinks(*one, sinks, seen)
            expect_close(out[row : row + rows], expected[0].transpose(0, 1))
            torch.testing.assert_close(lse[:, row : row + rows], expected_lse[0], atol=2e-3, rtol=1e-4)
            row, key = row + rows, key + keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("few_rows", [False, True], ids=["prefill", "decode"])
def test_sinks_join_the_denominator(device: str, dtype: torch.dtype, few_rows: bool) -> None:
    q, k, v = decoding(device) if few_rows else inputs(device)
    sinks = rand(q.shape[1], device=device, dtype=dtype, seed=9) * 4
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device)
    expected, expected_lse = with_sinks(q, k, v, sinks, seen)
    for _ in range(3):
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
        expect_close(out, expected)
        torch.testing.assert_close(lse, expected_lse, atol=2e-3, rtol=1e-4)
    sinks.mul_(-1)  # a known call reads what they hold then
    expect_close(attention(q, k, v, sinks=sinks), with_sinks(q, k, v, sinks, seen)[0])


def test_without_keys_softmax_lse_is_the_sink(device: str) -> None:
    q, k, v = inputs(device)
    sinks = rand(4, device=device)
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], sinks=sinks, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sinks.float()[:, None].expand_as(lse))
    lengths = int32([0, KEYS], device)
    out, lse = attention(q, k, v, sinks=sinks, seqlens_k=lengths, return_lse=True)
    torch.testing.assert_close(lse[0], sinks.float()[:, None].expand_as(lse[0]), atol=1e-5, rtol=1e-5)
    assert (out[0] == 0).all()


def test_a_growing_cache_of_a_window(device: str) -> None:
    """Every token is another signature; the window passes over the cache's start, and the choice changes."""
    for keys in range(28, 40):
        q, k, v = (rand(1, 2, size, 64, device=device, seed=size) for size in (1, keys, keys))
        out = attention(q, k, v, causal="bottom_right", window=(31, 0))
        expect_close(out, torchs_attention(q, k[:, :, -32:], v[:, :, -32:]))


def test_torch_compile_and_the_operator(device: str) -> None:
    q, k, v = inputs(device)
    sinks = rand(4, device=device)
    expected, _ = with_sinks(q, k, v, sinks, seen_by(ROWS, KEYS, Causal.TOP_LEFT, (20, -1)).to(device))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal="top_left", window=(20, -1), sinks=sinks)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expect_close(compiled(q, k, v, sinks), expected)
    out, _ = torch.ops.sdpa_cutlass.attention_forward(
        q, k, v, None, None, None, None, sinks, causal="top_left", window=[20, -1]
    )
    expect_close(out, expected)
    options = {"causal": "top_left", "window": [20, -1]}
    torch.library.opcheck(
        torch.ops.sdpa_cutlass.attention_forward.default,
        (q, k, v, None, None, None, None, sinks),
        options,
    )


@pytest.mark.parametrize(
    ("window", "error", "words"),
    [
        (5, ArgumentTypeError, "window=5; allowed is (left, right)"),
        ((5,), ArgumentTypeError, "window=(5,); allowed is (left, right)"),
        ((5, "a"), ArgumentTypeError, "window=(5, 'a') has a str"),
        ((True, 0), ArgumentTypeError, "window=(True, 0) has a bool"),
        ((-2, 0), ArgumentError, "window=(-2, 0); allowed is"),
        ((0, -5), ArgumentError, "window=(0, -5); allowed is"),
    ],
    ids=str,
)
def test_windows_that_are_refused(device: str, window: Any, error: type[Exception], words: str) -> None:
    q, k, v = inputs(device)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    of_one = [starts((ROWS,), device), starts((KEYS,), device), ROWS, KEYS]
    for call in (
        lambda: attention(q, k, v, window=window),
        lambda: plan(q, k, v, window=window),
        lambda: explain(q, k, v, window=window),
        lambda: attention_varlen(*packed, *of_one, window=window),
    ):
        with pytest.raises(error) as caught:
            call()
        assert words in str(caught.value)


def test_sinks_that_are_refused(device: str) -> None:
    q, k, v = inputs(device)
    fine = rand(4, device=device)
    for sinks, error, words in (
        (fine.double(), ArgumentTypeError, "sinks has dtype torch.float64; allowed are torch.float16"),
        (fine[:3], ArgumentError, "sinks has shape (3,); allowed is (4,)"),
        (fine[None], ArgumentError, "sinks has shape (1, 4); allowed is (4,)"),
        (rand(8, device=device)[::2], ArgumentError, "sinks has stride 2; it must be contiguous"),
        (0.5, ArgumentTypeError, "sinks"),
    ):
        for _ in range(2):
            with pytest.raises(error) as caught:
                attention(q, k, v, sinks=sinks)
            assert words in str(caught.value)
            attention(q, k, v, sinks=fine)  # a known call does not let the others pass
    with torch.no_grad():
        expect_close(attention(q, k, v, sinks=fine.clone().requires_grad_()), attention(q, k, v, sinks=fine))


def test_the_baseline_takes_neither(device: str) -> None:
    q, k, v = inputs(device, heads_kv=4)
    for options in ({"window": (3, 2)}, {"sinks": rand(4, device=device)}):
        with pytest.raises(NoKernelError, match=r"takes no (window|sinks)"):
            explain(q, k, v, family=Family.UNFUSED, **options)
    assert "window" not in unfused_attention.__kwdefaults__


def problem(rows: int, keys: int, causal: Causal | None, window: tuple[int, int] | None) -> Problem:
    return Problem(
        dtype=DType.F16, batch=1, num_heads_q=1, num_heads_kv=1, seqlen_q=rows, seqlen_k=keys, head_dim=64,
        causal=causal, window=window,
    )  # fmt: skip


@pytest.mark.parametrize("causal", [None, *Causal])
def test_a_problem_keeps_what_its_window_hides(causal: Causal | None) -> None:
    """Limits that hide nothing are dropped, so that plain kernels serve; nothing else may change."""
    plain = 0
    for rows, keys in itertools.product((1, 2, 3, 7), (1, 2, 6, 7)):
        for window in itertools.product((-1, 0, 1, 2, 5, 6, 7, 2**31 - 1), repeat=2):
            found = problem(rows, keys, causal, window)
            kept = (-1, -1) if found.window is None else found.window
            if found.causal is None and found.window is None:
                hidden = ~torch.ones(rows, keys, dtype=torch.bool)
            else:
                hidden = ~seen_by(rows, keys, found.causal, kept)
            expected = seen_by(rows, keys, causal, window)
            assert torch.equal(~hidden, expected), (rows, keys, window, found)
            assert found.visible_scores == int(expected.sum())
            again = dataclasses.replace(found)
            assert again == found
            plain += found.window is None
    assert plain > 300


def test_cost_follows_the_keys_seen(device: str) -> None:
    """What explain predicts for a long problem, and the rows of tiles behind it."""
    q, k, v = (rand(1, 1, 1, 64, device=device).expand(1, 8, 8192, 64) for _ in range(3))
    full = explain(q, k, v, causal="bottom_right").candidates[0].estimate
    narrow = explain(q, k, v, causal="bottom_right", window=(511, 0)).candidates[0].estimate
    assert full is not None
    assert narrow is not None
    assert narrow.cycles < 0.3 * full.cycles
    assert 0.7 < narrow.useful <= 1
    rows = WindowRows(problem(512, 512, None, (63, 0)), 64, 1)
    assert rows.count == 8
    assert [rows.rounds(place, 64) for place in range(8)] == [2] * 7 + [1]
    assert rows.all_rounds(64) == 15
