"""Which of the two families makes gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

import sdpa_cutlass.integrations.backward_ops  # noqa: F401  registers the operators
from sdpa_cutlass.choice import backward
from sdpa_cutlass.choice.cost import fmha_bwd_fused
from sdpa_cutlass.cli.predictions import H200
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family
from sdpa_cutlass.problem import DType, MaskType, Problem


def problem(seqlen: int, **options: object) -> Problem:
    given: dict[str, object] = {"batch": 2, "num_heads_q": 32, "num_heads_kv": 32, "head_dim": 64}
    given |= {"dtype": DType.F16, "seqlen_q": seqlen, "seqlen_k": seqlen}
    return Problem(**(given | options))  # type: ignore[arg-type]


@pytest.fixture
def _no_memory() -> Iterator[None]:
    """Choices are remembered."""
    backward.legal_kernels.cache_clear()
    yield
    backward.legal_kernels.cache_clear()


def families(asked: Problem) -> list[Family]:
    return [row.family for row in backward.legal_kernels(library(Target.HOST), asked, H200.device)]


@pytest.mark.usefixtures("_no_memory")
def test_fused_kernels_come_last_until_they_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = families(problem(8192))
    assert found[0] is Family.FMHA_BWD
    assert found[-1] is Family.FMHA_BWD_FUSED
    monkeypatch.setattr(fmha_bwd_fused, "IS_CHOSEN", True)
    backward.legal_kernels.cache_clear()
    assert families(problem(8192))[0] is Family.FMHA_BWD_FUSED
    few = problem(128, batch=1, num_heads_q=1, num_heads_kv=1)
    assert families(few)[0] is Family.FMHA_BWD
    assert families(problem(8192, has_dropout=True))[0] is Family.FMHA_BWD_FUSED
    for other in ({"mask": MaskType.BOOL}, {"mask": MaskType.F32}, {"head_dim": 192}):
        assert Family.FMHA_BWD_FUSED not in families(problem(8192, **other))


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
