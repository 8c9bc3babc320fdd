"""Greedy generation with a KV cache: the same tokens and logits as with torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import agreement, zoo
from tests.models.generation import CACHES, clear_prompts, generate
from tests.models.zoo import Padding, Size

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama_d64": lambda: zoo.llama(Size(head_dim=64, num_heads_q=4, num_heads_kv=2)),
    "llama_d40": lambda: zoo.llama(Size(head_dim=40, num_heads_q=4, num_heads_kv=2)),
    "gpt2_d72": lambda: zoo.gpt2(Size(head_dim=72)),
}
LAYERS = 2
PROMPTS = (21, 13, 2)
NEW_TOKENS = 5
MARGIN = 0.04


@functools.cache
def model_and_prompts(name: str, padding: Padding, device: str) -> tuple[Any, dict[str, torch.Tensor]]:
    model = MODELS[name]().to(device, torch.float16)
    return model, clear_prompts(model, PROMPTS, padding, new_tokens=NEW_TOKENS, margin=MARGIN)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padding", [Padding.NONE, Padding.LEFT], ids=lambda padding: padding.value)
@pytest.mark.parametrize("cache", CACHES)
def test_greedy_generation_agrees(name: str, padding: Padding, cache: str, device: str) -> None:
    model, batch = model_and_prompts(name, padding, device)
    runs: list[torch.Tensor] = []

    def run(model: torch.nn.Module) -> torch.Tensor:
        tokens, logits = generate(model, batch, new_tokens=NEW_TOKENS, cache=cache)
        runs.append(tokens)
        return logits

    found = agreement.measure(model, run, dtype=torch.float16, device=device)
    in_float32, by_torch, ours = runs
    assert torch.equal(ours, by_torch)
    assert torch.equal(ours, in_float32)
    assert ours.unique().numel() > NEW_TOKENS  # the model does not repeat itself
    agreement.check(found, calls=LAYERS * NEW_TOKENS)
    assert 2 * found.error < MARGIN
