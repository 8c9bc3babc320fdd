"""Greedy generation with a KV cache, from prompts that leave no doubt which token comes next.

Two tokens of nearly the same logit may change places by rounding alone, which says nothing about attention.
So prompts are taken for which the float32 model puts every chosen token ahead of the next by a margin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.models.agreement import exact_attention, in_float32
from tests.models.zoo import Padding, token_batch

CACHES = ("dynamic", "static")
"""Of keys and values: one grows with the sequence, one has its full length from the start."""


def generate(
    model: Any, batch: dict[str, torch.Tensor], *, new_tokens: int, cache: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [batch, new_tokens], their logits [new_tokens, batch, vocabulary])."""
    result = model.generate(
        **batch,
        do_sample=False,
        max_new_tokens=new_tokens,
        cache_implementation=cache,
        disable_compile=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return result.sequences[:, -new_tokens:], torch.stack(result.logits)


def clear_prompts(
    model: Any, lengths: Sequence[int], padding: Padding, *, new_tokens: int, margin: float
) -> dict[str, torch.Tensor]:
    """A batch of prompts, on the device of `model`, for which float32 decides every token by `margin`.

    Raises RuntimeError when 300 batches have none.
    """
    exact = in_float32(model)
    for seed in range(300):
        batch = token_batch(lengths, padding, seed=seed)
        batch = {name: tensor.to(exact.device) for name, tensor in batch.items()}
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        with torch.no_grad(), exact_attention():
            _, logits = generate(exact, batch, new_tokens=new_tokens, cache="dynamic")
        first, second = logits.topk(2, dim=-1).values.unbind(-1)
        if (first - second).min() > margin:
            return batch
    raise RuntimeError(f"no prompts decide {new_tokens} tokens by {margin}")
