"""attention(..., out=array) without torch: what it computes, what it refuses, and how long it keeps memory.

torch is installed where these tests run; calls take the way without it when they are told that it is not
there, or when a stream or softmax_lse is given. One test runs in a process in which torch cannot be imported.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sdpa_cutlass import (
    _c_api,
    array_calls,
    attention,
    calls,
    kernels,
    plan,
    select,
    unfused_attention,
)
from sdpa_cutlass._locate import Target
from sdpa_cutlass.device import HOST
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, SdpaError, UnsupportedError
from sdpa_cutlass.launch import make_params
from sdpa_cutlass.problem import DType, Problem
from sdpa_cutlass.registry import Family
from tests.library.reference import expect_close, rand, torchs_attention
from tests.library.test_array_inputs import KINDS, CudaInterfaceOnly, DLPackOnly

Q, K = rand(2, 4, 9, 64), rand(2, 2, 11, 64, seed=1)


@pytest.fixture
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays find no torch; the tensors of a test are for comparison only."""
    monkeypatch.setattr(calls, "has_torch", lambda: False)


without_torch = pytest.mark.usefixtures("_without_torch")


class OlderDLPack(DLPackOnly):
    """Knows nothing of DLPack 1.0."""

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return self.tensor.__dlpack__()


ALL_KINDS: dict[str, Callable[[torch.Tensor], Any]] = {**KINDS, "DLPack before 1.0": OlderDLPack}


def test_in_a_process_without_torch() -> None:
    code = """
    import sys
    sys.modules["torch"] = None  # importing it fails
    import numpy as np
    import sdpa_cutlass

    def refused(error, function, *arrays, **options):
        try:
            function(*arrays, **options)
        except error as found:
            assert isinstance(found, sdpa_cutlass.SdpaError)
            return str(found)
        raise AssertionError(function)

    draw = np.random.default_rng(0).standard_normal
    q, k, v = (draw((2, 3, rows, 64)).astype(np.float16) for rows in (5, 9, 9))
    out, lse = np.full_like(q, np.nan), np.empty(q.shape[:3], np.float32)
    found = sdpa_cutlass.attention(q, k, v, out=out, return_lse=True, softmax_lse=lse)
    assert found[0] is out and found[1] is lse
    scores = q.astype(float) @ k.astype(float).swapaxes(2, 3) / 8
    weights = np.exp(scores)
    sums = weights.sum(-1, keepdims=True)
    assert np.abs(out - weights / sums @ v.astype(float)).max() < 2e-3
    assert np.abs(lse - np.log(sums[..., 0])).max() < 1e-4

    assert "out is missing" in refused(ValueError, sdpa_cutlass.attention, q, k, v)
    assert "out is missing" in refused(ValueError, sdpa_cutlass.scaled_dot_product_attention, q, k, v)
    assert "softmax_lse is missing" in refused(
        ValueError, sdpa_cutlass.attention, q, k, v, out=out, return_lse=True
    )
    for function in (sdpa_cutlass.plan, sdpa_cutlass.unfused_attention, sdpa_cutlass.explain):
        options = {} if function is sdpa_cutlass.explain else {"out": out}
        assert "torch installed" in refused(NotImplementedError, function, q, k, v, **options)
    print("torch" in [name for name, module in sys.modules.items() if module])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@without_torch
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "scale": 0.25},
        {"attn_mask": torch.rand(9, 11, generator=torch.Generator().manual_seed(1)) < 0.7},
        {"attn_mask": rand(2, 1, 9, 11, dtype=torch.float32), "causal": "top_left"},
        {
            "seqlens_q": torch.tensor([9, 4], dtype=torch.int32),
            "seqlens_k": torch.tensor([3, 11], dtype=torch.int32),
        },
        {"p_dropout": 0.5, "philox": (3, 4)},
        {"kernel": "fmha_fwd_sm89_d64_m64n64_s1_w4_f16"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_the_bits_are_those_with_torch(kind: str, options: dict[str, Any]) -> None:
    make = ALL_KINDS[kind]
    expected, expected_lse = attention(Q, K, K, return_lse=True, **options)
    given = {
        name: make(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    out, lse = torch.full_like(Q, torch.nan), torch.full(Q.shape[:3], torch.nan)
    array, lse_array = make(out), make(lse)
    assert attention(make(Q), make(K), make(K), out=array, softmax_lse=lse_array, **given) is array
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    out.fill_(torch.nan)
    assert attention(make(Q), make(K), make(K), out=array, **given) is array
    assert torch.equal(out, expected)


@without_torch
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((9, 64), (11, 64)),
        ((4, 9, 64), (2, 11, 64)),
        ((2, 3, 4, 9, 64), (2, 3, 2, 11, 64)),
        ((3, 4, 9, 64), (2, 11, 64)),
    ],
    ids=str,
)
def test_ranks(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    q, k = rand(*q_shape), rand(*k_shape, seed=1)
    expected, expected_lse = attention(q, k, k, return_lse=True)
    out, lse = np.full(q_shape, np.nan, np.float16), np.full(q_shape[:-1], np.nan, np.float32)
    attention(q.numpy(), k.numpy(), k.numpy(), out=out, softmax_lse=lse)
    assert np.array_equal(out, expected.numpy())
    assert np.array_equal(lse, expected_lse.numpy())


@without_torch
def test_layouts_and_strides() -> None:
    expected = attention(Q, K, K)
    q, k = (np.ascontiguousarray(tensor.transpose(1, 2).numpy()) for tensor in (Q, K))
    out = np.full_like(q, np.nan)
    attention(q, k, k, out=out, layout="bshd")
    assert np.array_equal(out.transpose(0, 2, 1, 3), expected.numpy())
    out[:] = np.nan
    attention(*(array.transpose(0, 2, 1, 3) for array in (q, k, k)), out=out.transpose(0, 2, 1, 3))
    assert np.array_equal(out.transpose(0, 2, 1, 3), expected.numpy())
    wide, wide_out = (np.full((2, 4, 9, 192), np.nan, np.float16) for _ in range(2))
    wide[..., 64:128] = Q.numpy()
    attention(wide[..., 64:128], K.numpy(), K.numpy(), out=wide_out[..., 128:])
    assert np.array_equal(wide_out[..., 128:], expected.numpy())
    assert np.isnan(wide_out[..., :128]).all()


@without_torch
def test_read_only_and_expanded_inputs() -> None:
    k = np.broadcast_to(K.numpy()[:1], (2, 2, 11, 64))  # read-only, stride 0
    out = np.empty(Q.shape, np.float16)
    attention(Q.numpy(), k, k, out=out)
    assert np.array_equal(out, attention(Q, K[:1], K[:1]).numpy())


@without_torch
def test_bfloat16() -> None:
    q, k = Q.bfloat16(), K.bfloat16()
    expected = attention(q, k, k)
    out = torch.full_like(q, torch.nan)
    attention(*map(DLPackOnly, (q, k, k)), out=DLPackOnly(out))
    assert torch.equal(out, expected)

    class MlDtypes:  # as NumPy shows an array of ml_dtypes.bfloat16
        dtype = "bfloat16"

        def __init__(self, tensor: torch.Tensor) -> None:
            self.array = tensor.view(torch.int16).numpy()
            self.__array_interface__ = {**self.array.__array_interface__, "typestr": "<V2"}

    out.fill_(torch.nan)
    attention(*map(MlDtypes, (q, k, k)), out=MlDtypes(out))
    assert torch.equal(out, expected)


def test_tensors_are_taken_in_place_where_softmax_lse_is_given() -> None:
    expected, expected_lse = attention(Q, K, K, return_lse=True)
    out, lse = torch.empty_like(Q), torch.empty(Q.shape[:3])
    found = attention(Q, K, K.numpy(), out=out, softmax_lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    with pytest.raises(ArgumentError, match="out is missing: nothing is allocated without torch, nor with"):
        attention(Q, K, K, softmax_lse=lse)
    with pytest.raises(ArgumentTypeError, match=r"query is a Tensor of dtype torch\.float16, which"):
        attention(Q.clone().requires_grad_(), K, K, out=out, softmax_lse=lse)


@without_torch
@pytest.mark.parametrize("shape", [(0, 4, 9, 64), (2, 0, 9, 64), (2, 4, 0, 64)], ids=str)
def test_nothing_to_write(shape: tuple[int, ...]) -> None:
    k = np.empty((shape[0], shape[1], 11, 64), np.float16)
    out, lse = np.empty(shape, np.float16), np.empty(shape[:3], np.float32)
    assert attention(np.empty_like(out), k, k, out=out, softmax_lse=lse) is out


def array(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def misaligned() -> np.ndarray:
    return array(2 * 4 * 9 * 64 + 1)[1:].reshape(Q.shape)


def read_only() -> np.ndarray:
    result = array(*Q.shape)
    result.flags.writeable = False
    return result


class Numbers:
    """A NumPy array that speaks DLPack only."""

    def __init__(self, numbers: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.numbers, self.device = numbers, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.numbers.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class CudaDLPack(Numbers):
    """Says that it lies on a GPU, and keeps the streams that it was told."""

    def __init__(self, tensor: torch.Tensor, index: int = 0) -> None:
        super().__init__(tensor.numpy(), (2, index))
        self.streams: list[Any] = []

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.numbers.__dlpack__(**options)


class Immutable(CudaDLPack):
    """As JAX shows an array: the capsule does not say that it must not be written."""

    __cuda_array_interface__ = {"data": (0, True)}  # noqa: RUF012


class Broken(Numbers):
    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("not today")


class Empty(Numbers):
    def __dlpack__(self, **_: Any) -> Any:
        return None


DEEP = {"key": array(2, 3, 2, 11, 64), "value": array(2, 3, 2, 11, 64)}  # two batch dimensions


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = {**array(*Q.shape).__array_interface__, **interface}


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
        ({"philox": array(2)}, TypeError, "philox=array"),
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
    monkeypatch.setattr(_c_api.library(Target.HOST), "launch_function", None)
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


class Temporary:
    """Makes the array that it shares when it is asked to, and remembers whether it is still there."""

    def __init__(self, numbers: np.ndarray, max_version: tuple[int, int] | None) -> None:
        self.numbers, self.max_version = numbers, max_version

    def __dlpack__(self, **_: Any) -> Any:
        made = self.numbers.copy()
        self.made = weakref.ref(made)
        return made.__dlpack__(max_version=self.max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@without_torch
@pytest.mark.parametrize("max_version", [None, (1, 0)], ids=str)
def test_memory_is_kept_until_the_call_returns(
    monkeypatch: pytest.MonkeyPatch, max_version: tuple[int, int] | None
) -> None:
    arrays = [Temporary(tensor.numpy(), max_version) for tensor in (Q, K, K)]
    library = _c_api.library(Target.HOST)
    launch = library.launch_function
    seen: list[bool] = []

    def observed(*arguments: Any) -> int:
        seen.extend(array.made() is not None for array in arrays)
        return launch(*arguments)

    monkeypatch.setattr(library, "launch_function", observed)
    out = array(*Q.shape)
    attention(*arrays, out=out)
    assert seen == [True] * 3
    assert [array.made() for array in arrays] == [None] * 3
    assert np.array_equal(out, attention(Q, K, K).numpy())


@without_torch
def test_no_kernel_needs_a_workspace() -> None:
    """One query against many keys: with torch, several CTAs share the keys of a tile."""
    q, k = rand(1, 2, 1, 64), rand(1, 1, 2048, 64, seed=1)
    out = array(1, 2, 1, 64)
    attention(q.numpy(), k.numpy(), k.numpy(), out=out)
    expect_close(torch.from_numpy(out), torchs_attention(q, k, k, enable_gqa=True))
    splits = [row.name for row in kernels(Target.HOST) if row.is_split and row.dtype is DType.F16]
    out[:] = np.nan
    attention(q.numpy(), k.numpy(), k.numpy(), out=out, kernel=splits[0])
    expect_close(torch.from_numpy(out), torchs_attention(q, k, k, enable_gqa=True))

    problem = Problem(
        dtype=DType.F16, batch=1, num_heads_q=2, num_heads_kv=1, seqlen_q=1, seqlen_k=2048, head_dim=64
    )
    library = _c_api.library(Target.HOST)
    for name in (None, *splits):
        if name is not None and "_d64_" not in name:
            continue
        needed = []
        for has_workspace in (True, False):
            params = make_params(problem, 0.125, q, k, k, torch.empty_like(q), None)
            choice = select.choose(
                library, problem, Family.FMHA_FWD, HOST, params, name=name, has_workspace=has_workspace
            )
            needed.append(library.workspace_bytes(choice.kernel.index, params))
        assert needed[0] > 0
        assert needed[1] == 0


# ---- streams, without a GPU: memory of the CPU that says it is CUDA's ----


class CudaArray:
    def __init__(self, tensor: torch.Tensor, stream: int | None = None) -> None:
        self.array = tensor.numpy()
        self.__cuda_array_interface__ = {**self.array.__array_interface__, "version": 3, "stream": stream}


class Recorded:
    """What was asked of CUDA: launches' streams, and (stream, producer, device) that one waits for."""

    def __init__(self) -> None:
        self.launched: list[Any] = []
        self.waits: list[tuple[int, int, int]] = []


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The host library stands in for the GPU's."""
    found = Recorded()
    library = _c_api.library(Target.HOST)
    launch = library.launch_function

    def launched(index: int, params: Any, device: int, stream: Any) -> int:
        found.launched.append(stream)
        return launch(index, params, device, None)

    monkeypatch.setattr(library, "launch_function", launched)
    monkeypatch.setattr(array_calls, "library_for", lambda tensor: (library, HOST))
    monkeypatch.setattr("sdpa_cutlass.array_view.pointer_device", lambda address: 0)
    monkeypatch.setattr("sdpa_cutlass.array_view.wait_for", lambda *asked: found.waits.append(asked))
    return found


@without_torch
@pytest.mark.parametrize(
    ("named", "given", "launched", "waits"),
    [
        ((None, None), None, None, []),
        ((None, None), 7, 7, []),
        ((1, 1), None, None, []),
        ((5, 5), None, 5, []),  # the stream of out
        ((2, 5), None, 5, [(5, 2, 0)] * 3),
        ((1, 5), 0, None, [(0, 5, 0)]),
        ((5, None), 7, 7, [(7, 5, 0)] * 3),
        ((5, 7), 7, 7, [(7, 5, 0)] * 3),
    ],
)
def test_the_streams_of_cuda_arrays(
    cuda: Recorded,
    named: tuple[int | None, int | None],
    given: int | None,
    launched: int | None,
    waits: list[tuple[int, int, int]],
) -> None:
    """`named`: the streams of the inputs and of out."""
    out = torch.full_like(Q, torch.nan)
    attention(
        *(CudaArray(tensor, named[0]) for tensor in (Q, K, K)), out=CudaArray(out, named[1]), stream=given
    )
    assert cuda.launched == [launched]
    assert cuda.waits == waits
    assert torch.equal(out, attention(Q, K, K))


@without_torch
@pytest.mark.parametrize(("given", "told"), [(None, 1), (0, 1), (1, 1), (2, 2), (99, 99)])
def test_dlpack_is_told_the_stream(cuda: Recorded, given: int | None, told: int) -> None:
    out = torch.full_like(Q, torch.nan)
    arrays = [CudaDLPack(tensor) for tensor in (Q, K, K, out)]
    attention(*arrays[:3], out=arrays[3], stream=given)
    assert [array.streams for array in arrays] == [[told]] * 4
    assert cuda.launched == [None if told == 1 else told]
    assert torch.equal(out, attention(Q, K, K))


@without_torch
def test_stream_0_of_a_cuda_array_is_refused(cuda: Recorded) -> None:
    for arrays, name in (
        ([CudaArray(Q, 0), CudaArray(K)], "query"),
        ([CudaArray(Q), CudaArray(K, 0)], "key"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} names stream 0 in its __cuda_array_interface__"):
            attention(*arrays, CudaArray(K), out=CudaArray(torch.empty_like(Q)))
    assert cuda.launched == []


@without_torch
def test_an_address_that_cuda_does_not_know_is_refused() -> None:
    with pytest.raises(
        ArgumentTypeError, match=r"query is a CudaArray .* cannot be read: (no NVIDIA|cuPointer)"
    ):
        attention(CudaArray(Q), CudaArray(K), CudaArray(K), out=CudaArray(torch.empty_like(Q)))


def test_stream_handles() -> None:
    class Method:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    class Property:
        __cuda_stream__ = (0, 78)

    class CuPy:
        ptr = 79

    class Torch:
        cuda_stream = 80

    handles = [
        array_calls.stream_handle(stream) for stream in (Method(), Property(), CuPy(), Torch(), 81, 1, 0)
    ]
    assert handles == [77, 78, 79, 80, 81, 0, 0]


# ---- on a GPU ----


GPU_KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "DLPack": DLPackOnly,
    "DLPack before 1.0": OlderDLPack,
    "__cuda_array_interface__": CudaInterfaceOnly,
}


@without_torch
@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_KINDS)
def test_on_a_gpu(kind: str) -> None:
    make = GPU_KINDS[kind]
    q, k = Q.cuda(), K.cuda()
    mask = torch.rand(9, 11, device="cuda") < 0.7
    for options in ({}, {"attn_mask": mask}):
        expected, expected_lse = attention(q, k, k, return_lse=True, **options)
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:3], torch.nan, device="cuda")
        given = {name: make(value) for name, value in options.items()}
        array = make(out)
        assert attention(make(q), make(k), make(k), out=array, softmax_lse=make(lse), **given) is array
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert torch.equal(lse, expected_lse)
    with pytest.raises(ArgumentTypeError, match="key is on cpu; query is on cuda:0"):
        attention(make(q), K.numpy(), make(k), out=make(torch.empty_like(q)))


@without_torch
@pytest.mark.gpu
def test_in_a_thread_that_never_used_cuda() -> None:
    """The driver is asked where an address lies, and for an event, without a current context."""
    q, k, out = Q.cuda(), K.cuda(), torch.full(Q.shape, torch.nan, dtype=Q.dtype, device="cuda")
    expected = attention(q, k, k)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    arrays = [CudaInterfaceOnly(tensor, side.cuda_stream) for tensor in (q, k, k)]
    errors: list[BaseException] = []

    def call() -> None:
        try:
            attention(*arrays, out=CudaInterfaceOnly(out))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert errors == []
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


@without_torch
@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["DLPack", "__cuda_array_interface__", "stream of out", "tensors"])
def test_work_waits_for_the_streams_of_the_arrays(kind: str) -> None:
    """The inputs are written late on a side stream, and the result is used on the stream of the call."""
    source = [tensor.cuda() for tensor in (rand(2, 8, 512, 64, seed=seed) for seed in range(3))]
    expected = attention(*source)
    late = [torch.zeros_like(tensor) for tensor in source]
    out = torch.empty_like(late[0])
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(50_000_000)
        for tensor, value in zip(late, source, strict=True):
            tensor.copy_(value)
        if kind == "DLPack":  # torch makes the consumer wait for its current stream
            attention(*map(DLPackOnly, late), out=DLPackOnly(out), stream=consumer)
    arrays = [CudaInterfaceOnly(tensor, producer.cuda_stream) for tensor in late]
    if kind == "__cuda_array_interface__":
        attention(*arrays, out=CudaInterfaceOnly(out), stream=consumer)
    elif kind == "stream of out":
        attention(*arrays, out=CudaInterfaceOnly(out, consumer.cuda_stream))
    elif kind == "tensors":
        with torch.cuda.stream(producer):
            attention(*late, out=out, softmax_lse=torch.empty(2, 8, 512, device="cuda"))
            consumer.wait_stream(producer)
    with torch.cuda.stream(consumer):
        result = out.clone()
    consumer.synchronize()
    assert torch.equal(result, expected)
