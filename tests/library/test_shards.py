"""`row_offset` and `key_offset`: a shard of a longer problem sees what its rows see in the whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from sdpa_cutlass import Causal, DType, Problem, attention, explain, merge_states, plan
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from tests.library.reference import expect_close, rand

ROWS, KEYS = 96, 96  # of the whole
PARTS = 3
WINDOWS = (None, (20, -1), (40, 7), (-1, 30), (0, 0))


def whole(device: str) -> list[torch.Tensor]:
    sizes = ((4, ROWS), (2, KEYS), (2, KEYS))
    return [rand(2, *size, 64, device=device, seed=seed) for seed, size in enumerate(sizes)]


def seen(rows: int, keys: int, diagonal: int, left: int, right: int) -> torch.Tensor:
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    found = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        found &= j >= i + diagonal - left
    if right >= 0:
        found &= j <= i + diagonal + right
    return found


@pytest.mark.parametrize("causal", [None, "top_left"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_shards_merge_to_the_whole(window: tuple[int, int] | None, causal: str | None, device: str) -> None:
    """Every shard of the rows over every shard of the keys, merged, as a ring of devices computes it."""
    q, k, v = whole(device)
    expected, expected_lse = attention(q, k, v, causal=causal, window=window, return_lse=True)
    for i in range(PARTS):
        rows = slice(i * ROWS // PARTS, (i + 1) * ROWS // PARTS)
        parts = []
        for j in range(PARTS):
            keys = slice(j * KEYS // PARTS, (j + 1) * KEYS // PARTS)
            shard = q[:, :, rows], k[:, :, keys], v[:, :, keys]
            offsets = {"row_offset": rows.start, "key_offset": keys.start}
            parts.append(attention(*shard, causal=causal, window=window, return_lse=True, **offsets))
        out, lse = merge_states(*zip(*parts, strict=True))
        expect_close(out, expected[:, :, rows])
        torch.testing.assert_close(lse, expected_lse[:, :, rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("row_offset", [0, 1, 31, 64, 200, 2**40])
@pytest.mark.parametrize("key_offset", [None, 1, 33, 127, 2**40 + 5])
def test_offsets_of_every_size(row_offset: int, key_offset: int | None, device: str) -> None:
    """Shards that see all, some or nothing of their keys; as often as compiled calls need to know them."""
    q, k, v = (rand(1, 2, size, 64, device=device, seed=seed) for seed, size in enumerate((40, 70, 70)))
    hidden = ~seen(40, 70, row_offset - (key_offset or 0), -1, 0).to(device)
    expected = attention(q, k, v, attn_mask=~hidden)
    for _ in range(3):
        out, lse = attention(
            q, k, v, causal="top_left", row_offset=row_offset, key_offset=key_offset, return_lse=True
        )
        expect_close(out, expected)
        assert torch.equal(lse == -torch.inf, hidden.all(-1).expand(1, 2, -1))


def test_lengths_count_as_well(device: str) -> None:
    q, k, v = (rand(2, 2, size, 64, device=device, seed=seed) for seed, size in enumerate((40, 70, 70)))
    lengths = torch.tensor([70, 33], dtype=torch.int32, device=device)
    out = attention(q, k, v, causal="top_left", window=(25, -1), row_offset=20, seqlens_k=lengths)
    for i, length in enumerate(lengths.tolist()):
        mask = seen(40, length, 20, 25, 0).to(device)
        alone = q[i : i + 1], k[i : i + 1, :, :length], v[i : i + 1, :, :length]
        expect_close(out[i : i + 1], attention(*alone, attn_mask=mask))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")  # torch.jit
def test_plans_and_traced_calls_know_shards(device: str) -> None:
    q, k, v = (rand(1, 2, size, 64, device=device, seed=seed) for seed, size in enumerate((40, 70, 70)))
    given: dict[str, Any] = {"causal": "top_left", "row_offset": 9, "key_offset": 2}
    expected = attention(q, k, v, attn_mask=seen(40, 70, 7, -1, 0).to(device))
    planned = plan(q, k, v, **given)
    out = torch.empty_like(q)
    planned.run(q, k, v, out)
    expect_close(out, expected)
    assert planned.problem.causal_offset == explain(q, k, v, **given).problem.causal_offset == 7
    compiled = torch.compile(lambda a, b, c: attention(a, b, c, **given), backend="eager", fullgraph=True)
    expect_close(compiled(q, k, v), expected)
    traced = torch.jit.trace(lambda a: attention(a, k, v, **given), (q,), check_trace=False)
    expect_close(traced(q), expected)


def test_a_shard_before_its_rows_is_not_masked(device: str) -> None:
    """The full steps of a ring take the kernels that know no mask."""
    q, k, v = (rand(1, 2, 64, 64, device=device, seed=seed) for seed in range(3))
    found = explain(q, k, v, causal="top_left", row_offset=64).problem
    assert found == explain(q, k, v).problem


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"causal": "bottom_right", "row_offset": 4}, ArgumentError, "bottom_right.*top_left"),
        ({"causal": "diagonal", "key_offset": 4}, ArgumentError, "causal='diagonal'.*top_left"),
        ({"row_offset": -1}, ArgumentError, "row_offset=-1; allowed are integers from 0"),
        ({"key_offset": 2**63}, ArgumentError, "key_offset=9223372036854775808; allowed"),
        ({"key_offset": 1.0}, ArgumentTypeError, "key_offset=1.0 is a float"),
        ({"row_offset": True}, ArgumentTypeError, "row_offset=True is a bool"),
        ({"row_offset": 1, "p_dropout": 0.5}, UnsupportedError, "p_dropout=0.5 with row_offset"),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], message: str) -> None:
    q = rand(1, 2, 16, 64)
    with pytest.raises(error, match=message):
        attention(q, q, q, **given)


def test_a_problem_keeps_what_its_shard_hides() -> None:
    """Simplified problems, which take other kernels, see the same pairs, in numbers that fit the C struct."""
    sizes = {"dtype": DType.F16, "batch": 1, "num_heads_q": 1, "num_heads_kv": 1, "head_dim": 64}
    limits = (-1, 0, 2, 9, 2**31 - 1)
    diagonals = (-(2**62), -(2**31) - 3, -9, -4, -1, 0, 1, 3, 6, 10, 2**31 + 3, 2**62)
    for rows, keys in ((1, 1), (4, 7), (7, 4)):
        for causal, left, right, diagonal in itertools.product(
            (None, Causal.TOP_LEFT), limits, limits, diagonals
        ):
            problem = Problem(
                **sizes, seqlen_q=rows, seqlen_k=keys, causal=causal, window=(left, right), diagonal=diagonal
            )
            wanted = seen(rows, keys, diagonal, left, right if causal is None else 0)
            new_left, new_right = problem.window or (-1, -1)
            offset = problem.causal_offset
            found = seen(rows, keys, offset, new_left, 0 if problem.is_causal else new_right)
            assert torch.equal(found, wanted), (rows, keys, causal, left, right, diagonal)
            assert problem.visible_scores == int(wanted.sum())
            assert -(2**31) <= offset < 2**31
            assert not problem.is_bottom_right or problem.diagonal is None
