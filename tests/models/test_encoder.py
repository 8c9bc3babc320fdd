"""A pretrained text encoder gives the same embeddings of real texts of unequal lengths as with torch."""

from __future__ import annotations

import copy

import pytest
import torch

import sdpa_cutlass
from tests.models import agreement
from tests.models.encoder import LAYERS, TEXTS, Encoder, default_folder

pytestmark = pytest.mark.encoder


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(default_folder())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["f16", "bf16"])
def test_embeddings_agree(encoder: Encoder, dtype: torch.dtype, device: str) -> None:
    lengths = encoder.tokens(TEXTS, "cpu")["attention_mask"].sum(1)
    assert lengths.max() > 64 >= 10 * lengths.min()
    run = encoder.embedding(TEXTS, device)
    found = agreement.measure(encoder.model, run, dtype=dtype, device=device)
    agreement.check(found, calls=LAYERS)


def test_texts_of_a_batch_are_independent(encoder: Encoder, device: str) -> None:
    """A short text padded to a long one's length keeps its embedding, and paraphrases lie nearest."""
    model = copy.deepcopy(encoder.model).to(device, torch.float16)
    with torch.no_grad(), sdpa_cutlass.enabled(devices=[device]) as usage:
        together = encoder.embedding(TEXTS, device)(model)
        alone = torch.cat([encoder.embedding([text], device)(model) for text in TEXTS])
    assert (usage.served, usage.fallbacks) == (LAYERS * (1 + len(TEXTS)), {})
    torch.testing.assert_close(together, alone, atol=1e-3, rtol=0)
    half = len(TEXTS) // 2
    similarity = together[:half] @ together[half:].T
    assert similarity.argmax(1).tolist() == similarity.argmax(0).tolist() == list(range(half))
