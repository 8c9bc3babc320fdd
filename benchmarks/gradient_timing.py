"""Times of forwards and backwards as replayed CUDA graphs, and the memory that they take.

Providers take turns, round by round. A provider is a function of the inputs, all of which require grad; its
backward follows through autograd.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically

FORMAT = 1
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
DETERMINISTIC = "flash_deterministic"  # flash again, with torch's deterministic algorithms
Forward = Callable[..., torch.Tensor]


def by_backend(forward: Forward, backends: dict[str, SDPBackend] = BACKENDS) -> dict[str, Forward]:
    """`forward`, which calls torch's attention, with each backend of torch; flash deterministic as well."""

    def of(backend: SDPBackend) -> Forward:
        def run(*inputs: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return forward(*inputs)

        return run

    found = {name: of(backend) for name, backend in backends.items()}
    return found | ({DETERMINISTIC: found["flash"]} if "flash" in found else {})


@contextlib.contextmanager
def determinism_of(provider: str) -> Iterator[None]:
    """torch's deterministic algorithms, where they are what the provider is about."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(provider == DETERMINISTIC)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def replay_of(graph: torch.cuda.CUDAGraph, *kept: Any) -> Callable[[], None]:
    """Replays of a graph that reads memory of `kept`, which stays for as long."""

    def replay(kept: tuple[Any, ...] = kept) -> None:
        graph.replay()

    return replay


def graphs(inputs: list[torch.Tensor], forward: Forward) -> dict[str, Callable[[], None]]:
    """Replays of forward plus backward, and of the backward alone."""
    stream = torch.cuda.Stream()
    found: dict[str, Callable[[], None]] = {}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dout = torch.randn_like(forward(*inputs)).detach()
        for _ in range(2):  # loads what is loaded at first use
            torch.autograd.grad(forward(*inputs), inputs, dout)
        stream.synchronize()
        both = torch.cuda.CUDAGraph()
        with torch.cuda.graph(both, stream=stream):
            torch.autograd.grad(forward(*inputs), inputs, dout)
        found["both"] = replay_of(both, inputs, dout)
        out = forward(*inputs)
        stream.synchronize()
        alone = torch.cuda.CUDAGraph()
        with torch.cuda.graph(alone, stream=stream):
            torch.autograd.grad(out, inputs, dout, retain_graph=True)
        found["backward"] = replay_of(alone, inputs, dout, out)
    return found


def peak_bytes(inputs: list[torch.Tensor], forward: Forward) -> int:
    """Of a forward plus backward: what it has allocated at most, besides inputs and the gradient of out."""
    dout = torch.randn_like(forward(*inputs)).detach()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(forward(*inputs), inputs, dout)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(
    forwards: dict[str, Forward], inputs: list[torch.Tensor], rounds: int, budget_ms: float
) -> dict[str, Any]:
    """Milliseconds of every provider and part, all rounds, and its memory; one that cannot run says why."""
    replays: dict[str, dict[str, Callable[[], None]]] = {}
    memory, refused = {}, {}
    for name, forward in forwards.items():
        try:
            with determinism_of(name):
                memory[name] = peak_bytes(inputs, forward)
                replays[name] = graphs(inputs, forward)
        except Exception as error:  # whatever a backend raises for what it does not serve
            refused[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            torch.cuda.synchronize()
    times: dict[str, dict[str, list[float]]] = {
        name: {part: [] for part in parts} for name, parts in replays.items()
    }
    for _ in range(rounds):
        for name, parts in replays.items():
            for part, replay in parts.items():
                times[name][part].append(milliseconds(replay, budget_ms))
    return {"milliseconds": times, "peak_bytes": memory, "refused": refused}


def milliseconds(replay: Callable[[], None], budget_ms: float) -> float:
    """Of one replay, in a run of as many as fit the budget."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    replay()
    end.record()
    end.synchronize()
    count = max(1, min(200, int(budget_ms / max(start.elapsed_time(end), 1e-3))))
    start.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def write(path: Path | None, facts: dict[str, Any]) -> None:
    """`facts` and what they were measured with, where a file is asked for."""
    if path is not None:
        record = {"format": FORMAT, "env": environment.record(torch.device("cuda", 0)), **facts}
        write_atomically(path, json.dumps(record, indent=1) + "\n")
