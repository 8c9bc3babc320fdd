"""Rows in which one key wins: the output is that key's value, bit for bit, however large the scores are.

A score's product with the scale is rounded to float32 where it becomes the softmax's reference. What the
kernels compute elsewhere must not differ from it by that rounding: the weight of the largest score is 1.
"""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_cutlass.dropout import PhiloxState, dropout_mask
from tests.kernels.general import Case, random_qkv, run_case
from tests.kernels.harness import Inputs, TestedKernel, random_inputs, run_kernel
from tests.kernels.masks import mask_dtypes, random_mask
from tests.kernels.numerics import check_numerics, visible

GAP = 60.0  # between the largest score of a row and the next: no other weight shows in the output
LARGEST_SCORE = 1e5
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 133120.0}


def rows_and_keys(kernel: TestedKernel) -> tuple[int, int]:
    """Rows of two tiles at most, and keys of several blocks of every KV group."""
    info = kernel.info
    return min(info.block_m, 40) + 3, (2 * info.kv_groups + 1) * info.block_n + 5


def scale_for(kernel: TestedKernel, largest: float = LARGEST_SCORE) -> float:
    """Scores of normal values reach about five times their standard deviation √head_dim."""
    return largest / (5 * math.sqrt(kernel.info.head_dim))


def check_winners(
    out: torch.Tensor, scores: torch.Tensor, v: torch.Tensor, kept: torch.Tensor | None = None
) -> None:
    """out [B, H, Sq, D] has the value of the winning key in every row with one; scores in float64."""
    top = scores.topk(2, dim=-1)
    wins = (top.values[..., 0] - top.values[..., 1] > GAP) & top.values[..., 0].isfinite()
    assert wins.double().mean() > 0.5, "most rows should have a winner"
    winner = top.indices[..., :1]
    value = v.repeat_interleave(scores.shape[1] // v.shape[1], 1)
    value = value.gather(2, winner.expand(*winner.shape[:3], v.shape[3]))
    if kept is not None:
        value = torch.where(kept.gather(-1, winner), 2 * value, 0)
    wrong = (out != value) & wins[..., None]
    assert not wrong.any(), (
        f"{int(wrong.sum())} elements are not their winner's, first {tuple(wrong.nonzero()[0].tolist())}"
    )


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    return q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale


@pytest.mark.parametrize("largest", [3e3, LARGEST_SCORE])
def test_a_winning_key_gives_its_value(fused_kernel: TestedKernel, largest: float) -> None:
    inputs = random_inputs(fused_kernel, *rows_and_keys(fused_kernel))
    scale, causal = scale_for(fused_kernel, largest), fused_kernel.alignments[-1]
    out, _ = run_kernel(fused_kernel, inputs, causal=causal, scale=scale)
    scores = scores_of(inputs.q, inputs.k, scale)
    seen = visible(*scores.shape[-2:], causal, scores.device)
    check_winners(out, scores.masked_fill(~seen, -math.inf), inputs.v)


def test_the_rule_holds_for_sharp_rows(fused_kernel: TestedKernel) -> None:
    inputs = random_inputs(fused_kernel, *rows_and_keys(fused_kernel))
    for scale in (30.0, 300.0):
        check_numerics(fused_kernel, inputs, causal=fused_kernel.alignments[-1], scale=scale)


def test_masks_and_biases_leave_the_winner_exact(general_kernel: TestedKernel) -> None:
    rows, keys = rows_and_keys(general_kernel)
    tensors = random_qkv(general_kernel, rows, keys, batch=1)
    scale = scale_for(general_kernel)
    scores = scores_of(tensors["q"], tensors["k"], scale)
    for dtype in (None, *mask_dtypes(general_kernel.info)):
        mask = None if dtype is None else random_mask(dtype, (rows, keys), general_kernel.device)
        out, _ = run_case(general_kernel, Case(**tensors, mask=mask, scale=scale))
        biased = scores
        if mask is not None:
            is_bool = mask.dtype is torch.bool
            biased = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask.double()
        check_winners(out, biased, tensors["v"])


def test_dropout_scales_or_drops_the_winner(dropout_kernel: TestedKernel) -> None:
    rows, keys = rows_and_keys(dropout_kernel)
    tensors = random_qkv(dropout_kernel, rows, keys, batch=1)
    scale, philox = scale_for(dropout_kernel), PhiloxState(5, 8)
    out, _ = run_case(dropout_kernel, Case(**tensors, scale=scale, p_dropout=0.5, philox=philox))
    kept = dropout_mask(1, 2, rows, keys, 0.5, philox, device=dropout_kernel.device)
    check_winners(out, scores_of(tensors["q"], tensors["k"], scale), tensors["v"], kept)


def test_splits_merge_to_the_winner(split_kernel: TestedKernel) -> None:
    rows, keys = rows_and_keys(split_kernel)
    tensors = random_qkv(split_kernel, rows, keys, batch=1)
    scale = scale_for(split_kernel)
    for num_splits in (1, 3):
        out, _ = run_case(split_kernel.with_splits(num_splits), Case(**tensors, scale=scale))
        check_winners(out, scores_of(tensors["q"], tensors["k"], scale), tensors["v"])


def test_the_largest_inputs_give_finite_results(fused_kernel: TestedKernel) -> None:
    """A single key is its value; several are a softmax of scores that float32 rounds by thousands."""
    largest = LARGEST[fused_kernel.dtype]
    inputs = random_inputs(fused_kernel, *rows_and_keys(fused_kernel))
    for tensor in inputs.q, inputs.k, inputs.v:
        tensor.sign_().mul_(largest)
    causal = fused_kernel.alignments[-1]
    out, lse = run_kernel(fused_kernel, inputs, causal=causal)
    assert lse is not None
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert (out.abs() <= largest).all()
    one = Inputs(inputs.q[:, :, :1], inputs.k[:, :, :1], inputs.v[:, :, :1])
    out, _ = run_kernel(fused_kernel, one, causal=causal)
    assert torch.equal(out, one.v)


def test_scores_may_all_be_huge_and_negative(fused_kernel: TestedKernel) -> None:
    """Equal scores of a row weigh alike, whatever their size and sign."""
    largest = LARGEST[fused_kernel.dtype]
    inputs = random_inputs(fused_kernel, *rows_and_keys(fused_kernel))
    inputs.q.fill_(-largest)
    inputs.k.fill_(largest)
    causal = fused_kernel.alignments[-1]
    out, _ = run_kernel(fused_kernel, inputs, causal=causal)
    inputs.q.zero_()
    same, _ = run_kernel(fused_kernel, inputs, causal=causal)
    assert torch.equal(out, same)


def test_a_bias_may_be_the_least_float_everywhere(general_kernel: TestedKernel) -> None:
    """It swallows the scores: every key counts alike."""
    rows, keys = rows_and_keys(general_kernel)
    tensors = random_qkv(general_kernel, rows, keys, batch=1)
    tensors["k"].zero_()
    for dtype in mask_dtypes(general_kernel.info):
        if dtype is not torch.bool:
            mask = torch.full((rows, keys), torch.finfo(dtype).min, dtype=dtype, device=general_kernel.device)
            out, _ = run_case(general_kernel, Case(**tensors, mask=mask))
            same, _ = run_case(general_kernel, Case(**tensors))
            assert torch.equal(out, same), dtype


def test_a_scale_may_be_the_largest_float(fused_kernel: TestedKernel) -> None:
    """In log2 units it would be infinite. Scores of zero make every key count alike."""
    inputs = random_inputs(fused_kernel, *rows_and_keys(fused_kernel))
    inputs.q.zero_()
    causal = fused_kernel.alignments[-1]
    out, _ = run_kernel(fused_kernel, inputs, causal=causal, scale=3.4e38)
    same, _ = run_kernel(fused_kernel, inputs, causal=causal, scale=1.0)
    assert torch.equal(out, same)
