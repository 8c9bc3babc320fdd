"""The check itself: right outputs pass, and each kind of wrong one is caught."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sdpa_cutlass.cli import accuracy
from sdpa_cutlass.cli.inputs import QKV, random_qkv
from sdpa_cutlass.cli.suites import Case, host

CPU = torch.device("cpu")


def inputs_of(case: Case, dtype: torch.dtype = torch.float16) -> QKV:
    return random_qkv(case, dtype=dtype, device=CPU, seed=0)


def exact(case: Case, qkv: QKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in float64 and log-sum-exp, by torch alone."""
    q, k, v = (tensor.double() for tensor in qkv)
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if case.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


CASES = {case.name: case for case in host() if case.head_dim in (32, 64)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_rounded_exact_answer_passes(case: Case, dtype: torch.dtype) -> None:
    qkv = inputs_of(case, dtype)
    out, lse = exact(case, qkv)
    errors = accuracy.make_reference(qkv, causal=case.causal, seed=0).check(out.to(dtype), lse.float())
    assert errors.violation is None
    assert errors.max_err_lse is not None
    assert errors.max_err_lse < 1e-6
    assert 0 < errors.max_err_out < (2e-3 if dtype is torch.float16 else 2e-2)


def test_bfloat16_probabilities_pass() -> None:
    """What any kernel does that feeds P to a bfloat16 matrix product; without an allowance it would fail."""
    case = CASES["host/b1_h2_s160_d32_causal"]
    qkv = inputs_of(case, torch.bfloat16)
    q, k, v = (tensor.float() for tensor in qkv)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    out = (weights.bfloat16().float() @ v) / weights.sum(-1, keepdim=True)
    reference = accuracy.make_reference(qkv, causal=True, seed=0)
    assert reference.check(out.bfloat16(), scores.logsumexp(-1)).violation is None
    strict = 1e-3 * reference.out.abs().clamp(min=1) + accuracy.half_ulp(reference.out, torch.bfloat16)
    assert dataclasses.replace(reference, allowed=strict).check(out.bfloat16(), None).violation is not None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_blocks_change_nothing(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = inputs_of(case)
    whole = accuracy.make_reference(qkv, causal=case.causal, seed=0)
    monkeypatch.setitem(accuracy.BLOCK_SCORES, "cpu", 3000)
    blocked = accuracy.make_reference(qkv, causal=case.causal, seed=0)
    assert torch.allclose(whole.out, blocked.out, rtol=0, atol=1e-12)
    assert torch.allclose(whole.lse, blocked.lse, rtol=0, atol=1e-12)
    assert whole.out.shape[0] == case.batch * case.num_heads_q


def test_some_pairs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASES["host/b1_h4x2_q97_k193_d64"], batch=3)
    qkv = inputs_of(case)
    monkeypatch.setattr(accuracy, "FULL_CHECK_SCORES", 5 * case.seqlen_q * case.seqlen_k)
    some = accuracy.make_reference(qkv, causal=False, seed=1)
    assert len(set(some.pairs.tolist())) == 5
    out, lse = exact(case, qkv)
    assert some.check(out.half(), lse.float()).violation is None
    out[some.pairs[0] // 4, some.pairs[0] % 4, 0, 0] += 0.1
    assert some.check(out.half(), lse.float()).violation is not None


def test_wrong_outputs_are_caught() -> None:
    case = CASES["host/b1_h2_s160_d64_causal"]
    qkv = inputs_of(case)
    out, lse = exact(case, qkv)
    out, lse = out.half(), lse.float()
    reference = accuracy.make_reference(qkv, causal=True, seed=0)
    assert reference.check(out, lse).violation is None

    nan = out.clone()
    nan[0, 1, 159, 63] = torch.nan
    assert "max error of O nan" in str(reference.check(nan, lse).violation)
    shifted = out.clone()
    shifted[0, 0, 3, 5] += 2.5 * reference.chain_error
    assert "twice the plain chain's" in str(reference.check(shifted, lse).violation)
    scale = (reference.chain_error * 1.9) / out[0, 1, 100, 7].abs()
    nudged = out.clone()
    nudged[0, 1, 100, 7] *= 1 + scale
    assert "an element of O" in str(reference.check(nudged, lse).violation)
    assert reference.check(nudged, lse, every_element=False).violation is None
    assert "LSE 0.0002" in str(reference.check(out, lse + 2e-4).violation)
    assert "LSE nan" in str(reference.check(out, lse * torch.nan).violation)
    other_mask = exact(dataclasses.replace(case, causal=False), qkv)
    assert reference.check(other_mask[0].half(), lse).violation is not None


def test_a_large_log_sum_exp_may_be_off_by_what_float32_cannot_resolve() -> None:
    """As far from 0 as a bias of distances makes it; a small one may not."""
    case = CASES["host/b1_h2_s160_d64_causal"]
    reference = accuracy.make_reference(inputs_of(case), causal=True, seed=0)
    out = reference.out.unflatten(0, (1, 2)).half()
    for shift, allowed in ((0.0, 0.9e-4), (-2000.0, 0.9e-3)):
        moved = dataclasses.replace(reference, lse=reference.lse + shift)
        lse = moved.lse.unflatten(0, (1, 2))
        assert moved.check(out, (lse + allowed).float()).violation is None
        assert "error of LSE" in str(moved.check(out, (lse + 2 * allowed).float()).violation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_ulp(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 0.75, -3.0, 1e-3, 60000.0, 6.2e-5], dtype=dtype)
    next_value = (values.abs().view(torch.int16) + 1).view(dtype)
    expected = (next_value.double() - values.abs().double()) / 2
    assert torch.equal(accuracy.half_ulp(values.double(), dtype), expected)
    least = torch.tensor([0.0], dtype=torch.float64)
    assert accuracy.half_ulp(least, dtype).item() == (2.0**-25 if dtype is torch.float16 else 2.0**-134)
