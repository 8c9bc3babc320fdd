"""The stream of attention(..., out=array), and what it waits for: both protocols' rules.

Without a GPU, memory of the CPU says that it is CUDA's, and the host library stands in for the GPU's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdpa_cutlass import attention
from sdpa_cutlass.arrays import protocols
from sdpa_cutlass.call import array_calls
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError
from sdpa_cutlass.library import abi
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from tests.library.array_kinds import (
    CudaDLPack,
    CudaInterfaceOnly,
    DLPackOnly,
    Edited,
    OlderDLPack,
    without_torch,
)
from tests.library.reference import rand

Q, K = rand(2, 4, 9, 64), rand(2, 2, 11, 64, seed=1)


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
    library = abi.library(Target.HOST)
    launch = library.launch_function

    def launched(index: int, params: Any, device: int, stream: Any) -> int:
        found.launched.append(stream)
        return launch(index, params, device, None)

    monkeypatch.setattr(library, "launch_function", launched)
    monkeypatch.setattr(array_calls, "library_for", lambda tensor: (library, HOST))
    monkeypatch.setattr("sdpa_cutlass.arrays.protocols.pointer_device", lambda address: 0)
    monkeypatch.setattr("sdpa_cutlass.arrays.protocols.wait_for", lambda *asked: found.waits.append(asked))
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
@pytest.mark.parametrize("place", range(3))
def test_a_copy_on_a_gpu_is_refused(place: int, cuda: Recorded) -> None:
    """It would be freed when the call returns, when the kernel may still be queued. A CPU's has run then."""
    arrays: list[Any] = [CudaDLPack(tensor) for tensor in (Q, K, K)]
    copied = Edited(arrays[place].numbers, flags=protocols._IS_COPIED)
    copied.device = (2, 0)
    arrays[place] = copied
    out = torch.full_like(Q, torch.nan)
    name = ("query", "key", "value")[place]
    with pytest.raises(ArgumentTypeError, match=f"{name} is a Edited whose __dlpack__ lends a copy"):
        attention(*arrays, out=CudaDLPack(out))
    assert cuda.launched == []
    on_cpu = [Edited(tensor.numpy(), flags=protocols._IS_COPIED) for tensor in (Q, K, K)]
    attention(*on_cpu, out=out.numpy())
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
