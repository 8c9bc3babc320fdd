"""Who computes the attention of a model: torch by default, each of its backends, this library in two ways.

A provider is a context around a run. The replacement of torch's function is made once and put in and out: a
second one would be another function, for which torch.compile would compile again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_cutlass
from benchmarks.models.case import Case
from sdpa_cutlass.integrations.torch_sdpa import Usage

TORCH = "torch"
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
OURS = "sdpa_cutlass"
INTERFACE = "interface"
"""transformers' attention interface: see docs/transformers.md."""
NAMES = (TORCH, *BACKENDS, OURS, INTERFACE)


@dataclass(frozen=True)
class Provider:
    """A name, the context of its runs, and the counts of this library where it takes part."""

    name: str
    around: Callable[[], AbstractContextManager[Any]]
    usage: Usage | None = None


@contextlib.contextmanager
def served(device: str, **options: Any) -> Iterator[tuple[Usage, Callable[[], AbstractContextManager[None]]]]:
    """`enabled(**options)` as a context to enter again and again, with torch's function outside."""
    torchs = F.scaled_dot_product_attention
    with sdpa_cutlass.enabled(devices=[device], **options) as usage:
        replacement = F.scaled_dot_product_attention

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            F.scaled_dot_product_attention = replacement
            try:
                yield
            finally:
                F.scaled_dot_product_attention = torchs

        F.scaled_dot_product_attention = torchs
        try:
            yield usage, around
        finally:
            F.scaled_dot_product_attention = replacement  # which the end of the block expects


@contextlib.contextmanager
def providers(case: Case, model: Any, device: str) -> Iterator[list[Provider]]:
    """Those that can take part in `case`, torch first; `model` is the one that will run."""
    with contextlib.ExitStack() as stack:
        found = [Provider(TORCH, contextlib.nullcontext)]
        if case.takes_sdpa:
            found += [
                Provider(name, lambda backend=backend: sdpa_kernel(backend))  # type: ignore[misc]
                for name, backend in BACKENDS.items()
            ]
            usage, around = stack.enter_context(served(device))
            found.append(Provider(OURS, around, usage))
        if case.own_attention is not None:
            found.append(_interface(case.own_attention, model, device))
        yield found


def _interface(own: str, model: Any, device: str) -> Provider:
    import sdpa_cutlass.integrations.transformers as hook

    usage = hook.register(devices=[device])
    name = hook.NAME if own == "sdpa" else hook.SECOND_NAME

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        model.set_attn_implementation(name)
        try:
            yield
        finally:
            model.set_attn_implementation(own)

    return Provider(INTERFACE, around, usage)


class Graphs:
    """A backend of torch.compile that counts the attention calls in the graphs that it is given.

    Each object is a backend for itself: dynamo compares backends, so what one provider had compiled is never
    run for another.
    """

    def __init__(self, compiler: str) -> None:
        from torch._dynamo.backends.registry import lookup_backend

        self._compile = lookup_backend(compiler)
        self.ours = 0
        self.torchs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Counts, then compiles."""
        for node in graph.graph.nodes:
            if node.op == "call_function":
                target = str(node.target)
                self.ours += target.startswith("sdpa_cutlass.")
                self.torchs += "scaled_dot_product_attention" in target
        return self._compile(graph, inputs)
