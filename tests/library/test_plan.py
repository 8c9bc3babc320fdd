"""plan(): a run gives what `attention` gives, on other tensors of the same layout too."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from sdpa_cutlass import (
    ArgumentError,
    ArgumentTypeError,
    Family,
    UnsupportedError,
    attention,
    plan,
    unfused_attention,
)

pytestmark = pytest.mark.usefixtures("_call_path")


def half(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(device)


def tensors(device: str, seed: int = 0, head_dim: int = 64) -> list[torch.Tensor]:
    return [
        half(2, heads, n, head_dim, device=device, seed=seed + n) for heads, n in ((4, 9), (2, 11), (2, 11))
    ]


@pytest.mark.parametrize(
    "options", [{}, {"causal": "bottom_right"}, {"scale": 0.3}, {"layout": "bshd"}], ids=str
)
@pytest.mark.parametrize("return_lse", [False, True])
def test_runs_give_what_attention_gives(options: dict[str, Any], return_lse: bool, device: str) -> None:
    def given(seed: int) -> list[torch.Tensor]:
        made = tensors(device, seed)
        return [t.transpose(1, 2).contiguous() for t in made] if "layout" in options else made

    planned = plan(*given(0), return_lse=return_lse, **options)
    for seed in (1, 2):
        q, k, v = given(seed)
        out = torch.empty_strided(planned.out_shape, planned.out_stride, dtype=q.dtype, device=device)
        lse = torch.empty(2, 4, 9, device=device) if return_lse else None
        planned.run(q, k, v, out, lse)
        expected, expected_lse = attention(q, k, v, return_lse=True, kernel=planned.kernel.name, **options)
        assert torch.equal(out, expected)
        assert lse is None or torch.equal(lse, expected_lse)


def test_masks_and_lengths_are_read_at_each_run(device: str) -> None:
    q, k, v = tensors(device)
    mask = torch.ones(9, 11, dtype=torch.bool, device=device)
    lengths = torch.tensor([11, 5], dtype=torch.int32, device=device)
    planned, out = plan(q, k, v, attn_mask=mask, seqlens_k=lengths), torch.empty_like(q)
    mask[:, 3:7] = False
    lengths.copy_(torch.tensor([8, 11], dtype=torch.int32))
    planned.run(q, k, v, out)
    assert torch.equal(out, attention(q, k, v, attn_mask=mask, seqlens_k=lengths))


def test_an_out_of_other_strides(device: str) -> None:
    q, k, v = tensors(device)
    out = torch.empty(2, 9, 4, 64, dtype=q.dtype, device=device).transpose(1, 2)
    planned = plan(q, k, v, out=out)
    assert planned.out_stride == out.stride()
    planned.run(q, k, v, out)
    assert torch.equal(out, attention(q, k, v))


def test_the_baseline_has_plans(device: str) -> None:
    q, k, v = tensors(device)
    planned, out = plan(q, k, v, family=Family.UNFUSED), torch.empty_like(q)
    planned.run(q, k, v, out)
    assert planned.kernel.family is Family.UNFUSED
    assert planned.kernel.name in repr(planned)
    assert torch.equal(out, unfused_attention(q, k, v))


def test_what_would_be_copied_is_refused(device: str) -> None:
    q, k, v = tensors(device)
    strided = half(2, 2, 64, 11, device=device).transpose(2, 3)
    shifted = half(2, 2, 11, 72, device=device)[..., 1:65]
    for key in (strided, shifted):
        with pytest.raises(ArgumentError, match=r"key has shape .* read in place"):
            plan(q, key, v)
    with pytest.raises(ArgumentError, match=r"query has shape .* multiples of 8"):
        plan(*tensors(device, head_dim=33))
    with pytest.raises(ArgumentError, match="runs no kernel"):
        plan(q[:0], k[:0], v[:0])
    with pytest.raises(ArgumentError, match="out has shape"):
        plan(q, k, v, out=q[:, :, :5])
    with pytest.raises(UnsupportedError, match="requires grad"):
        plan(q.clone().requires_grad_(), k, v)


def test_arrays_are_read_as_attention_reads_them() -> None:
    q, k, v = tensors("cpu")
    mask = torch.zeros(9, 11)
    planned = plan(q.numpy(), k.numpy(), v.numpy(), attn_mask=mask.numpy())
    out = torch.empty_like(q)
    mask[:, 4:] = -torch.inf
    planned.run(q, k, v, out)
    assert torch.equal(out, attention(q, k, v, attn_mask=mask))
    with pytest.raises(ArgumentTypeError, match="query is a list"):
        plan([1], k, v)


def test_copies_are_refused(device: str) -> None:
    planned = plan(*tensors(device))
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="AttentionPlan cannot be copied or pickled"):
            function(planned)
