"""The counters of split kernels: launches that may overlap share none, and all are zero between launches."""

from __future__ import annotations

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sdpa_cutlass import arrivals, attention, plan
from sdpa_cutlass import device as device_module
from sdpa_cutlass.arrivals import MAX_TILES, arrival_counters, prepare_counters
from sdpa_cutlass.errors import DriverError
from tests.library.fake_driver import CUresult, FakeDriver
from tests.library.reference import expect_close, rand, torchs_attention

CPU = torch.device("cpu")


def decoding(device: str, seed: int = 0, keys: int = 3000) -> list[torch.Tensor]:
    """Long enough that the keys of a tile are split."""
    shapes = [(1, 8, 2, 64), (1, 2, keys, 64), (1, 2, keys, 64)]
    return [rand(*shape, device=device, seed=3 * seed + i) for i, shape in enumerate(shapes)]


# ---- on a CPU ----


def test_a_thread_keeps_its_counters_and_shares_them_with_none() -> None:
    barrier = threading.Barrier(4)

    def addresses() -> tuple[int, int]:
        first = arrival_counters(CPU, 0)
        barrier.wait()  # all threads live at once, so no memory is used twice
        return first, arrival_counters(CPU, 0)

    with ThreadPoolExecutor(4) as pool:
        found = [future.result() for future in [pool.submit(addresses) for _ in range(4)]]
    assert all(first == second for first, second in found)
    starts = sorted(first for first, _ in found)
    assert all(b - a >= 4 * MAX_TILES for a, b in itertools.pairwise(starts))


def test_the_counters_of_a_thread_are_zero_after_launches() -> None:
    attention(*decoding("cpu"))
    counters = arrivals._of_thread.counters
    assert counters.data_ptr() == arrival_counters(CPU, 0)
    assert (counters.shape, counters.dtype) == ((MAX_TILES,), torch.int32)
    assert not counters.any()


def test_threads_may_decode_in_parallel() -> None:
    """One plan, several threads: each launch meets at counters of its own."""
    tensors = [decoding("cpu", seed) for seed in range(4)]
    planned = plan(*tensors[0])
    assert planned._plan.num_splits > 1
    expected = [attention(*given, kernel=planned.kernel.name) for given in tensors]
    expect_close(expected[0], torchs_attention(*tensors[0], enable_gqa=True))
    barrier = threading.Barrier(len(tensors))

    def decode(given: list[torch.Tensor], wanted: torch.Tensor) -> bool:
        barrier.wait()
        out = torch.empty_like(wanted)
        same = []
        for _ in range(20):
            out.zero_()
            planned.run(*given, out)
            same.append(torch.equal(out, wanted))
        return all(same)

    with ThreadPoolExecutor(len(tensors)) as pool:
        assert all(pool.map(decode, tensors, expected))


# ---- CUDA, as far as it can be told from torch's side ----


class FakeTorch:
    """Blocks of counters at made-up addresses; `capture` is the id of the capture that goes on, or None."""

    int32 = torch.int32

    def __init__(self) -> None:
        self.capture: int | None = None
        self.made: list[tuple[tuple[int, ...], str]] = []
        self.synchronized: list[int] = []
        self.cuda = SimpleNamespace(
            is_current_stream_capturing=lambda: self.capture is not None,
            synchronize=self.synchronized.append,
        )

    def zeros(self, *shape: int, dtype: torch.dtype, device: Any) -> Any:
        assert dtype is torch.int32
        assert shape[-1] == MAX_TILES
        self.made.append((shape, str(device)))
        first = 10_000 * len(self.made)
        blocks = [SimpleNamespace(data_ptr=lambda at=first + i: at) for i in range(shape[0])]
        return blocks if len(shape) == 2 else blocks[0]


class Device(SimpleNamespace):
    type = "cuda"

    def __str__(self) -> str:
        return f"cuda:{self.index}"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """torch and the driver replaced, and nothing remembered."""
    found = FakeTorch()
    monkeypatch.setitem(sys.modules, "torch", found)  # type: ignore[arg-type]
    for name in ("_of_stream", "_of_capture", "_stocks"):
        monkeypatch.setattr(arrivals, name, {})

    driver = FakeDriver(cuStreamGetCaptureInfo=lambda stream: (1, found.capture, "graph", [], 0))
    monkeypatch.setattr(device_module, "_driver", lambda: driver)
    return found


def counters_at(device: int, stream: int) -> int:
    return arrival_counters(Device(index=device), stream)


def test_a_stream_keeps_its_counters_and_shares_them_with_none(fake: FakeTorch) -> None:
    places = [(0, 0), (0, 64), (1, 0), (1, 64)]
    found = [counters_at(*place) for place in places]
    assert len(set(found)) == len(places)
    assert [counters_at(*place) for place in places] == found
    assert fake.made == [((MAX_TILES,), f"cuda:{device}") for device, _ in places]


def test_the_number_of_streams_is_bounded(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_MAX_STREAMS", 2)
    found = [counters_at(0, stream) for stream in (8, 16, 24, 8, 24)]
    assert len(set(found[:3])) == 3
    assert found[4] == found[2]
    assert len(arrivals._of_stream) <= 2


def test_the_stock_is_made_once_and_outside_of_captures(fake: FakeTorch) -> None:
    fake.capture = 1
    prepare_counters(0)
    assert (fake.made, fake.synchronized) == ([], [])
    fake.capture = None
    for _ in range(2):
        prepare_counters(0)
        prepare_counters(2)
    assert fake.made == [((arrivals._STOCK, MAX_TILES), f"cuda:{device}") for device in (0, 2)]
    assert fake.synchronized == [0, 2]  # zeros are there before any graph runs, on whatever stream


def test_a_capture_keeps_its_counters_and_shares_them_with_none(fake: FakeTorch) -> None:
    prepare_counters(0)
    found = {}
    for capture, stream in ((None, 8), (1, 8), (1, 16), (2, 8), (None, 16), (1, 8), (2, 8), (None, 8)):
        fake.capture = capture
        address = counters_at(0, stream)
        assert found.setdefault((capture, stream), address) == address
    assert len(set(found.values())) == len(found)
    assert len(arrivals._stocks[0]) == arrivals._STOCK - 3
    remaining = {block.data_ptr() for block in arrivals._stocks[0]}
    assert not remaining & set(found.values())


def test_without_a_stock_the_graph_zeroes_counters_itself(fake: FakeTorch) -> None:
    """One set for each launch: the zeroing is a part of the graph, in front of that launch."""
    prepare_counters(0)
    del arrivals._stocks[0][1:]
    made = len(fake.made)
    fake.capture = 1
    kept = counters_at(0, 8)
    fake.capture = 2
    fresh = [counters_at(0, 8) for _ in range(3)]
    assert len({kept, *fresh}) == 4
    assert fake.made[made:] == [((MAX_TILES,), "cuda:0")] * 3
    fake.capture = 1
    assert counters_at(0, 8) == kept


def test_an_error_of_the_driver_is_raised(fake: FakeTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(CUresult.CUDA_ERROR_INVALID_HANDLE, cuStreamGetCaptureInfo=lambda stream: ())
    monkeypatch.setattr(device_module, "_driver", lambda: driver)
    prepare_counters(0)
    fake.capture = 1
    with pytest.raises(DriverError, match="driver error 400"):
        counters_at(0, 8)


# ---- on a GPU ----


def all_counters() -> list[torch.Tensor]:
    stocks = [block for stock in arrivals._stocks.values() for block in stock]
    return [*arrivals._of_stream.values(), *arrivals._of_capture.values(), *stocks]


@pytest.mark.gpu
def test_streams_decode_side_by_side() -> None:
    tensors = [decoding("cuda", seed, keys=20_000) for seed in range(4)]
    expected = [attention(*given) for given in tensors]
    expect_close(expected[0], torchs_attention(*tensors[0], enable_gqa=True))
    streams = [torch.cuda.Stream() for _ in tensors]
    torch.cuda.synchronize()
    outs: list[list[torch.Tensor]] = [[] for _ in tensors]
    for _ in range(50):
        for stream, given, found in zip(streams, tensors, outs, strict=True):
            with torch.cuda.stream(stream):
                found.append(attention(*given))
    torch.cuda.synchronize()
    for found, wanted in zip(outs, expected, strict=True):
        assert all(torch.equal(out, wanted) for out in found)
    handles = {stream.cuda_stream for stream in streams}
    assert {stream for _, stream in arrivals._of_stream} >= handles
    assert not any(counters.any() for counters in all_counters())


def captured(tensors: list[torch.Tensor], launches: int) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attention(*tensors) for _ in range(launches)]
    return graph, outs


@pytest.mark.gpu
@pytest.mark.parametrize("has_stock", [True, False])
def test_graphs_replay_beside_each_other(has_stock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two graphs and an ordinary call at once, many times."""
    tensors = [decoding("cuda", seed, keys=20_000) for seed in range(3)]
    expected = [attention(*given) for given in tensors]
    if not has_stock:
        monkeypatch.setattr(arrivals, "_stocks", {torch.cuda.current_device(): []})
    graphs = [captured(given, 3) for given in tensors[:2]]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for (graph, _), stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        assert torch.equal(attention(*tensors[2]), expected[2])
    torch.cuda.synchronize()
    for (_, outs), wanted in zip(graphs, expected, strict=False):
        assert all(torch.equal(out, wanted) for out in outs)
    assert not any(counters.any() for counters in all_counters())
    if has_stock:
        assert len(arrivals._of_capture) >= 2
