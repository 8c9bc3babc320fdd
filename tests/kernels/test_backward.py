"""What backward kernels compute, against autograd in float64: sizes, masks, dropout, lengths, heads."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.problem import Causal
from tests.kernels.backward import Case, check, execute, operands, prepare, run, violations
from tests.kernels.harness import HOST_THREADS, TestedKernel

SIZES = [(1, 1), (1, 97), (97, 1), (64, 64), (63, 65), (65, 63), (130, 129), (113, 203), (203, 113)]


def case_for(kernel: TestedKernel, seqlen_q: int, seqlen_k: int, **options: object) -> Case:
    """A case that this kernel takes: its own head_dim, dropout where it has it."""
    given: dict[str, object] = {"head_dim": kernel.info.head_dim}
    if kernel.info.has_dropout:
        given["p_dropout"] = 0.17
    return Case(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **(given | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [None, *Causal])
def test_sizes(backward_kernel: TestedKernel, causal: Causal | None) -> None:
    for seqlen_q, seqlen_k in SIZES:
        check(backward_kernel, case_for(backward_kernel, seqlen_q, seqlen_k, causal=causal))


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_groups_of_heads_are_summed_in_float32(backward_kernel: TestedKernel, heads_kv: int) -> None:
    case = case_for(
        backward_kernel, 70, 67, batch=2, heads=4, heads_kv=heads_kv, causal=Causal.BOTTOM_RIGHT, bshd=True
    )
    check(backward_kernel, case)


@pytest.mark.parametrize("causal", [None, *Causal])
@pytest.mark.parametrize("scale", [0.0, -0.3, 1.0])
def test_scales(backward_kernel: TestedKernel, scale: float, causal: Causal | None) -> None:
    """Seventy rows see no key under the bottom-right alignment."""
    check(backward_kernel, case_for(backward_kernel, 133, 63, scale=scale, causal=causal))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (40, 56), (56, 24), (136, 72), (80, 192), (200, 248)]
)
def test_smaller_head_dims(backward_kernel: TestedKernel, head_dim: int, head_dim_v: int) -> None:
    if max(head_dim, head_dim_v) > backward_kernel.info.head_dim:
        pytest.skip("a larger head_dim than this kernel's")
    check(backward_kernel, case_for(backward_kernel, 67, 70, head_dim=head_dim, head_dim_v=head_dim_v))


MASKS = {
    "bool": lambda: torch.rand(1, 2, 67, 133) < 0.5,
    "bool_keys": lambda: torch.rand(2, 1, 1, 133) < 0.5,
    "bias16": lambda: torch.randn(1, 1, 67, 133).half(),
    "biasb16": lambda: torch.randn(2, 2, 67, 133).bfloat16(),
    "bias32_transposed": lambda: torch.randn(1, 2, 133, 67).transpose(-1, -2),
    "bias32_hides": lambda: torch.randn(1, 2, 67, 133).masked_fill(torch.rand(67, 133) < 0.4, -math.inf),
    "bias_rows": lambda: torch.randn(1, 2, 67, 1),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("scale", [None, -0.2])
def test_masks(masked_backward: TestedKernel, kind: str, scale: float | None) -> None:
    torch.manual_seed(0)
    mask = MASKS[kind]()
    case = case_for(masked_backward, 67, 133, batch=2, heads=2, mask=mask, scale=scale)
    check(masked_backward, case)


PAIRS = {
    "bool": lambda: torch.rand(2, 2, 130, 136) < 0.5,
    "bias16": lambda: torch.randn(1, 2, 130, 136).half(),
    "biasb16_of_rows": lambda: torch.randn(2, 1, 1, 136).bfloat16(),
    "bias32": lambda: torch.randn(1, 2, 130, 136),
    "bias32_of_a_wider_one": lambda: torch.randn(2, 1, 130, 144)[..., 2:138],
    "bias16_of_a_wider_one": lambda: torch.randn(1, 1, 130, 144).half()[..., 2:138],
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT])
def test_masks_that_are_read_by_pairs(
    masked_backward: TestedKernel, kind: str, causal: Causal | None
) -> None:
    """Tiles that lie in the sequence whole; the same bits where the same mask is read one by one."""
    torch.manual_seed(0)
    mask = PAIRS[kind]()
    options = {"batch": 2, "heads": 2, "causal": causal}
    by_pairs = check(masked_backward, case_for(masked_backward, 130, 136, mask=mask, **options))
    mask = mask.transpose(-1, -2).contiguous().transpose(-1, -2)
    one_by_one = run(masked_backward, case_for(masked_backward, 130, 136, mask=mask, **options))
    assert all(map(torch.equal, by_pairs, one_by_one))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bias_of_keys_that_are_not_seen_reaches_nothing(
    masked_backward: TestedKernel, value: float
) -> None:
    torch.manual_seed(0)
    mask = torch.randn(130, 136).half()
    above = torch.ones(130, 136, dtype=torch.bool).triu(1)
    case = case_for(masked_backward, 130, 136, mask=mask, causal=Causal.TOP_LEFT)
    held = case_for(masked_backward, 130, 136, mask=mask.masked_fill(above, value), causal=Causal.TOP_LEFT)
    given = operands(case, masked_backward.dtype)
    clean, other = (run(masked_backward, one, given) for one in (case, held))
    assert all(map(torch.equal, clean, other))


def test_the_lowest_finite_bias_passes_no_gradient(masked_backward: TestedKernel) -> None:
    """Of a row that has it everywhere, as some libraries write their padding. Nothing becomes NaN."""
    mask = torch.zeros(1, 1, 67, 70)
    mask[..., 3, :] = torch.finfo(torch.float32).min
    case = case_for(masked_backward, 67, 70, mask=mask)
    dq, dk, dv = run(masked_backward, case)
    assert not dq[..., 3, :].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("is_bias", [False, True])
def test_rows_and_keys_that_a_mask_hides_whole(masked_backward: TestedKernel, is_bias: bool) -> None:
    mask = torch.rand(1, 1, 67, 70) < 0.5
    mask[..., 3, :] = False
    mask[..., 5] = False
    if is_bias:
        mask = torch.randn(mask.shape).masked_fill(~mask, -math.inf)
    dq, dk, dv = check(masked_backward, case_for(masked_backward, 67, 70, mask=mask, causal=Causal.TOP_LEFT))
    assert not dq[..., 3, :].any()
    assert not dk[..., 5, :].any()
    assert not dv[..., 5, :].any()


@pytest.mark.parametrize("causal", [None, *Causal])
@pytest.mark.parametrize("window", [(0, 0), (20, 7), (-1, 3), (70, -1)])
def test_windows(backward_kernel: TestedKernel, window: tuple[int, int], causal: Causal | None) -> None:
    for seqlen_q, seqlen_k in ((133, 150), (150, 67)):
        check(backward_kernel, case_for(backward_kernel, seqlen_q, seqlen_k, window=window, causal=causal))


def test_sinks_and_the_gradient_of_lse(backward_kernel: TestedKernel) -> None:
    sinks = torch.tensor([0.5, -2.0])
    for options in ({}, {"sinks": sinks}, {"sinks": sinks, "causal": Causal.BOTTOM_RIGHT}):
        for with_dlse in (False, True):
            case = case_for(backward_kernel, 97, 65, heads=2, with_dlse=with_dlse, **options)
            check(backward_kernel, case)


@pytest.mark.parametrize("causal", [None, *Causal])
def test_lengths(backward_kernel: TestedKernel, causal: Causal | None) -> None:
    """Rows and keys beyond a length get zeros, and NaN there reaches nothing."""
    case = case_for(
        backward_kernel, 70, 133, batch=4, causal=causal, seqlens_q=(70, 3, 0, 65), seqlens_k=(5, 133, 70, 0)
    )
    clean = check(backward_kernel, case)
    launch = prepare(backward_kernel, case, operands(case, backward_kernel.dtype))
    q, k, v, dout, out = launch.inputs
    for b in range(4):
        rows, keys = case.seqlens_q[b], case.seqlens_k[b]  # type: ignore[index]
        assert not clean[0][b, :, rows:].any()
        assert not clean[1][b, :, keys:].any()
        assert not clean[2][b, :, keys:].any()
        for tensor, length in ((q, rows), (dout, rows), (out, rows), (k, keys), (v, keys)):
            tensor[b, :, length:] = math.nan
    execute(backward_kernel, launch)
    for one, other in zip(clean, launch.grads, strict=True):
        assert torch.equal(one, other.tensor)


def test_a_value_reaches_no_gradient_of_a_row_that_does_not_see_it(backward_kernel: TestedKernel) -> None:
    """dP is NaN there, and P is 0: dS is selected, not multiplied."""
    case = case_for(backward_kernel, 97, 97, causal=Causal.TOP_LEFT)
    launch = prepare(backward_kernel, case, operands(case, backward_kernel.dtype))
    launch.inputs[2][:, :, 40] = math.nan
    execute(backward_kernel, launch)
    dq, dk, dv = (grad.tensor for grad in launch.grads)
    assert dq[:, :, :40].isfinite().all()
    assert dk[:, :, :40].isfinite().all()
    assert dk[:, :, 41:].isfinite().all()
    assert dk[:, :, 40].isnan().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("seqlen_k", [1, 5, 70])
@pytest.mark.parametrize("causal", [None, Causal.BOTTOM_RIGHT])
def test_rows_whose_keys_all_score_low(
    backward_kernel: TestedKernel, causal: Causal | None, seqlen_k: int
) -> None:
    """exp(0 - lse) overflows: what a tile holds behind the last key weighs nothing, however low others."""
    case = case_for(backward_kernel, 67, seqlen_k, causal=causal)
    given = operands(case, backward_kernel.dtype)
    given.q[..., 0], given.k[..., 0] = -40, 40
    gradients = run(backward_kernel, case, given)
    assert not violations(case, given, gradients, backward_kernel.dtype, few_keys=True)


def test_the_same_bits_in_every_schedule_and_alone(backward_kernel: TestedKernel) -> None:
    """Neither the order of warps nor other examples of the batch change a bit."""
    case = case_for(backward_kernel, 130, 97, batch=2, heads=2, causal=Causal.BOTTOM_RIGHT)
    given = operands(case, backward_kernel.dtype)
    expected = run(backward_kernel, case, given)
    if backward_kernel.device == "cpu":
        host = library(Target.HOST)
        try:
            for seed in (1, 2, 3):
                host.host_configure(schedule_seed=seed, num_threads=HOST_THREADS)
                again = run(backward_kernel, case, given)
                assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))
        finally:
            host.host_configure(num_threads=HOST_THREADS)
    else:
        for _ in range(200):
            again = run(backward_kernel, case, given)
            assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))
    if not case.p_dropout:  # whose mask counts batches
        single = case_for(backward_kernel, 130, 97, heads=2, causal=Causal.BOTTOM_RIGHT)
        alone = run(backward_kernel, single, type(given)(*(tensor[1:] for tensor in given)))
        assert all(torch.equal(one[1:], other) for one, other in zip(expected, alone, strict=True))


@pytest.mark.parametrize("needs", [needs for needs in product((False, True), repeat=3) if 0 < sum(needs) < 3])
def test_gradients_that_nobody_asks_for(
    backward_kernel: TestedKernel, needs: tuple[bool, bool, bool]
) -> None:
    case = case_for(backward_kernel, 70, 67, heads=2)
    given = operands(case, backward_kernel.dtype)
    expected = run(backward_kernel, case, given)
    launch = prepare(backward_kernel, case, given, needs)
    execute(backward_kernel, launch)
    for name, needed, grad, all_of in zip(("dq", "dk", "dv"), needs, launch.grads, expected, strict=True):
        grad.check_untouched(name)
        if needed:
            assert torch.equal(grad.tensor, all_of)
        else:
            assert grad.tensor.isnan().all()


def test_identities(backward_kernel: TestedKernel) -> None:
    """sum q dq = sum k dk and sum v dv = sum out dout, with nothing else to compare with."""
    case = case_for(backward_kernel, 150, 133, heads=2, causal=Causal.BOTTOM_RIGHT)
    given = operands(case, backward_kernel.dtype)
    launch = prepare(backward_kernel, case, given)
    execute(backward_kernel, launch)
    dq, dk, dv = (grad.tensor.double() for grad in launch.grads)
    q, k, v, dout, out = (tensor.double() for tensor in launch.inputs)
    scale = dq.norm() * q.norm()
    assert abs((q * dq).sum() - (k * dk).sum()) <= 1e-3 * scale
    assert abs((v * dv).sum() - (out * dout).sum()) <= 1e-3 * dv.norm() * v.norm()
