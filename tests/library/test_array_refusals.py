"""What attention(..., out=array) refuses where torch is not installed, before anything is launched."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest

from sdpa_cutlass import attention, plan, unfused_attention
from sdpa_cutlass.errors import ArgumentError, SdpaError, UnsupportedError
from sdpa_cutlass.library import abi
from sdpa_cutlass.library.locate import Target
from tests.library.array_kinds import (
    Broken,
    CudaDLPack,
    Edited,
    Empty,
    Immutable,
    Interface,
    Numbers,
    without_torch,
)
from tests.library.reference import rand

Q, K = rand(2, 4, 9, 64), rand(2, 2, 11, 64, seed=1)


def array(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def misaligned() -> np.ndarray:
    return array(2 * 4 * 9 * 64 + 1)[1:].reshape(Q.shape)


def odd(*shape: int) -> np.ndarray:
    """float32 at an address that is no multiple of 4."""
    return array(4 * math.prod(shape) + 2, dtype=np.uint8)[2:].view(np.float32).reshape(shape)


def read_only() -> np.ndarray:
    result = array(*Q.shape)
    result.flags.writeable = False
    return result


DEEP = {"key": array(2, 3, 2, 11, 64), "value": array(2, 3, 2, 11, 64)}  # two batch dimensions


@without_torch
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": 1}, TypeError, r"query is a int; allowed is a torch\.Tensor, or an array with one of"),
        ({"value": None}, TypeError, "value is a NoneType; allowed"),
        ({"key": array(2, 2, 11, 64, dtype=np.float32)}, TypeError, "key has dtype float32; allowed are"),
        ({"query": array(2, 4, 9, 64, dtype=">f2")}, TypeError, "query has dtype >f2; allowed are"),
        ({"query": Numbers(array(2, 4, 9, 64, dtype=complex))}, TypeError, "query has dtype complex128"),
        ({"query": Numbers(array(2, 4, 9, 64, dtype=bool))}, TypeError, "query has dtype bool"),
        ({"query": np.array(["a"])}, TypeError, "query has dtype <U1"),
        ({"query": CudaDLPack(Q, 1)}, TypeError, "key is on cpu; query is on cuda:1"),
        ({"query": Numbers(Q.numpy(), (10, 0))}, TypeError, "query is on DLPack device type 10; allowed"),
        (
            {"key": Broken(K.numpy())},
            TypeError,
            "key is a Broken of dtype unknown, which cannot .* not today",
        ),
        ({"key": Empty(K.numpy())}, TypeError, r"key\.__dlpack__\(\) gave no capsule"),
        ({"key": Edited(K.numpy(), major=2)}, TypeError, "key speaks DLPack 2; allowed is 1"),
        ({"out": Edited(array(*Q.shape), flags=2)}, TypeError, "out is a read-only Edited"),
        ({"query": Edited(Q.numpy(), lanes=2)}, TypeError, "query has dtype 2 x float16"),
        ({"query": Edited(Q.numpy(), code=9)}, TypeError, "query has dtype DLPack type 9 of 16"),
        ({"query": Interface(data=b"bytes")}, TypeError, "query is a Interface without an address"),
        ({"query": Interface(mask=Q.numpy())}, TypeError, "query is a masked array"),
        ({"query": Interface(strides=(1, 1, 1, 1))}, ValueError, r"query has byte strides \(1, 1, 1, 1\)"),
        ({"query": array(2, 4, 18, 64)[:, :, ::-2]}, NotImplementedError, "query has strides .* negative"),
        ({"query": array(2, 4, 9, 128)[..., ::2]}, NotImplementedError, "query has last stride 2; allowed"),
        ({"query": misaligned()}, NotImplementedError, "query starts at address .* copied without torch"),
        (
            {"query": array(2, 4, 9, 60), "key": array(2, 2, 11, 60)},
            NotImplementedError,
            "query has head_dim 60; kernels take multiples of 8; nothing is copied without torch",
        ),
        (
            {"key": array(2, 2, 0, 64), "value": array(2, 2, 0, 64)},
            NotImplementedError,
            "key has seqlen 0, .* nothing is filled without torch",
        ),
        (
            {"query": array(3, 2, 4, 9, 64).transpose(1, 0, 2, 3, 4)} | DEEP,
            NotImplementedError,
            "query has strides .* batch dimensions do not merge",
        ),
        (
            {"query": array(2, 3, 4, 9, 64), "out": array(3, 2, 4, 9, 64).transpose(1, 0, 2, 3, 4)} | DEEP,
            ValueError,
            "out has strides .*; its batch dimensions must merge",
        ),
        ({"key": array(2, 2, 11, 32)}, ValueError, "key has head_dim 32"),
        ({"p_dropout": 0.5}, NotImplementedError, "philox is missing: nothing is drawn without torch"),
        ({"p_dropout": 1.0}, NotImplementedError, "p_dropout is 1.* nothing is filled without torch"),
        (
            {"philox": array(2)},
            TypeError,
            "philox is a ndarray; allowed without torch, and with stream or softmax_lse given, are a "
            "PhiloxState and a pair of integers$",
        ),
        ({"attn_mask": array(9, 11, dtype=np.int32)}, TypeError, "attn_mask has dtype int32; allowed are"),
        ({"attn_mask": array(9, 12)}, ValueError, "attn_mask has shape"),
        ({"seqlens_k": array(2, dtype=np.int64)}, TypeError, "seqlens_k has dtype int64"),
        ({"out": array(2, 4, 9, 32)}, ValueError, r"out has shape \(2, 4, 9, 32\); the result has"),
        (
            {"out": array(2, 4, 9, 64, dtype=np.float32)},
            TypeError,
            "out has dtype float32; query has float16",
        ),
        ({"out": read_only()}, TypeError, "out is a read-only ndarray"),
        ({"out": Numbers(read_only())}, TypeError, "out is a read-only Numbers"),
        ({"out": Immutable(Q)}, TypeError, "out is a read-only Immutable"),
        ({"out": misaligned()}, ValueError, "out starts at address"),
        ({"out": Q.numpy()}, ValueError, "out overlaps query in memory"),
        ({"softmax_lse": array(2, 4, 9)}, TypeError, "softmax_lse has dtype float16; allowed is float32"),
        ({"softmax_lse": array(4, 9, dtype=np.float32)}, ValueError, r"softmax_lse has shape \(4, 9\)"),
        ({"softmax_lse": array(2, 4, 18, dtype=np.float32)[..., ::2]}, ValueError, "softmax_lse has strides"),
        ({"softmax_lse": odd(2, 4, 9)}, ValueError, "softmax_lse starts at address .* multiple of 4"),
        ({"attn_mask": odd(9, 11)}, ValueError, "attn_mask starts at address .* multiple of 4"),
        ({"softmax_lse": 1}, TypeError, "softmax_lse is a int"),
        ({"return_lse": True}, ValueError, "softmax_lse is missing: nothing is allocated without torch"),
        ({"stream": 7}, ValueError, "stream=7; query is on cpu"),
        ({"stream": "first"}, TypeError, "stream is a str; allowed"),
        ({"stream": True}, TypeError, "stream is a bool; allowed"),
        ({"stream": -1}, ValueError, "stream=-1; allowed"),
        ({"causal": "left"}, ValueError, "causal='left'"),
        ({"kernel": "none"}, ValueError, "kernel='none' is not one of"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_refused(
    change: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abi.library(Target.HOST), "launch_function", None)
    arrays = {"query": Q.numpy(), "key": K.numpy(), "value": K.numpy(), "out": array(*Q.shape)} | change
    with pytest.raises(error, match=message) as found:
        attention(arrays.pop("query"), arrays.pop("key"), arrays.pop("value"), **arrays)
    assert isinstance(found.value, SdpaError)


@without_torch
def test_softmax_lse_has_memory_of_its_own() -> None:
    memory = np.zeros(Q.numel() * 2 + 16, np.float16)
    out, lse = memory[: Q.numel()].reshape(Q.shape), memory[-144:].view(np.float32).reshape(2, 4, 9)
    attention(Q.numpy(), K.numpy(), K.numpy(), out=out, softmax_lse=lse)
    with pytest.raises(ArgumentError, match="softmax_lse overlaps out in memory"):
        attention(
            Q.numpy(),
            K.numpy(),
            K.numpy(),
            out=out,
            softmax_lse=memory[:144].view(np.float32).reshape(2, 4, 9),
        )


@without_torch
def test_the_baseline_and_plans_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="unfused_attention needs torch"):
        unfused_attention(Q.numpy(), K.numpy(), K.numpy(), out=array(*Q.shape))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UnsupportedError, match="query is a ndarray: arrays need torch installed"):
        plan(Q.numpy(), K.numpy(), K.numpy())
