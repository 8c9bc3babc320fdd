"""On a GPU only: streams, CUDA graphs, the current device, and the launch path's use of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sdpa_cutlass import attention, unfused_attention
from sdpa_cutlass.device import cuda_device, driver_version

pytestmark = pytest.mark.gpu

Function = Callable[..., torch.Tensor]
both = pytest.mark.parametrize("function", [attention, unfused_attention])


def inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 8, 512, 64, generator=generator).half().cuda() for _ in range(3)]


@both
def test_work_is_queued_on_the_current_stream(function: Function) -> None:
    """The inputs are written late on a side stream: only work behind that on the same stream sees them."""
    source = inputs()
    expected = function(*source)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensors = [torch.zeros_like(tensor) for tensor in source]
        torch.cuda._sleep(50_000_000)
        for tensor, value in zip(tensors, source, strict=True):
            tensor.copy_(value)
        out = function(*tensors)
    side.synchronize()
    assert torch.equal(out, expected)


@both
def test_graphs_capture_and_replay(function: Function) -> None:
    tensors = inputs()
    function(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(*tensors)
    for seed in (1, 2):
        fresh = inputs(seed)
        expected = function(*fresh)
        for tensor, value in zip(tensors, fresh, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_unfused_workspaces_may_be_reused_at_once() -> None:
    """Calls in a row share the memory of their workspaces through the allocator, in stream order."""
    tensors = inputs()
    expected = unfused_attention(*tensors)
    outs = [unfused_attention(*tensors) for _ in range(20)]
    assert all(torch.equal(out, expected) for out in outs)


def test_device_facts() -> None:
    device = cuda_device(torch.cuda.current_device())
    assert device.sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert device.compute_capability == torch.cuda.get_device_capability()
    assert driver_version() >= 12000
