"""Signatures that differ in sizes, as those of tokens and prompts do: their plans are right, others stay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sdpa_cutlass import ArgumentError, attention, attention_varlen
from sdpa_cutlass.call import call_table, calls, growing, plan_cache, planning
from sdpa_cutlass.call.launch import Plan
from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.registry import KernelInfo
from sdpa_cutlass.problem import Causal, DType, MaskType, Problem
from tests.library.reference import rand

HOT = 7  # keys of the signature that is used in every step
_STARTS = torch.tensor([0, 3, 5], dtype=torch.int32)


def _plain_call(keys: int) -> torch.Tensor:
    k = rand(1, 2, keys, 64)
    return attention(rand(1, 2, 1, 64, seed=1), k, k)


def _general_call(keys: int) -> torch.Tensor:
    k = rand(1, 2, keys, 64)
    return attention(rand(1, 2, 1, 64, seed=1), k, k, attn_mask=torch.ones(keys, dtype=torch.bool))


def _packed_call(keys: int) -> torch.Tensor:
    k = rand(keys, 2, 64)
    return attention_varlen(rand(5, 2, 64, seed=1), k, k, _STARTS, _STARTS, 3, keys)


CALLS: dict[str, tuple[Callable[[int], torch.Tensor], Callable[[], plan_cache.Plans]]] = {
    "plain": (_plain_call, lambda: calls._plain),
    "general": (_general_call, lambda: calls._general),
    "packed": (_packed_call, lambda: calls._packed),
}
paths = pytest.mark.parametrize("path", CALLS)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of keys that a plan was made for, in order."""
    made: list[int] = []

    def counted(library: Library, kernel: KernelInfo, problem: Problem, *rest: Any) -> Plan:
        made.append(problem.seqlen_k)
        return Plan(library, kernel, problem, *rest)

    for module in (planning, growing):
        monkeypatch.setattr(module, "Plan", counted)
    return made


def count(plans: plan_cache.Plans) -> int:
    return len(plans) + len(plans._older)


@paths
@pytest.mark.usefixtures("_call_path")
def test_a_growing_cache_drops_no_plan_that_is_in_use(
    path: str, planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, plans = CALLS[path]
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 16)
    hot = (HOT, HOT + 1)  # two, because the latest one is known without a look into the cache
    expected = [call(keys) for keys in hot]
    for keys in range(10, 50):
        call(keys)
        if keys % 4 == 0:
            assert all(map(torch.equal, map(call, hot), expected))
        assert count(plans()) <= 16
    assert planned == [*hot, *range(10, 50)]


@paths
def test_plans_that_nobody_uses_are_dropped(
    path: str, forget: Callable[[], None], planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget()
    call, plans = CALLS[path]
    monkeypatch.setattr(plan_cache, "MAX_PLANS", 4)
    for keys in (HOT, *range(10, 20), HOT):
        call(keys)
        assert 1 <= count(plans()) <= 4
    assert planned == [HOT, *range(10, 20), HOT]


@pytest.mark.usefixtures("_compiled_only")
def test_signatures_that_come_and_go_push_no_other_out_of_the_compiled_table(
    planned: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token's signature is met by several layers, so all of them get into the table of 32."""
    expected = _plain_call(HOT)
    for keys in range(10, 110):
        for _ in range(3):
            _plain_call(keys)
        assert torch.equal(_plain_call(HOT), expected)
    assert call_table.table is not None
    for name in ("_plain", "_general"):  # from here on only the table knows it
        monkeypatch.setattr(calls, name, plan_cache.Plans())
    for module in (planning, growing):
        monkeypatch.setattr(module, "choose", None)
    assert torch.equal(_plain_call(HOT), expected)
    with pytest.raises(TypeError):
        _plain_call(10)


def test_a_signature_that_is_met_once_stays_out_of_the_compiled_table(forget: Callable[[], None]) -> None:
    forget()
    for keys in range(1, 40):
        _plain_call(keys)
    assert call_table.table is None


LENGTHS = (33, 34, 64, 65, 7, 200)
CACHE = rand(2, 4, 256, 64)
_ODD = rand(2 * 4 * 256 * 64 + 1)[1:].view(2, 4, 256, 64)


def results(forget: Callable[[], None], call: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    """What calls give whose arguments are all checked."""
    found = []
    for keys in LENGTHS:
        forget()
        found.append(call(keys))
    forget()
    return found


GROWING: dict[str, Callable[[int], Any]] = {
    "rows of a static cache": lambda keys: attention(CACHE[:, :, :1], CACHE[:, :, :keys], CACHE[:, :, :keys]),
    "a dense cache": lambda keys: attention(
        CACHE[:, :, :1], CACHE[:, :, :keys].contiguous(), 2 * CACHE[:, :, :keys]
    ),
    "rows in front of heads": lambda keys: attention(
        CACHE[:, :, :3], *(2 * [CACHE[:, :, :keys].transpose(1, 2).contiguous().transpose(1, 2)])
    ),
    "grouped heads": lambda keys: attention(
        CACHE[:, :, :1], CACHE[:, :2, :keys], CACHE[:, 1:3, :keys], enable_gqa=True
    ),
    "top left": lambda keys: attention(
        CACHE[:, :, :5], CACHE[:, :, :keys], CACHE[:, :, :keys], causal="top_left"
    ),
    "bottom right": lambda keys: attention(
        CACHE[:, :, :5], CACHE[:, :, :keys], CACHE[:, :, :keys], causal="bottom_right", scale=0.3
    ),
    "softmax_lse": lambda keys: attention(
        CACHE[:, :, :2], CACHE[:, :, :keys], CACHE[:, :, :keys], return_lse=True
    )[1],
    "a kernel by name": lambda keys: attention(
        CACHE[:, :, :2],
        CACHE[:, :, :keys],
        CACHE[:, :, :keys],
        kernel="fmha_fwd_sm89_d64_m64n64_s1_w4_f16",
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_only_the_first_number_of_keys_is_checked_in_full(
    name: str, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = GROWING[name]
    expected = results(forget, call)
    assert torch.equal(call(LENGTHS[0]), expected[0])
    monkeypatch.setattr(calls, "_run_in_full", None)
    assert all(map(torch.equal, map(call, LENGTHS), expected))
    assert count(calls._plain) == len(LENGTHS)


CHECKED: dict[str, Callable[[int], Any]] = {
    "keys at an odd address": lambda keys: attention(CACHE[:, :, :1], _ODD[:, :, :keys], _ODD[:, :, :keys]),
    "one batch for all": lambda keys: attention(CACHE[:, :, :1], CACHE[:1, :, :keys], CACHE[:1, :, :keys]),
    "one head for all": lambda keys: attention(CACHE[:, :, :1], CACHE[:, :1, :keys], CACHE[:, :1, :keys]),
    "one batch of keys": lambda keys: attention(CACHE[:, :, :1], CACHE[:1, :, :keys], CACHE[:, :, :keys]),
    "a row of another stride": lambda keys: attention(
        CACHE[:, :, :1], CACHE[:, :, :keys], CACHE.mT.contiguous().mT[:, :, :keys]
    ),
    "out": lambda keys: attention(
        CACHE[:, :, :1], CACHE[:, :, :keys], CACHE[:, :, :keys], out=torch.empty(2, 4, 1, 64).half()
    ),
}


@pytest.mark.parametrize("name", CHECKED)
def test_what_is_checked_with_every_number_of_keys(name: str, forget: Callable[[], None]) -> None:
    call = CHECKED[name]
    expected = results(forget, call)
    assert all(map(torch.equal, map(call, LENGTHS), expected))


def test_keys_and_values_of_different_numbers_are_refused(forget: Callable[[], None]) -> None:
    forget()
    attention(CACHE[:, :, :1], CACHE[:, :, :33], CACHE[:, :, :33])
    with pytest.raises(ArgumentError, match="value has seqlen 35"):
        attention(CACHE[:, :, :1], CACHE[:, :, :34], CACHE[:, :, :35])
    assert torch.equal(
        attention(CACHE[:, :, :1], CACHE[:, :, :0], CACHE[:, :, :0]), torch.zeros(2, 4, 1, 64).half()
    )


def test_a_shard_whose_mask_hides_nothing_yet(forget: Callable[[], None]) -> None:
    """The row sees 7 keys. While there are no more, its problem is one without a mask."""

    def call(keys: int) -> torch.Tensor:
        part = CACHE[:, :, :keys]
        return attention(CACHE[:, :, :1], part, part, causal="top_left", row_offset=6)

    forget()
    expected = call(7)
    assert torch.equal(call(8), expected)
    assert torch.equal(call(40), expected)


Sizes = tuple[int, int, int, int, int]  # batch, query heads, key heads, rows, keys
SIZES: tuple[Sizes, ...] = (
    (2, 4, 4, 33, 33), (1, 4, 4, 33, 33), (2, 4, 4, 1, 70), (2, 4, 4, 1, 71), (2, 4, 2, 1, 71),
    (1, 1, 1, 1, 1), (2, 4, 1, 64, 7), (1, 4, 4, 200, 200), (2, 3, 3, 100, 130), (2, 4, 4, 33, 33),
)  # fmt: skip
_ROWS_FIRST = rand(2, 256, 4, 64, seed=1)  # [B, S, H, D]


def sliced(sizes: Sizes) -> list[torch.Tensor]:
    batch, heads_q, heads_kv, rows, keys = sizes
    return [
        CACHE[:batch, :heads_q, :rows],
        2 * CACHE[:batch, :heads_kv, :keys],
        CACHE.flip(2)[:batch, :heads_kv, :keys],
    ]


def rows_first(sizes: Sizes) -> list[torch.Tensor]:
    batch, heads_q, heads_kv, rows, keys = sizes
    pairs = ((heads_q, rows), (heads_kv, keys), (heads_kv, keys))
    tensors = [_ROWS_FIRST[:batch, :length, :heads].contiguous() for heads, length in pairs]
    return [tensor.transpose(1, 2) for tensor in tensors]


def of_one_projection(sizes: Sizes) -> list[torch.Tensor]:
    batch, heads_q, heads_kv, rows, keys = sizes
    tensors = torch.cat([_ROWS_FIRST, 2 * _ROWS_FIRST, -_ROWS_FIRST], 3).split(64, dim=3)
    pairs = zip(tensors, ((heads_q, rows), (heads_kv, keys), (heads_kv, keys)), strict=True)
    return [tensor[:batch, :length, :heads].transpose(1, 2) for tensor, (heads, length) in pairs]


def check_other_sizes(
    call: Callable[[Any], tuple[torch.Tensor, torch.Tensor]],
    all_sizes: Sequence[Any],
    forget: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    *,
    first: int = 0,
) -> None:
    """Once number `first` is known, none needs a full check, and all give what they give by themselves."""
    expected = []
    for sizes in all_sizes:
        forget()
        expected.append(call(sizes))
    forget()
    call(all_sizes[first])
    monkeypatch.setattr(calls, "_run_in_full", None)
    for _ in range(2):  # made from another call, and known
        for sizes, results in zip(all_sizes, expected, strict=True):
            for result, part in zip(call(sizes), results, strict=True):
                assert torch.equal(result, part)
                assert result.stride() == part.stride()


@pytest.mark.parametrize("make", [sliced, rows_first, of_one_projection])
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
@pytest.mark.parametrize("first", [0, 3], ids=["prompt first", "token first"])
def test_other_sizes_are_not_checked_in_full(
    make: Callable[[Sizes], list[torch.Tensor]],
    causal: str | None,
    first: int,
    forget: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        found = attention(*make(sizes), causal=causal, return_lse=True)
        assert isinstance(found, tuple)
        return found

    check_other_sizes(call, SIZES, forget, monkeypatch, first=first)


def test_sizes_that_do_not_agree_are_broadcast_or_refused(forget: Callable[[], None]) -> None:
    def part(batch: int, heads: int, rows: int, head_dim: int = 64) -> torch.Tensor:
        return CACHE[:batch, :heads, :rows, :head_dim]

    forget()
    attention(part(2, 4, 9), part(2, 4, 9), part(2, 4, 9), enable_gqa=False)
    refused = {
        "batch dimensions": (part(2, 4, 9), part(2, 4, 9), CACHE.repeat(2, 1, 1, 1)[:3, :, :9]),
        "value has seqlen 8": (part(2, 4, 9), part(2, 4, 9), part(2, 4, 8)),
        "key and value have 2 heads": (part(2, 4, 9), part(2, 2, 9), part(2, 2, 9)),
        "key has 4 heads": (part(2, 4, 9), part(2, 4, 9), part(2, 2, 9)),
        "key has head_dim 32": (part(2, 4, 9), part(2, 4, 9, 32), part(2, 4, 9)),
    }
    for message, tensors in refused.items():
        with pytest.raises(ArgumentError, match=message):
            attention(*tensors, enable_gqa=False)
    whole = attention(part(2, 4, 9), part(2, 1, 9), part(2, 1, 9), enable_gqa=True)
    assert torch.equal(attention(part(2, 4, 9), part(2, 1, 9), part(2, 1, 9), enable_gqa=False), whole)
    one = attention(part(2, 4, 9), part(1, 4, 9).expand(2, -1, -1, -1), part(1, 4, 9).expand(2, -1, -1, -1))
    assert torch.equal(attention(part(2, 4, 9), part(1, 4, 9), part(1, 4, 9), enable_gqa=False), one)
    for empty in ((0, 4, 9), (2, 0, 9), (2, 4, 0)):
        assert attention(part(*empty), part(*empty), part(*empty), enable_gqa=False).shape == (*empty, 64)
    assert torch.equal(
        attention(part(2, 4, 9), part(2, 4, 0), part(2, 4, 0), enable_gqa=False),
        torch.zeros(2, 4, 9, 64).half(),
    )


@pytest.mark.parametrize("batches", [slice(1), slice(None)], ids=["one batch", "all"])
def test_queries_that_were_broadcast_before(batches: slice, forget: Callable[[], None]) -> None:
    q, k, v = CACHE[:1, :1, :3], 2 * CACHE, CACHE

    def call() -> torch.Tensor:
        heads = slice(1) if batches == slice(1) else slice(None)
        return attention(q, k[batches, heads, :34], v[batches, heads, :34])

    forget()
    expected = call()
    forget()
    assert attention(q, k[:, :, :33], v[:, :, :33]).shape == (2, 4, 3, 64)
    assert torch.equal(call(), expected)


ODD: dict[str, Callable[[int], list[torch.Tensor]]] = {
    "columns of other strides": lambda rows: [
        CACHE.mT.contiguous().mT[:, :, :rows], CACHE[:, :, :40], CACHE[:, :, :40]
    ],
    "an odd address": lambda rows: [_ODD[:, :, :rows], CACHE[:, :, :40], CACHE[:, :, :40]],
    "values of another head_dim": lambda rows: [
        CACHE[:, :, :rows], CACHE[:, :, :40], CACHE[:, :, :40, :32]
    ],
    "rows that share their memory": lambda rows: [
        CACHE[:, :, :1].expand(-1, -1, rows, -1), CACHE[:, :, :40], CACHE[:, :, :40]
    ],
    "negative": lambda rows: [_negative(CACHE)[:, :, :rows], CACHE[:, :, :40], CACHE[:, :, :40]],
}  # fmt: skip


def _negative(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a view with the negative bit, which begins at a multiple of 16 bytes."""
    memory = torch.zeros(2 * tensor.numel() + 8, dtype=torch.float16)
    view = torch.view_as_complex(memory.view(-1, 2)).conj().imag
    negative = view.as_strided(tensor.shape, tensor.stride(), storage_offset=0)
    assert negative.is_neg()
    return negative.copy_(tensor)


@pytest.mark.parametrize("name", ODD)
def test_tensors_that_are_not_like_the_known_ones(name: str, forget: Callable[[], None]) -> None:
    expected = []
    for rows in LENGTHS:
        forget()
        expected.append(attention(*ODD[name](rows)))
    forget()
    for rows, result in zip(LENGTHS, expected, strict=True):
        attention(CACHE[:, :, : rows + 10], CACHE[:, :, :40], CACHE[:, :, :40])
        found = attention(*ODD[name](rows))
        assert torch.equal(found, result)
        assert found.stride() == result.stride()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": Causal.BOTTOM_RIGHT},
        {"causal": Causal.TOP_LEFT, "diagonal": 3, "window": (7, 0)},
        {"head_dim_v": 40, "mask": MaskType.F16, "has_dropout": True, "has_lengths": True, "has_sinks": True},
    ],
)
def test_a_resized_problem_keeps_everything_else(options: dict[str, Any]) -> None:
    sizes = {"batch": 2, "num_heads_q": 8, "num_heads_kv": 4, "seqlen_q": 30, "seqlen_k": 50}
    problem = Problem(
        dtype=DType.BF16, **{name: 3 * size for name, size in sizes.items()}, head_dim=48, **options
    )
    assert problem.resized(**sizes) == dataclasses.replace(problem, **sizes)
    assert problem.resized(**sizes) != problem
