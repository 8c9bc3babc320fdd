"""Arrays of other libraries as inputs and outputs: NumPy, DLPack, the two array interfaces, and mixtures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass import attention, scaled_dot_product_attention, unfused_attention
from sdpa_cutlass.arrays.tensors import as_tensor
from sdpa_cutlass.call import planning
from sdpa_cutlass.errors import ArgumentTypeError
from tests.library.array_kinds import KINDS, CudaInterfaceOnly, DLPackOnly

Q = torch.randn(2, 4, 9, 64, generator=torch.Generator().manual_seed(0)).half()
K = torch.randn(2, 2, 11, 64, generator=torch.Generator().manual_seed(1)).half()


@pytest.mark.parametrize("function", [attention, unfused_attention])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str, function: Any) -> None:
    make = KINDS[kind]
    expected, expected_lse = function(Q, K, K, causal="bottom_right", return_lse=True)
    for inputs in ([make(t) for t in (Q, K, K)], [Q, make(K), K], [make(Q), K, DLPackOnly(K)]):
        out, lse = function(*inputs, causal="bottom_right", return_lse=True)
        assert isinstance(out, torch.Tensor)
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_shared(kind: str) -> None:
    assert as_tensor("query", KINDS[kind](Q)).data_ptr() == Q.data_ptr()
    assert as_tensor("query", Q) is Q


@pytest.mark.parametrize("kind", KINDS)
def test_out_is_filled_and_returned_as_given(kind: str) -> None:
    expected = attention(Q, K, K)
    buffer = torch.full_like(Q, torch.nan)
    out = KINDS[kind](buffer)
    assert attention(Q.numpy(), K, K, out=out) is out
    assert torch.equal(buffer, expected)


def test_the_other_functions() -> None:
    q, k = Q.numpy(), K.numpy()
    expected = scaled_dot_product_attention(Q, K, K, is_causal=True, enable_gqa=True)
    assert torch.equal(scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True), expected)
    assert sdpa_cutlass.explain(q, k, k).choice == sdpa_cutlass.explain(Q, K, K).choice


def test_views_of_arrays() -> None:
    rows = np.ascontiguousarray(Q.transpose(1, 2).numpy())
    assert torch.equal(attention(rows.transpose(0, 2, 1, 3), K, K), attention(Q, K, K))
    flipped = K.flip(2).numpy()[:, :, ::-1]
    assert torch.equal(attention(Q, flipped, K), attention(Q, K, K))


def test_read_only_arrays_are_read_and_not_written() -> None:
    frozen = Q.clone().numpy()
    frozen.flags.writeable = False
    assert torch.equal(attention(frozen, K, K), attention(Q, K, K))
    with pytest.raises(TypeError, match="out is a read-only ndarray"):
        attention(Q, K, K, out=frozen)
    with pytest.raises(TypeError, match="out has byte strides"):
        attention(Q, K, K, out=Q.clone().numpy()[:, :, ::-1])


def test_bfloat16_arrays() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k = (tensor.bfloat16() for tensor in (Q, K))
    arrays = [tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for tensor in (q, k, k)]
    out = attention(*arrays)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, attention(q, k, k))


def test_a_known_signature_reuses_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attention(Q, K, K)
    monkeypatch.setattr(planning, "choose", None)  # planning again would fail
    assert torch.equal(attention(Q.numpy(), K.numpy(), DLPackOnly(K)), expected)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1], r"query is a list; allowed is a torch\.Tensor, or an array with one of __dlpack__"),
        (np.ndarray, "query is a type; allowed"),
        (Q.numpy().astype(np.float32), r"query has dtype torch\.float32; allowed are"),
        (np.array(["a"]), "query is a ndarray of dtype <U1, which torch cannot read"),
        (Q.numpy().astype(">f2"), "query is a ndarray of dtype >f2, which torch cannot read"),
        (np.zeros((), np.float16), "query has shape"),
    ],
    ids=str,
)
def test_refused(value: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        attention(value, K, K)


def test_errors_of_the_producer_are_ours() -> None:
    class Broken:
        def __dlpack__(self, **_: object) -> None:
            raise BufferError("not today")

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

    with pytest.raises(ArgumentTypeError, match=r"key is a Broken.*not today"):
        attention(Q, Broken(), K)


def test_the_stream_of_a_cuda_array_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: torch's side is replaced, and what is asked of it recorded."""
    asked = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            asked.append(other)

    monkeypatch.setattr(torch, "as_tensor", lambda value: value.tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: (stream, device))

    class Array:
        tensor = Q

        def __init__(self, stream: int | None) -> None:
            self.__cuda_array_interface__ = {"stream": stream}

    assert as_tensor("query", Array(None)) is Q
    assert asked == []
    assert as_tensor("query", Array(7)) is Q
    assert asked == [(7, Q.device)]


@pytest.mark.gpu
def test_cuda_arrays() -> None:
    q, k = Q.cuda(), K.cuda()
    expected = attention(q, k, k)
    stream = torch.cuda.Stream()
    for make in (DLPackOnly, CudaInterfaceOnly, lambda t: CudaInterfaceOnly(t, stream.cuda_stream)):
        assert torch.equal(attention(make(q), k, make(k)), expected)
    with pytest.raises(TypeError, match="key is on cpu; query is on cuda"):
        attention(q, K.numpy(), k)
