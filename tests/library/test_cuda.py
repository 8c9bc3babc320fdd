"""On a GPU only: streams, CUDA graphs, the current device, torch's allocator and its random numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch

from sdpa_cutlass import PhiloxState, attention, attention_varlen, unfused_attention
from sdpa_cutlass.library.device import cuda_device, driver_version

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


def capture(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A graph of one call, and its results."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


def test_graphs_replay_on_new_masks_and_lengths() -> None:
    tensors = inputs()
    mask = torch.ones(512, 512, dtype=torch.bool, device="cuda")
    lengths = torch.full((2,), 512, dtype=torch.int32, device="cuda")
    graph, out = capture(
        lambda: attention(*tensors, attn_mask=mask, seqlens_k=lengths, causal="bottom_right")
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        mask.copy_(torch.rand(512, 512) > 0.3)
        lengths.copy_(torch.randint(0, 513, (2,)))
        graph.replay()
        expected = attention(*tensors, attn_mask=mask, seqlens_k=lengths, causal="bottom_right")
        assert torch.equal(out, expected)


def test_graphs_replay_on_other_packed_lengths() -> None:
    tensors = [tensor.transpose(1, 2).reshape(1024, 8, 64) for tensor in inputs()]
    cu_seqlens = torch.tensor([0, 500, 1024], dtype=torch.int32, device="cuda")
    graph, out = capture(lambda: attention_varlen(*tensors, cu_seqlens, cu_seqlens, 1024, 1024))
    for border in (1, 0, 777):
        cu_seqlens[1] = border
        graph.replay()
        assert torch.equal(out, attention_varlen(*tensors, cu_seqlens, cu_seqlens, 1024, 1024))


def test_every_replay_drops_other_weights() -> None:
    tensors = inputs()
    graph, (out, philox) = capture(lambda: attention(*tensors, p_dropout=0.5, return_philox=True))
    assert philox.is_cuda
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, attention(*tensors, p_dropout=0.5, philox=philox.clone()))
        assert torch.equal(out, attention(*tensors, p_dropout=0.5, philox=state_of(philox)))
        seen.append(state_of(philox))
    assert len(set(seen)) == 3


def state_of(philox: torch.Tensor) -> PhiloxState:
    return PhiloxState(*philox.tolist())


def test_seed_and_offset_are_those_of_torchs_generator() -> None:
    tensors = inputs()
    torch.cuda.manual_seed(5)
    drawn = [attention(*tensors, p_dropout=0.5, return_philox=True)[1] for _ in range(3)]
    assert drawn == [(5, 0), (5, 4), (5, 8)]
    torch.rand(1, device="cuda")
    assert attention(*tensors, p_dropout=0.5, return_philox=True)[1].offset > 12
    state = torch.cuda.get_rng_state()
    first = attention(*tensors, p_dropout=0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(attention(*tensors, p_dropout=0.5), first)


def test_nothing_waits_for_the_device() -> None:
    """Masks, lengths, seeds and packed sequences: no call makes the host wait, planned or not."""
    tensors = inputs()
    packed = [tensor.transpose(1, 2).reshape(1024, 8, 64) for tensor in tensors]
    mask = torch.rand(512, 512, device="cuda") > 0.3
    lengths = torch.tensor([512, 100], dtype=torch.int32, device="cuda")
    cu_seqlens = torch.tensor([0, 500, 1024], dtype=torch.int32, device="cuda")
    philox = torch.tensor([1, 2], device="cuda")
    attention(*tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            attention(*tensors, attn_mask=mask, seqlens_q=lengths, seqlens_k=lengths)
            attention(*tensors, p_dropout=0.5, philox=philox)
            attention(*tensors, p_dropout=0.5)
            attention_varlen(*packed, cu_seqlens, cu_seqlens, 1024, 1024, p_dropout=0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
