"""Sinks: a logit of each head that joins the denominator alone, in every kernel that takes lengths."""

from __future__ import annotations

import math

import pytest
import torch

from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, random_qkv, random_sinks, refusal_of, run_case
from tests.kernels.general_numerics import check_case
from tests.kernels.harness import TestedKernel
from tests.kernels.test_window import all_splits

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SPREADS = (0.0, 1.0, 30.0)


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", SPREADS)
def test_grouped_heads(lengths_kernel: TestedKernel, dtype: torch.dtype, spread: float) -> None:
    """Each query head has its own, also where a tile has several. Alignments meet all types and sizes."""
    inputs = random_qkv(lengths_kernel, 21, 150, heads=6, heads_kv=2)
    sinks = random_sinks(lengths_kernel, 6, dtype, spread)
    causal = (None, *Causal)[(DTYPES.index(dtype) + SPREADS.index(spread)) % 3]
    case = Case(**inputs, causal=causal, sinks=sinks)
    for kernel in all_splits(lengths_kernel):
        check_case(kernel, case)


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
def test_rows_without_keys(lengths_kernel: TestedKernel) -> None:
    """Their output is 0 and their softmax_lse the sink; rows beyond a sequence keep 0 and -inf."""
    sinks = random_sinks(lengths_kernel, 4, torch.float32)
    case = Case(
        **random_qkv(lengths_kernel, 90, 40, batch=3, heads=4, heads_kv=2),
        causal=Causal.BOTTOM_RIGHT,
        lengths_q=Lengths(seqlens=(90, 7, 60)),
        lengths_k=Lengths(seqlens=(40, 0, 33)),
        sinks=sinks,
    )
    for kernel in all_splits(lengths_kernel):
        out, lse = check_case(kernel, case)
        assert lse is not None
        for b, rows in ((0, slice(0, 50)), (1, slice(0, 7)), (2, slice(0, 27))):
            assert (out[b, :, rows] == 0).all()
            torch.testing.assert_close(lse[b, :, rows], sinks[:, None].expand_as(lse[b, :, rows]))
        for b, rows in ((1, slice(7, 90)), (2, slice(60, 90))):
            assert (out[b, :, rows] == 0).all()
            assert (lse[b, :, rows] == -math.inf).all()


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
def test_infinite_sinks(lengths_kernel: TestedKernel) -> None:
    """+inf takes all the weight, -inf none, NaN spoils its own head alone."""
    inputs = random_qkv(lengths_kernel, 9, 100, batch=1, heads=4, heads_kv=2)
    sinks = torch.tensor([math.inf, -math.inf, 0.5, math.nan], device=lengths_kernel.device)
    for kernel in all_splits(lengths_kernel):
        plain, plain_lse = run_case(kernel, Case(**inputs))
        out, lse = run_case(kernel, Case(**inputs, sinks=sinks))
        assert lse is not None
        assert (out[:, 0] == 0).all()
        assert (lse[:, 0] == math.inf).all()
        assert torch.equal(out[:, 1], plain[:, 1])
        assert torch.equal(lse[:, 1], plain_lse[:, 1])
        assert out[:, 2].isfinite().all()
        assert not torch.equal(lse[:, 2], plain_lse[:, 2])
        assert out[:, 3].isnan().all()
        assert lse[:, 3].isnan().all()


@pytest.mark.kernels(splits=(1,))  # all_splits has the others
@pytest.mark.parametrize("scale", [0.0, -0.3, 20.0])
def test_sinks_are_not_scaled(lengths_kernel: TestedKernel, scale: float) -> None:
    inputs = random_qkv(lengths_kernel, 20, 70, batch=1)
    sinks = random_sinks(lengths_kernel, 2, torch.float32, 3.0)
    case = Case(**inputs, scale=scale, sinks=sinks, window=(40, 3))
    for kernel in all_splits(lengths_kernel):
        check_case(kernel, case)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"sinks_type": 1}, "sinks_type is 1; allowed are 0, and 2 to 4"),
        ({"sinks_type": 5}, "sinks_type is 5"),
        ({"sinks_type": 0}, "and sinks_type 0; allowed are null with 0, or neither"),
        ({"sinks": 4098}, "sinks is 0x1002; it must be a multiple of 4"),
    ],
    ids=str,
)
def test_refused(lengths_kernel: TestedKernel, changes: dict[str, int], word: str) -> None:
    sinks = random_sinks(lengths_kernel, 2, torch.float32)
    case = Case(**random_qkv(lengths_kernel, 4, 9, batch=1), sinks=sinks)
    assert refusal_of(lengths_kernel, case) is None
    assert word in (refusal_of(lengths_kernel, case, **changes) or "")


def test_plain_kernels_take_none(fused_kernel: TestedKernel) -> None:
    causal = Causal.TOP_LEFT if fused_kernel.info.is_causal else None
    sinks = random_sinks(fused_kernel, 2, torch.float32)
    case = Case(**random_qkv(fused_kernel, 8, 8), causal=causal, sinks=sinks)
    reason = refusal_of(fused_kernel, case)
    assert "sinks is given; this kernel takes none" in (reason or "")
