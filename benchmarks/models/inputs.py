"""Tokens, images and sounds that are the same on every machine, and the runs that a model makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.models.case import Run


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """float32, of values that float16 and bfloat16 hold exactly."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return drawn.bfloat16().half().float()


def moved(batch: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The batch on `device`."""
    return {name: tensor.to(device) for name, tensor in batch.items()}


def text_run(batch: dict[str, torch.Tensor], output: str, **options: Any) -> Callable[[str], Run]:
    """A forward; its `output` of every token that is not padding, [tokens, channels]."""

    def inputs(device: str) -> Run:
        given = moved(batch, device)
        mask = given.get("attention_mask")
        kept = None if mask is None else mask.flatten().nonzero().flatten()  # no wait for the device in a run

        def run(model: Any) -> torch.Tensor:
            found: torch.Tensor = getattr(model(**given, **options), output).flatten(0, 1)
            return found if kept is None else found[kept]

        return run

    return inputs


def tensor_run(tensors: dict[str, torch.Tensor], output: str) -> Callable[[str], Run]:
    """A forward with tensors in the model's dtype, those of whole numbers as they are."""

    def inputs(device: str) -> Run:
        given = moved(tensors, device)

        def run(model: Any) -> torch.Tensor:
            dtype = next(model.parameters()).dtype
            cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in given.items()}
            return getattr(model(**cast), output).flatten(0, -2)

        return run

    return inputs


def generation_run(
    batch: dict[str, torch.Tensor], *, new_tokens: int, cache: str, vocabulary: int
) -> Callable[[str], Run]:
    """Generation through a "dynamic" (growing) or "static" KV cache; logits [new_tokens * B, vocabulary].

    The tokens are given, whatever the model would choose: then rounding that changes a choice cannot change
    what the later logits are logits of.
    """
    drawn = torch.Generator().manual_seed(1)
    forced = torch.randint(1, vocabulary, (len(batch["input_ids"]), new_tokens), generator=drawn)

    def inputs(device: str) -> Run:
        given = moved(batch, device)
        given.setdefault("attention_mask", torch.ones_like(given["input_ids"]))
        start = given["input_ids"].shape[1]
        tokens = forced.to(device)

        def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            chosen = tokens[:, ids.shape[1] - start, None]
            return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

        def run(model: Any) -> torch.Tensor:
            result = model.generate(
                **given,
                do_sample=False,
                max_new_tokens=new_tokens,
                cache_implementation=cache,
                disable_compile=True,
                logits_processor=[force],
                output_logits=True,
                return_dict_in_generate=True,
            )
            return torch.cat(result.logits)

        return run

    return inputs
