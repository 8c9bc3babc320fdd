"""The nine ways in which quantised attention has become NaN, wrapped or gone wrong unseen, each by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from benchmarks.quantised_data import errors_of_heads
from sdpa_cutlass.library.registry import Accuracy
from sdpa_cutlass.problem import Causal
from tests.kernels.general import Case, Lengths, run_case
from tests.kernels.general_numerics import expected
from tests.kernels.harness import TestedKernel
from tests.kernels.test_quantized_model import check_model, family_case


def filled(kernel: TestedKernel, seqlen_q: int, seqlen_k: int, q: float, k: float, v: float) -> Case:
    """One head of constants."""
    shape = (1, 1, seqlen_q, kernel.info.head_dim), (1, 1, seqlen_k, kernel.info.head_dim)
    tensors = (
        torch.full(shape[i], x, dtype=kernel.dtype, device=kernel.device) for i, x in ((0, q), (1, k), (1, v))
    )
    return Case(**dict(zip("qkv", tensors, strict=True)))


def worst_error(kernel: TestedKernel, case: Case) -> float:
    out, _ = run_case(kernel, case)
    return errors_of_heads(out, expected(case).out)[0].max().item()


def largest_value(kernel: TestedKernel) -> float:
    """Of V: with bytes, the largest finite number. Else sums of 4096 of them have to fit into float32, as in
    exact kernels, and rounded weights may exceed their sum by 2^-9."""
    largest = torch.finfo(kernel.dtype).max
    if kernel.info.accuracy is Accuracy.INT8:
        return largest
    return largest * (2.0**-13 if kernel.dtype is torch.bfloat16 else 0.5)


@pytest.mark.parametrize("seqlen_k", [511, 512, 513, 4096])
def test_trap_1_512_keys_of_the_largest_values(quantized_kernel: TestedKernel, seqlen_k: int) -> None:
    """Uniform attention to values of the largest finite size, both signs by halves: finite, and right."""
    largest = largest_value(quantized_kernel)
    for values in (largest, -largest):
        out, _ = run_case(quantized_kernel, filled(quantized_kernel, 33, seqlen_k, 0.0, 0.0, values))
        assert (out == values).all(), f"(b) {out.unique()[:4].tolist()} is not {values}"
    case = filled(quantized_kernel, 33, seqlen_k, 0.0, 0.0, largest)
    case.v[:, :, : seqlen_k // 2] = -largest
    out, _ = run_case(quantized_kernel, case)
    assert out.isfinite().all()
    want = largest * (seqlen_k - 2 * (seqlen_k // 2)) / seqlen_k
    torch.testing.assert_close(
        out.double(), torch.full_like(out.double(), want), rtol=5e-3, atol=largest * 1e-6
    )


@pytest.mark.parametrize("seed", range(3))
def test_trap_1_uneven_weights_of_the_largest_values(quantized_kernel: TestedKernel, seed: int) -> None:
    """Bytes of P are rounded and the sum of P is not: their quotient must not pass the largest number."""
    case = family_case(quantized_kernel, "normal", 1, 2, 2, 40, 150, seed=seed)
    largest = largest_value(quantized_kernel)
    for sign in (1, -1):
        case.v.fill_(sign * largest)
        out, _ = run_case(quantized_kernel, case)
        bad = int((~out.isfinite()).sum())
        assert bad == 0, f"(b) {bad} elements of {sign * largest} became infinite"


@pytest.mark.parametrize("sign", [1, -1])
def test_trap_1_everything_at_the_largest_values(quantized_kernel: TestedKernel, sign: int) -> None:
    """Also logits: those beyond the cap are compressed, and nothing becomes infinite or NaN."""
    largest = largest_value(quantized_kernel)
    case = filled(quantized_kernel, 5, 512, sign * largest, largest, largest)
    case.k[:, :, ::2] = -largest
    case.v[:, :, ::3] = -largest
    out, _ = run_case(quantized_kernel, case, with_lse=False)
    assert out.isfinite().all()


def test_trap_2_and_3_the_largest_weight_never_wraps(quantized_kernel: TestedKernel) -> None:
    """One key in 64 takes the weight, at every scale up to the cap and beyond: its byte is 252, not 256."""
    for scale in (1.0, 1e2, 1e4, 1e6):
        case = family_case(quantized_kernel, "normal", 1, 1, 1, 20, 200, seed=3)
        assert check_model(quantized_kernel, Case(q=case.q, k=case.k, v=case.v, scale=scale / 10)) <= 254
        case.q.zero_()
        case.q[..., 0] = 1
        case.k.mul_(0.01)
        case.k[:, :, 7::64, 0] = 8
        peaked = Case(q=case.q, k=case.k, v=case.v, scale=scale)
        assert worst_error(quantized_kernel, peaked) < 0.05


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_trap_4_rows_without_keys_in_a_block(quantized_kernel: TestedKernel, scale: float) -> None:
    """Blocks that a row sees nothing of, before and after those that it sees; and rows without keys."""
    case = family_case(quantized_kernel, "normal", 1, 2, 2, 200, 150)
    for options in ({"causal": Causal.BOTTOM_RIGHT}, {"window": (3, 2)}, {"causal": Causal.TOP_LEFT}):
        seen = Case(q=case.q, k=case.k, v=case.v, scale=scale / 8, **options)
        out, lse = run_case(quantized_kernel, seen)
        assert lse is not None
        assert out.isfinite().all()
        assert not lse.isnan().any()
        empty = expected(seen).lse == -math.inf
        assert torch.equal(lse == -math.inf, empty)
        assert (out[empty] == 0).all()


def test_trap_5_unseen_keys_weigh_nothing(quantized_kernel: TestedKernel) -> None:
    """Values behind the diagonal that would show, and keys that would win, change nothing but the scales."""
    case = family_case(quantized_kernel, "normal", 1, 1, 1, 64, 64)
    case.v[:, :, 32:] = 1000.0
    case.k[:, :, 32:] += case.q.mean()
    causal = Case(q=case.q, k=case.k, v=case.v, causal=Causal.TOP_LEFT)
    out, _ = run_case(quantized_kernel, causal)
    assert out[:, :, :32].abs().max() < 10


def test_trap_6_tokens_of_zeros(quantized_kernel: TestedKernel) -> None:
    """They neither divide by zero nor own their block's reference, which would erase all others."""
    case = family_case(quantized_kernel, "normal", 1, 2, 2, 40, 200)
    case.v.mul_(1e-3)
    case.v[:, :, ::2] = 0
    assert worst_error(quantized_kernel, case) < 0.03
    case.v[:, :, :64] = 0
    assert worst_error(quantized_kernel, case) < 0.03
    case.v.zero_()
    out, _ = run_case(quantized_kernel, case)
    assert (out == 0).all()


def test_trap_6_columns_of_zeros(quantized_kernel: TestedKernel) -> None:
    """They are exactly 0 next to others, over many blocks whose references rise and fall."""
    blocks = 80
    case = family_case(quantized_kernel, "normal", 1, 1, 1, 20, 64 * blocks - 13)
    token = torch.arange(case.seqlen_k, device=quantized_kernel.device) / 64
    case.q[..., 0] = 4
    case.k[..., 0] = 40 * torch.sin(token / 7) - token  # in 64 keys, up to 30 in log2 units
    case.v[:, :, ::129] *= 100
    zeros = [0, 5, 17, 18, 19, quantized_kernel.info.head_dim - 1]
    case.v[..., zeros] = 0
    seen = torch.ones(1, 1, 1, case.seqlen_k, device=quantized_kernel.device)
    seen[..., 7::11] = 0
    masks = (None, seen.bool(), seen) if quantized_kernel.info.mask_types else (None,)
    for mask in masks:
        out, _ = run_case(quantized_kernel, dataclasses.replace(case, mask=mask))
        others = [column for column in range(out.shape[-1]) if column not in zeros]
        assert (out[..., others] != 0).any(2).all()
        assert (out[..., zeros] == 0).all(), f"(b) {out[..., zeros].abs().max().item()} is not 0"


def test_trap_6_queries_and_keys_of_zeros(quantized_kernel: TestedKernel) -> None:
    """Uniform weights, among seen keys only."""
    case = family_case(quantized_kernel, "normal", 1, 2, 2, 70, 100)
    case.q[:, :, ::2] = 0
    check_model(quantized_kernel, Case(q=case.q, k=case.k, v=case.v, causal=Causal.BOTTOM_RIGHT))
    case.k[:, :, :] = case.k[:, :, :1]
    assert worst_error(quantized_kernel, Case(q=case.q, k=case.k, v=case.v, causal=Causal.TOP_LEFT)) < 0.02


@pytest.mark.parametrize("power", [-100, -103, -120])
def test_trap_7_numbers_whose_inverse_overflows(quantized_kernel: TestedKernel, power: int) -> None:
    """Tiny numbers of bfloat16 count as zeros below 2^-100; results are finite and no larger than v."""
    case = family_case(quantized_kernel, "normal", 1, 1, 1, 20, 100)
    for name in ("q", "k", "v"):
        tiny = {x: getattr(case, x).clone() for x in ("q", "k", "v")}
        tiny[name] *= 2.0 ** (power if quantized_kernel.dtype is torch.bfloat16 else -20)
        changed = Case(**tiny)
        out, lse = run_case(quantized_kernel, changed)
        assert lse is not None
        assert out.isfinite().all()
        assert lse.isfinite().all()
        assert out.abs().max() <= changed.v.abs().max() * 1.01


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_trap_8_what_is_not_finite_is_never_hidden(quantized_kernel: TestedKernel, value: float) -> None:
    """In a row of Q: that row, and no other. In a key or a value: at least every row that sees it."""
    case = family_case(quantized_kernel, "normal", 1, 1, 1, 40, 200)
    q = case.q.clone()
    q[0, 0, 17, 3] = value
    out, lse = run_case(quantized_kernel, Case(q=q, k=case.k, v=case.v))
    assert lse is not None
    assert out[0, 0, 17].isnan().all()
    assert lse[0, 0, 17].isnan()
    assert out[0, 0, :17].isfinite().all()
    assert out[0, 0, 18:].isfinite().all()
    for key in (0, 5, 130, 199):  # 0 and 199 are sampled for the mean
        k = case.k.clone()
        k[0, 0, key, 3] = value
        out, _ = run_case(quantized_kernel, Case(q=case.q, k=k, v=case.v))
        assert out.isnan().all(), f"(b) key {key}"
        v = case.v.clone()
        v[0, 0, key, 3] = value
        out, _ = run_case(quantized_kernel, Case(q=case.q, k=case.k, v=v))
        columns = slice(None) if quantized_kernel.info.accuracy is Accuracy.INT8 else 3
        assert not out[0, 0, :, columns].isfinite().any(), f"(b) value {key}"


def test_trap_8_what_lies_beyond_a_length_is_never_read(quantized_kernel: TestedKernel) -> None:
    case = family_case(quantized_kernel, "normal", 2, 1, 1, 30, 200)
    clean, _ = run_case(
        quantized_kernel, Case(q=case.q, k=case.k, v=case.v, lengths_k=Lengths(seqlens=(100, 65)))
    )
    for b, length in enumerate((100, 65)):
        case.k[b, :, length:] = math.nan
        case.v[b, :, length:] = math.inf
    out, _ = run_case(
        quantized_kernel, Case(q=case.q, k=case.k, v=case.v, lengths_k=Lengths(seqlens=(100, 65)))
    )
    assert torch.equal(out, clean)


def test_trap_9_no_byte_is_minus_128(quantized_kernel: TestedKernel) -> None:
    """Numbers whose negative end is the largest: the sums stay within what a float next to kMagic holds."""
    case = filled(quantized_kernel, 20, 130, -3.0, 0.0, -7.0)
    case.k[:, :, ::2] = -5.0
    case.k[:, :, 1::2] = 5.0
    out, _ = run_case(quantized_kernel, case)
    torch.testing.assert_close(out, torch.full_like(out, -7.0), rtol=2e-3, atol=0)
