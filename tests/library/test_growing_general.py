"""Other sizes of calls with dropout, lengths, sinks or another layout, and of packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdpa_cutlass import ArgumentError, ArgumentTypeError, attention, attention_varlen
from tests.library.reference import rand
from tests.library.test_growing_cache import (
    CACHE,
    LENGTHS,
    Sizes,
    check_other_sizes,
    of_one_projection,
    results,
    rows_first,
    sliced,
)

SINKS = rand(4, seed=3)
GENERAL: dict[str, tuple[bool, dict[str, Any]]] = {  # whether a batch brings lengths of its own, options
    "dropout": (False, {"p_dropout": 0.3, "philox": (7, 8)}),
    "causal dropout": (False, {"p_dropout": 0.3, "philox": (7, 8), "causal": "bottom_right"}),
    "rows in front of heads": (False, {"layout": "bshd"}),
    "sinks": (False, {"sinks": SINKS}),
    "lengths": (True, {}),
    "causal lengths": (True, {"causal": "bottom_right"}),
}
GENERAL_SIZES: tuple[Sizes, ...] = (
    (2, 4, 4, 33, 33),
    (2, 4, 2, 1, 71),
    (2, 4, 4, 130, 7),
    (2, 4, 4, 33, 200),
)


@pytest.mark.parametrize("make", [sliced, rows_first, of_one_projection])
@pytest.mark.parametrize("name", GENERAL)
def test_other_sizes_of_general_calls(
    make: Callable[[Sizes], list[torch.Tensor]],
    name: str,
    forget: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_lengths, options = GENERAL[name]

    def call(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = make(sizes)
        if options.get("layout") == "bshd":
            tensors = [tensor.transpose(1, 2) for tensor in tensors]
        lengths = {}
        if has_lengths:
            lengths = {"seqlens_k": torch.tensor([5, sizes[4]], dtype=torch.int32)}
        found = attention(*tensors, **options, **lengths, return_lse=True)
        assert isinstance(found, tuple)
        return found

    check_other_sizes(call, GENERAL_SIZES, forget, monkeypatch)


Packed = tuple[int, int, int, int, list[int], list[int]]  # query heads, key heads, bounds, starts
PACKS: tuple[Packed, ...] = (
    (4, 4, 9, 9, [0, 9, 12], [0, 9, 12]),
    (4, 2, 9, 70, [0, 9, 12], [0, 1, 71]),
    (4, 4, 100, 9, [0, 1, 1, 101], [0, 9, 18, 20]),
    (4, 4, 1000, 1000, [0, 40], [0, 40]),
    (4, 4, 9, 9, [0, 9, 12], [0, 9, 12]),
)


@pytest.mark.parametrize("is_one_projection", [False, True])
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"sinks": SINKS}], ids=str)
def test_other_packs(
    is_one_projection: bool,
    options: dict[str, Any],
    forget: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rand(256, 4, 3 * 64)

    def call(pack: Packed) -> tuple[torch.Tensor, torch.Tensor]:
        heads_q, heads_kv, longest_q, longest_k, starts_q, starts_k = pack
        q, k, v = rows.split(64, dim=2)
        tensors = [q[: starts_q[-1], :heads_q], k[: starts_k[-1], :heads_kv], v[: starts_k[-1], :heads_kv]]
        if not is_one_projection:
            tensors = [tensor.contiguous() for tensor in tensors]
        starts = (torch.tensor(ends, dtype=torch.int32) for ends in (starts_q, starts_k))
        found = attention_varlen(*tensors, *starts, longest_q, longest_k, **options, return_lse=True)
        assert isinstance(found, tuple)
        return found

    check_other_sizes(call, PACKS, forget, monkeypatch)


def test_sinks_and_lengths_have_to_fit_other_sizes(forget: Callable[[], None]) -> None:
    forget()
    length = torch.tensor([5, 9], dtype=torch.int32)
    part = CACHE[:, :, :9]
    attention(part, part, part, sinks=SINKS)
    with pytest.raises(ArgumentError, match="sinks has shape"):
        attention(part[:, :3], part[:, :3], part[:, :3], sinks=SINKS)
    attention(part, part, part, seqlens_k=length)
    with pytest.raises(ArgumentError, match="seqlens_k has shape"):
        attention(part[:1], part[:1], part[:1], seqlens_k=length)


def test_packs_that_are_not_like_the_known_one(forget: Callable[[], None]) -> None:
    part, starts = rand(40, 4, 64), torch.tensor([0, 9, 12], dtype=torch.int32)

    def call(starts_q: torch.Tensor, starts_k: torch.Tensor, longest_q: Any, longest_k: Any) -> torch.Tensor:
        return attention_varlen(part[:12], part[:12], part[:12], starts_q, starts_k, longest_q, longest_k)

    forget()
    expected = call(starts, starts, 9, 9)
    refused = {
        "max_seqlen_q=-1": (starts, starts, -1, 9),
        f"max_seqlen_k={2**31}": (starts, starts, 9, 2**31),
        "cu_seqlens_k has shape": (starts, starts[:2], 9, 9),
        "cu_seqlens_q has stride 2": (starts.repeat_interleave(2)[::2], starts, 9, 9),
        "cu_seqlens_k has stride 2": (starts, starts.repeat_interleave(2)[::2], 9, 9),
        "cu_seqlens_q has dtype": (starts.long(), starts, 9, 9),
    }
    for message, arguments in refused.items():
        with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
            call(*arguments)
    assert torch.equal(call(starts, starts, 10, 10), expected)
    assert torch.equal(call(starts, starts, 10, 0), torch.zeros(12, 4, 64).half())
    assert torch.equal(call(starts, starts, 2**31 - 1, 2**31 - 1), expected)


@pytest.mark.parametrize("hidden", ["window", "attn_mask"])
def test_masks_and_windows_of_other_sizes(hidden: str, forget: Callable[[], None]) -> None:
    """A window that hides nothing of few keys hides some of more."""

    def call(keys: int) -> torch.Tensor:
        part = CACHE[:, :, :keys]
        mask = {"window": (6, 0)} if hidden == "window" else {"attn_mask": torch.arange(keys) < 7}
        return attention(part, part, part, **mask)

    expected = results(forget, call)
    call(7)
    assert all(map(torch.equal, map(call, LENGTHS), expected))
