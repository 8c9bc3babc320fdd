"""One thing to measure: a model with random weights, its input, and what is compared."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

Run = Callable[[Any], torch.Tensor]
"""From a model to its outputs, whose rows are tokens or images; the input is within."""

DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
SEED = 0


class Mode(Enum):
    """How a model runs."""

    EAGER = "eager"
    COMPILED = "compiled"
    GRAPH = "graph"


FORWARD = (Mode.EAGER, Mode.COMPILED, Mode.GRAPH)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a task.

    configuration: where the sizes come from, and what of them was cut.
    build: the model in float32, with the same weights each time.
    inputs: from a device to a Run.
    own_attention: what transformers computes the model with by itself; None: not a model of transformers.
    takes_sdpa: whether its attention calls F.scaled_dot_product_attention.
    """

    family: str
    model: str
    task: str
    configuration: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[str], Run]
    own_attention: str | None = "sdpa"
    takes_sdpa: bool = True
    dtypes: tuple[str, ...] = tuple(DTYPES)
    modes: tuple[Mode, ...] = FORWARD

    def __str__(self) -> str:
        return f"{self.model}, {self.task}"


def seeded(model: Callable[..., torch.nn.Module], *arguments: Any, device: str) -> torch.nn.Module:
    """A model in float32 whose random weights are the same each time, made on `device`."""
    devices = [torch.cuda.current_device()] if device == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(SEED)
        return model(*arguments).eval()


def of_transformers(model: str, config: str, device: str, **options: Any) -> Callable[[], torch.nn.Module]:
    """A builder of the model of transformers that `model` names, from the options of its `config` class."""

    def build() -> torch.nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        return seeded(getattr(transformers, model), made, device=device)

    return functools.cache(build)


def scores_of_models(width: int) -> float:
    """The weights' standard deviation for which scores have one of about 1.7, as in trained models."""
    return 1.3 / width**0.5
