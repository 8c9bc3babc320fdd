"""Masks, lengths, dropout and packed sequences on the compiled call path, which third calls take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdpa_cutlass import ArgumentError, attention, attention_varlen
from sdpa_cutlass import scaled_dot_product_attention as sdpa
from sdpa_cutlass.call import call_table
from tests.library.launchers import SHAPE, qkv
from tests.library.reference import rand

pytestmark = pytest.mark.usefixtures("_compiled_only")


def bias(device: str, seed: int) -> torch.Tensor:
    return rand(1, 2, 9, 9, device=device, seed=100 + seed)


def padding(device: str, seed: int) -> torch.Tensor:
    return torch.arange(9, device=device) < 3 + seed


def lengths(device: str, seed: int) -> torch.Tensor:
    return torch.tensor([4 + seed], dtype=torch.int32, device=device)


Options = Callable[[str, int], dict[str, Any]]
VARIANTS: dict[str, Options] = {
    "bias": lambda device, seed: {"attn_mask": bias(device, seed)},
    "bool": lambda device, seed: {"attn_mask": padding(device, seed)},
    "strided": lambda device, seed: {"attn_mask": bias(device, seed).transpose(2, 3), "causal": "top_left"},
    "seqlens_k": lambda device, seed: {"seqlens_k": lengths(device, seed)},
    "seqlens": lambda device, seed: {
        "seqlens_q": lengths(device, seed),
        "seqlens_k": lengths(device, seed + 1),
        "causal": "bottom_right",
        "return_lse": True,
    },
    "bshd": lambda device, seed: {"layout": "bshd", "return_lse": True},
    "out": lambda device, seed: {
        "attn_mask": padding(device, seed),
        "out": torch.zeros(SHAPE, dtype=torch.float16, device=device),
    },
    "dropout": lambda device, seed: {"p_dropout": 0.3, "return_philox": True},
    "all": lambda device, seed: {
        "attn_mask": bias(device, seed),
        "seqlens_k": lengths(device, seed),
        "p_dropout": 0.5,
        "scale": 0.25,
        "return_lse": True,
        "return_philox": True,
    },
}


def answer(options: Options, device: str, seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    result = attention(*qkv(device, seed), **options(device, seed))
    return result if isinstance(result, tuple) else (result,)


def assert_same(got: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
        else:
            assert type(a) is type(b)
            assert a == b


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_third_call_is_compiled(variant: str, device: str, without_python: Callable[[], None]) -> None:
    options = VARIANTS[variant]
    expected = [answer(options, device, seed) for seed in range(2)]
    without_python()
    for seed in (1, 0):
        assert_same(answer(options, device, seed), expected[seed])
    if variant != "bshd":
        assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.parametrize("mask", [None, bias])
@pytest.mark.parametrize("p_dropout", [0.0, 0.25])
def test_torchs_function(
    mask: Callable[[str, int], torch.Tensor] | None,
    p_dropout: float,
    device: str,
    without_python: Callable[[], None],
) -> None:
    def torchs_answer(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        given = None if mask is None else mask(device, seed)
        return sdpa(*qkv(device, seed), attn_mask=given, dropout_p=p_dropout)

    expected = [torchs_answer(seed) for seed in range(2)]
    without_python()
    assert [torch.equal(torchs_answer(seed), expected[seed]) for seed in (1, 0)] == [True] * 2


@pytest.mark.parametrize("causal", [None, "bottom_right"])
@pytest.mark.parametrize("p_dropout", [0.0, 0.25])
def test_packed_sequences(
    causal: str | None, p_dropout: float, device: str, without_python: Callable[[], None]
) -> None:
    def packed_answer(seed: int, bound: int = 1000) -> tuple[Any, ...]:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in qkv(device, seed))
        starts = torch.tensor([0, 3 + seed, 9], dtype=torch.int32, device=device)
        torch.manual_seed(seed)
        return attention_varlen(
            q, k, v, starts, starts.clone(), int(str(bound)), int(str(bound)),
            causal=causal, p_dropout=p_dropout, return_lse=True, return_philox=True,
        )  # fmt: skip

    expected = [packed_answer(seed) for seed in range(2)]
    without_python()
    for seed in (1, 0):
        assert_same(packed_answer(seed), expected[seed])
    with pytest.raises(TypeError, match="NoneType"):
        packed_answer(0, 7)


def test_every_call_draws_anew(device: str) -> None:
    def drawn() -> tuple[torch.Tensor, Any]:
        return attention(*qkv(device), p_dropout=0.5, return_philox=True)

    torch.manual_seed(1)
    results = [drawn() for _ in range(4)]
    assert len({philox for _, philox in results}) == 4
    for out, philox in results:
        assert torch.equal(attention(*qkv(device), p_dropout=0.5, philox=philox), out)


def test_what_a_signature_does_not_say_is_still_checked(device: str) -> None:
    q, k, v = qkv(device)
    mask, counts = bias(device, 0), lengths(device, 0)
    out = torch.empty_like(q)
    for _ in range(3):
        attention(q, k, v, attn_mask=mask, seqlens_k=counts)
        attention(q, k, v, attn_mask=mask, seqlens_k=counts, out=out)
        sdpa(q, k, v, attn_mask=mask.float())
    assert attention(q, k, v, attn_mask=mask.clone().requires_grad_(), seqlens_k=counts).requires_grad
    assert attention(q, k, v.clone().requires_grad_(), attn_mask=mask, seqlens_k=counts).requires_grad
    inside = out.flatten()[:162].view(1, 2, 9, 9)
    with pytest.raises(ArgumentError, match="out overlaps attn_mask in memory"):
        attention(q, k, v, attn_mask=inside, seqlens_k=counts, out=out)
    words = out.flatten()[:2].view(torch.int32)
    with pytest.raises(ArgumentError, match="out overlaps seqlens_k in memory"):
        attention(q, k, v, attn_mask=mask, seqlens_k=words, out=out)
    with pytest.raises(ArgumentError, match="seqlens_k has shape"):
        attention(q, k, v, attn_mask=mask, seqlens_k=torch.cat([counts, counts]))


def test_a_mask_that_autocast_would_cast_is_never_known(device: str) -> None:
    q, k, v = qkv(device)
    mask = bias(device, 0).float() + 1e-4  # more than float16 can hold
    plain = [attention(q, k, v, attn_mask=mask) for _ in range(3)]
    assert call_table.table is None
    with torch.autocast(device, torch.float16):
        cast = attention(q, k, v, attn_mask=mask)
    assert torch.equal(cast, attention(q, k, v, attn_mask=mask.half()))
    assert torch.equal(plain[0], plain[2])


def test_given_random_bits_take_the_way_through_python(
    device: str, without_python: Callable[[], None]
) -> None:
    q, k, v = qkv(device)
    state = torch.tensor([5, 6], device=device)
    given = [attention(q, k, v, p_dropout=0.5, philox=philox) for philox in ((5, 6), state, (5, 6))]
    assert all(torch.equal(out, given[0]) for out in given)
    assert call_table.table is None
    without_python()
    with pytest.raises(TypeError, match="NoneType"):
        attention(q, k, v, p_dropout=0.5, philox=(5, 6))


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "masked"])
def test_a_new_table_compiles_nothing_again(is_packed: bool, device: str) -> None:
    """torch.compile's code must not depend on whether signatures are known."""
    q, k, v = qkv(device)
    packed_q, packed_k, packed_v = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    starts = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    mask = padding(device, 0)

    def function() -> Any:
        if is_packed:
            return attention_varlen(packed_q, packed_k, packed_v, starts, starts, 9, 9)
        return attention(q, k, v, attn_mask=mask)

    torch._dynamo.reset()
    traced = torch.compile(function, backend="eager")
    assert call_table.table is None
    expected = traced()
    for _ in range(2):
        function()
    assert call_table.table is not None
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(traced(), expected)
    torch._dynamo.reset()


@pytest.mark.gpu
def test_a_captured_call_draws_in_every_replay() -> None:
    q, k, v = qkv("cuda")
    for _ in range(3):
        attention(q, k, v, p_dropout=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, philox = attention(q, k, v, p_dropout=0.5, return_philox=True)
    states = []
    for _ in range(2):
        graph.replay()
        states.append(tuple(philox.tolist()))
        assert torch.equal(out, attention(q, k, v, p_dropout=0.5, philox=states[-1]))
    assert states[0] != states[1]
