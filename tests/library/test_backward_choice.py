"""Which of the two families makes gradients."""

from __future__ import annotations

import math

import pytest
import torch

import sdpa_cutlass.integrations.backward_ops  # noqa: F401  registers the operators
from sdpa_cutlass.choice import backward
from sdpa_cutlass.cli.predictions import H200
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family
from sdpa_cutlass.problem import Causal, DType, MaskType, Problem


def problem(seqlen: int, **options: object) -> Problem:
    given: dict[str, object] = {"batch": 2, "num_heads_q": 32, "num_heads_kv": 32, "head_dim": 64}
    given |= {"dtype": DType.F16, "seqlen_q": seqlen, "seqlen_k": seqlen}
    return Problem(**(given | options))  # type: ignore[arg-type]


def families(asked: Problem) -> list[Family]:
    return [row.family for row in backward.legal_kernels(library(Target.HOST), asked, H200.device)]


@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT])
@pytest.mark.parametrize("seqlen", [2048, 8192])
def test_the_faster_family_is_chosen(seqlen: int, causal: Causal | None) -> None:
    """As measured: benchmarks/results/tuning/2026-11-26-h200-backward-kernels.json, without dropout."""
    asked = {"batch": 16384 // seqlen, "causal": causal}
    assert families(problem(seqlen, **asked))[0] is Family.FMHA_BWD_FUSED
    assert families(problem(seqlen, **asked, has_dropout=True))[0] is Family.FMHA_BWD
    asked |= {"num_heads_q": 16, "num_heads_kv": 16, "head_dim": 128}
    assert families(problem(seqlen, **asked))[0] is Family.FMHA_BWD


def test_few_ctas_are_not_made_to_follow_each_other() -> None:
    few = problem(128, batch=1, num_heads_q=1, num_heads_kv=1)
    assert families(few)[0] is Family.FMHA_BWD
    assert Family.FMHA_BWD_FUSED in families(few)


def test_what_fused_kernels_do_not_serve() -> None:
    for other in ({"mask": MaskType.BOOL}, {"mask": MaskType.F32}, {"head_dim": 192}):
        assert set(families(problem(8192, **other))) == {Family.FMHA_BWD}


def test_fused_kernels_run_when_they_are_named() -> None:
    """With gradients near those of the other family."""
    rows = backward.legal_kernels(library(Target.HOST), problem(64), H200.device)
    names = [next(row.name for row in rows if row.family is family) for family in set(families(problem(64)))]
    draw = torch.Generator().manual_seed(0)
    dout, q, k, v = (torch.randn(1, 2, 70, 64, generator=draw).half() for _ in range(4))
    scores = (q.double() @ k.double().mT) / math.sqrt(64)
    out = (scores.softmax(-1) @ v.double()).half()
    lse = scores.logsumexp(-1).float()
    grads = [
        torch.ops.sdpa_cutlass.attention_backward(
            dout, q, k, v, out, lse, kernel_name=name, needs=[True] * 3 + [False]
        )[:3]
        for name in names
    ]
    assert len(names) == 2
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)
