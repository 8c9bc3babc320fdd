"""Looking at a model's calls of F.scaled_dot_product_attention: which there are, and how wrong each is."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.quantised_data import errors_of_heads

Function = Callable[..., torch.Tensor]

_torchs: Function = torch._C._nn.scaled_dot_product_attention


@contextlib.contextmanager
def replaced(watcher: Callable[[Function], Function]) -> Iterator[None]:
    """Puts `watcher(function)` into the place of the function that stands there now."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = watcher(before)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def problem_of(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> tuple[Any, ...]:
    """What a call asks for, as hashable words: shapes, the mask's type and shape, causal or not."""
    mask = (
        "" if attn_mask is None else f"{str(attn_mask.dtype).removeprefix('torch.')} {list(attn_mask.shape)}"
    )
    shapes = tuple(tuple(tensor.shape) for tensor in (query, key, value))
    return (*shapes, mask, bool(options.get("is_causal", False)))


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[Any, ...]]]:
    """Counts calls by problem."""
    found: Counter[tuple[Any, ...]] = Counter()

    def watcher(function: Function) -> Function:
        def call(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any) -> Any:
            causal = rest[1] if len(rest) > 1 else options.get("is_causal", False)
            found[problem_of(query, key, value, attn_mask, is_causal=causal)] += 1
            return function(query, key, value, attn_mask, *rest, **options)

        return call

    with replaced(watcher):
        yield found


def as_records(problems: Counter[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """For a result file: the most frequent problem first."""
    names = ("query", "key", "value", "mask", "is_causal")
    return [dict(zip(names, problem, strict=True)) | {"calls": n} for problem, n in problems.most_common()]


class Heads:
    """The errors of single attention calls against float64, of the worst (batch, head)."""

    def __init__(self) -> None:
        self.calls = 0
        self.l2 = 0.0
        self.one_minus_cosine = 0.0

    def add(self, out: torch.Tensor, reference: torch.Tensor) -> None:
        """One call's result [B, H, S, D], and what it should have been. A NaN stays."""
        l2, angle = errors_of_heads(out, reference)
        self.calls += 1
        self.l2 = _worse(self.l2, l2.max().item())
        self.one_minus_cosine = _worse(self.one_minus_cosine, angle.max().item())


def _worse(before: float, now: float) -> float:
    return now if now > before or now != now else before  # a NaN stays


@contextlib.contextmanager
def measured_heads(is_counted: Callable[[], bool]) -> Iterator[Heads]:
    """Compares each call after which `is_counted()` is true with the same call in float64 by torch."""
    heads = Heads()

    def watcher(function: Function) -> Function:
        def call(*tensors: Any, **options: Any) -> Any:
            out = function(*tensors, **options)
            if is_counted():
                exact = [_in_float64(given) for given in tensors]
                heads.add(out, _torchs(*exact, **{name: _in_float64(x) for name, x in options.items()}))
            return out

        return call

    with replaced(watcher):
        yield heads


def _in_float64(given: Any) -> Any:
    return given.double() if isinstance(given, torch.Tensor) and given.is_floating_point() else given


@contextlib.contextmanager
def disturbed(size: float, is_disturbed: Callable[[int], bool], *, seed: int) -> Iterator[None]:
    """Adds noise to the results of the calls whose number `is_disturbed`.

    The noise of each row has a random direction and `size` times the row's length: so the relative L2 error
    of every head is `size`.
    """
    generators: dict[torch.device, torch.Generator] = {}
    number = -1

    def watcher(function: Function) -> Function:
        def call(*tensors: Any, **options: Any) -> Any:
            nonlocal number
            number += 1
            out = function(*tensors, **options)
            if not is_disturbed(number):
                return out
            if out.device not in generators:
                generators[out.device] = torch.Generator(out.device).manual_seed(seed)
            noise = torch.randn(
                out.shape, generator=generators[out.device], device=out.device, dtype=torch.float32
            )
            noise *= size * out.float().norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)
            return (out.float() + noise).to(out.dtype)

        return call

    with replaced(watcher):
        yield
