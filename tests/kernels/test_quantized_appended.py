"""The accuracy contract of docs/quantised.md where keys and values are appended to a QuantizedKV."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quantised_data import CONTRACTS, FAMILIES, errors_of_heads, family
from sdpa_cutlass import Precision, attention, quantize_kv


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_is_appended_keeps_to_the_contract(device: str, precision: Precision, kind: str) -> None:
    """A cache that began with 64 keys."""
    q, k, v = (x.to(device, torch.float16) for x in family(kind, 1, 2, 2, 40, 400, 64, seed=1))
    kept = quantize_kv(k[:, :, :64], v[:, :, :64], precision=precision)
    mean = kept._memory.k_mean.clone()
    for first, end in ((64, 65), (65, 300), (300, 400)):
        kept.append(k[:, :, first:end], v[:, :, first:end])
    assert torch.equal(kept._memory.k_mean, mean)
    out, lse = attention(q, kept, return_lse=True)
    scores = q.double() @ k.double().mT / 8
    errors, angles = errors_of_heads(out, scores.softmax(-1) @ v.double())
    contract = CONTRACTS[precision.accuracy]
    assert errors.max() <= contract.every_family
    assert angles.max() <= contract.cosine_every
    largest = max(1.0, scores.abs().max().item())
    assert (lse.double() - scores.logsumexp(-1)).abs().max() <= contract.lse * largest
