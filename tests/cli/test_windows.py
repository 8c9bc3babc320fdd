"""benchmarks/windows.py counts the scores that a window lets through."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.windows import seen


@pytest.mark.parametrize("seqlen", [1, 7, 33])
@pytest.mark.parametrize("window", [None, (0, 0), (3, 2), (40, 40)])
@pytest.mark.parametrize("causal", [None, "top_left"])
def test_scores_under_a_window_are_counted_as_one_by_one(
    seqlen: int, window: tuple[int, int] | None, causal: str | None
) -> None:
    left, right = window or (seqlen, seqlen)
    pairs = itertools.product(range(seqlen), repeat=2)
    expected = sum(-left <= col - row <= (0 if causal else right) for row, col in pairs)
    assert seen(seqlen, window, causal) == expected
