"""Split kernels on a GPU: on streams of every kind, in CUDA graphs, and compiled by torch into graphs."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sdpa_cutlass import attention, plan
from tests.library.reference import decoding, expect_close, torchs_attention

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def own_stream() -> Iterator[Callable[[], torch.cuda.Stream]]:
    """Makes streams that torch did not make, and destroys them as soon as the next one is made."""
    driver = ctypes.CDLL("libcuda.so.1")
    made: list[ctypes.c_void_p] = []

    def destroy() -> None:
        while made:
            assert driver.cuStreamDestroy_v2(made.pop()) == 0

    def make() -> torch.cuda.Stream:
        destroy()
        made.append(ctypes.c_void_p())
        assert driver.cuStreamCreate(ctypes.byref(made[0]), 1) == 0
        assert made[0].value
        return torch.cuda.ExternalStream(made[0].value)

    yield make
    torch.cuda.synchronize()
    destroy()


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


@pytest.mark.parametrize("is_planned", [False, True], ids=["call", "plan"])
def test_threads_decode_on_their_own_default_streams(is_planned: bool) -> None:
    """One handle, a stream for each thread. torch's allocator takes them for one, so results are given."""
    tensors = [decoding("cuda", seed, keys=20_000) for seed in range(4)]
    expected = [attention(*given) for given in tensors]
    planned = plan(*tensors[0])
    outs = [[torch.empty_like(wanted) for _ in range(100)] for wanted in expected]
    barrier = threading.Barrier(len(tensors))
    torch.cuda.synchronize()

    def decode(given: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        stream = torch.cuda.ExternalStream(2)
        with torch.cuda.stream(stream):
            barrier.wait()
            for out in written:
                if is_planned:
                    planned.run(*given, out)
                else:
                    attention(*given, out=out)
            stream.synchronize()

    with ThreadPoolExecutor(len(tensors)) as pool:
        list(pool.map(decode, tensors, outs))
    torch.cuda.synchronize()
    for written, wanted in zip(outs, expected, strict=True):
        assert sum(not torch.equal(out, wanted) for out in written) == 0


def test_a_stream_that_has_the_handle_of_a_destroyed_one(own_stream: Callable[[], torch.cuda.Stream]) -> None:
    """What is queued on a destroyed stream still runs, beside what the next one of that handle is given."""
    tensors = decoding("cuda", keys=20_000)
    expected = attention(*tensors)
    planned = plan(*tensors)
    outs = [torch.empty_like(expected) for _ in range(400)]
    rooms = [planned._plan._make_workspace(expected, 0) for _ in outs]  # torch's allocator goes by handles
    waiting = iter(rooms)
    planned._plan._make_workspace = lambda out, stream: next(waiting)  # type: ignore[method-assign]
    torch.cuda.synchronize()
    handles = []
    for start in range(0, len(outs), 40):
        stream = own_stream()
        handles.append(stream.cuda_stream)
        for out in outs[start : start + 40]:
            with torch.cuda.stream(stream):
                planned._plan.launch(*tensors, out, None)
    torch.cuda.synchronize()
    assert sum(not torch.equal(out, expected) for out in outs) == 0
    if len(set(handles)) == len(handles):
        pytest.skip("the driver gave no handle a second time")


# ---- CUDA graphs ----


def captured(tensors: list[torch.Tensor], launches: int) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [attention(*tensors) for _ in range(launches)]
    return graph, outs


def test_graphs_replay_beside_each_other() -> None:
    """Two graphs and an ordinary call at once, many times."""
    tensors = [decoding("cuda", seed, keys=20_000) for seed in range(3)]
    expected = [attention(*given) for given in tensors]
    expect_side_by_side([captured(given, 3) for given in tensors[:2]], expected, tensors[2])


def test_more_graphs_than_a_piece_of_the_librarys_memory_serves() -> None:
    """Some piece is allocated and zeroed while a graph is captured. One has counters for 256."""
    tensors = decoding("cuda", keys=20_000)
    expected = attention(*tensors)
    graphs = [captured(tensors, 1) for _ in range(300)]
    expect_side_by_side(graphs, [expected] * (len(graphs) + 1), tensors, repeats=2)


def expect_side_by_side(
    graphs: list[tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]],
    expected: list[torch.Tensor],
    uncaptured: list[torch.Tensor],
    repeats: int = 20,
) -> None:
    streams = [torch.cuda.Stream() for _ in range(min(len(graphs), 8))]
    torch.cuda.synchronize()
    for _ in range(repeats):
        for i, (graph, _) in enumerate(graphs):
            with torch.cuda.stream(streams[i % len(streams)]):
                graph.replay()
        assert torch.equal(attention(*uncaptured), expected[-1])
    torch.cuda.synchronize()
    for (_, outs), wanted in zip(graphs, expected, strict=False):
        assert all(torch.equal(out, wanted) for out in outs)


MORE_GRAPHS_THAN_ALL_SERVES = """
import torch
from sdpa_cutlass import attention
torch.manual_seed(0)
given = [torch.randn(1, h, n, 64, device="cuda").half() for h, n in ((8, 2), (2, 20_000), (2, 20_000))]
expected = attention(*given)
kept = []
pool = torch.cuda.graph_pool_handle()
for _ in range(4096 + 50):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = attention(*given)
    kept = [*kept, (graph, out)][-60:]
for _ in range(3):
    for graph, out in kept:
        graph.replay()
        assert torch.equal(out, expected)
assert torch.equal(attention(*given), expected)
"""


def test_more_graphs_than_the_library_has_counters_for() -> None:
    """The last ones zero counters in their workspace."""
    command = [sys.executable, "-c", MORE_GRAPHS_THAN_ALL_SERVES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


COMPILED = """
import sys, torch
from sdpa_cutlass import attention
from torch._dynamo.utils import counters
return_lse, is_first = (argument == "True" for argument in sys.argv[1:])
torch.manual_seed(0)

def made():
    return [torch.randn(1, h, n, 64, device="cuda").half() for h, n in ((8, 2), (2, 20_000), (2, 20_000))]

def wanted(given):
    found = attention(*given, return_lse=return_lse)
    return [part.clone() for part in found] if return_lse else [found.clone()]

def step(q, k, v):
    found = attention(q * 1, k, v, return_lse=return_lse)
    return [part + 0 for part in found] if return_lse else [found + 0]

calls = [made() for _ in range(6)]
if not is_first:  # nothing is known to the package yet
    expected = [wanted(given) for given in calls]
compiled = torch.compile(step, mode="reduce-overhead", fullgraph=True)
found = [[part.clone() for part in compiled(*given)] for given in calls]
if is_first:
    expected = [wanted(given) for given in calls]
for parts, others in zip(found, expected, strict=True):
    for part, other in zip(parts, others, strict=True):
        assert torch.equal(part, other), (part - other).abs().max()
assert counters["inductor"]["cudagraph_skips"] == 0
"""


@pytest.mark.parametrize("is_first", [False, True], ids=["known", "first-call"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
def test_compiled_with_reduced_overhead(return_lse: bool, is_first: bool) -> None:
    """CUDA-graph trees: nothing that outlives the call may lie in their memory pool, which they check."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED, str(return_lse), str(is_first)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
