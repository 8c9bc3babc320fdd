"""The pretrained text encoder of tests/models/encoder.py, where its weights are installed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.models.case import Case, Mode, Run
from tests.models import encoder

CONFIGURATION = "all-MiniLM-L6-v2, trained weights: 6 layers, 12 heads of 32"
LONGEST = 2  # of the texts, and long enough to quantise


def cases(folder: Path, *, copies: int) -> Iterator[Case]:
    """Texts in a padded batch, and each text alone, which needs no mask."""
    reader = functools.cache(lambda: encoder.Encoder(folder))
    common: dict[str, Any] = {
        "family": "encoder",
        "model": "MiniLM-L6",
        "configuration": CONFIGURATION,
        "build": lambda: reader().model,
    }
    texts = encoder.TEXTS * copies
    yield Case(
        task="embeddings, padded",
        inputs=lambda device: reader().embedding(texts, device),
        **common,
    )
    long = " ".join(encoder.TEXTS)
    groups = {
        "texts of 83 to 270 tokens, one by one": (encoder.TEXTS[LONGEST], long, f"{long} {long}"),
        "texts of 4 to 21 tokens, one by one": (*encoder.TEXTS[:LONGEST], *encoder.TEXTS[LONGEST + 1 :]),
    }
    for task, alone in groups.items():
        inputs = functools.partial(one_by_one, reader, alone)
        yield Case(task=task, inputs=inputs, modes=(Mode.EAGER,), **common)


def one_by_one(reader: Callable[[], encoder.Encoder], texts: tuple[str, ...], device: str) -> Run:
    """The hidden states [tokens, 384] of all texts."""
    batches = [reader().tokens([text], device) for text in texts]

    def run(model: Any) -> torch.Tensor:
        return torch.cat([model(**batch).last_hidden_state[0] for batch in batches])

    return run
