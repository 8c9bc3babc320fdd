"""`precision` of the public functions: what it asks for, that nothing quantises unasked, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sdpa_cutlass
from sdpa_cutlass import (
    Family,
    KernelInfo,
    NoKernelError,
    Precision,
    attention,
    attention_varlen,
    explain,
    kernels,
    plan,
)
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Asked
from tests.library.reference import rand
from tests.library.test_lengths import int32

PRECISIONS = tuple(Precision)


def inputs(device: str, rows: int = 70, keys: int = 130, head_dim: int = 64) -> list[torch.Tensor]:
    sizes = ((4, rows), (2, keys), (2, keys))
    return [rand(2, *size, head_dim, device=device, seed=seed) for seed, size in enumerate(sizes)]


def rows_of(device: str) -> tuple[KernelInfo, ...]:
    return kernels(Target.CUDA if device == "cuda" else Target.HOST)


def relative_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return ((out.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_precision_gets_kernels_of_its_accuracy_alone(device: str, precision: Precision) -> None:
    found = explain(*inputs(device), precision=precision)
    assert found.choice.kernel.accuracy is precision.accuracy
    assert {candidate.kernel.accuracy for candidate in found.candidates} == {precision.accuracy}
    assert f"it is    {precision.accuracy}, code for 89" in str(found)


@pytest.mark.parametrize("asked", [Family.FMHA_FWD, Family.UNFUSED])
def test_nothing_else_serves_quantised_rows(device: str, asked: Asked) -> None:
    quantised = {Accuracy.INT8, Accuracy.INT8_QK}
    rows = [row for row in rows_of(device) if row.accuracy in quantised]
    assert rows
    assert not any(row.serves(asked) for row in rows)
    assert all(
        row.serves(precision) == (row.accuracy is precision.accuracy)
        for row in rows
        for precision in Precision
    )


@pytest.mark.parametrize("precision", [*PRECISIONS, "int8", "int8_qk"])
def test_errors_are_small_and_not_zero(device: str, precision: Precision | str) -> None:
    tensors = inputs(device)
    exact, exact_lse = attention(*tensors, return_lse=True)
    out, lse = attention(*tensors, return_lse=True, precision=precision)
    assert 1e-3 < relative_error(out, exact) < 2e-2
    assert (lse - exact_lse).abs().max() < 0.05


@pytest.mark.parametrize("precision", [None, "exact"])
def test_exact_is_the_default(device: str, precision: str | None) -> None:
    tensors = inputs(device)
    assert torch.equal(attention(*tensors, precision=precision), attention(*tensors))


@pytest.mark.usefixtures("_call_path")
def test_known_signatures_tell_precisions_apart(device: str) -> None:
    """Three calls that differ in nothing else, each twice: the second one is the known one."""
    tensors = inputs(device)
    first = [attention(*tensors, precision=precision) for precision in (None, *PRECISIONS)]
    again = [attention(*tensors, precision=precision) for precision in (None, *PRECISIONS)]
    assert all(map(torch.equal, first, again))
    assert not any(torch.equal(first[i], first[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_plans_give_the_same_bits(device: str, precision: Precision) -> None:
    q, k, v = inputs(device)
    made = plan(q, k, v, causal="bottom_right", return_lse=True, precision=precision)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:3], device=device)
    made.run(q, k, v, out, lse)
    want, want_lse = attention(q, k, v, causal="bottom_right", return_lse=True, precision=precision)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_sequences(device: str, precision: Precision) -> None:
    starts, bounds = (0, 40, 41, 130), (90, 90)
    q, k, v = (rand(130, heads, 64, device=device, seed=i) for i, heads in enumerate((4, 2, 2)))
    cu_seqlens = int32(starts, device)
    out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, *bounds, causal="top_left", precision=precision)
    again = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, *bounds, causal="top_left", precision=precision)
    exact = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, *bounds, causal="top_left")
    assert torch.equal(out, again)
    assert 1e-3 < relative_error(out, exact) < 3e-2


@pytest.mark.parametrize("precision", ["int8", "int8_qk"])
def test_operators(device: str, precision: str) -> None:
    from sdpa_cutlass.integrations import torch_ops  # noqa: F401  registers them

    tensors = inputs(device)
    out, _ = torch.ops.sdpa_cutlass.attention_forward(*tensors, causal="top_left", precision=precision)
    assert torch.equal(out, attention(*tensors, causal="top_left", precision=precision))


@pytest.mark.parametrize("precision", [None, "int8"])
def test_traced_calls_keep_the_precision(device: str, precision: str | None) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors = inputs(device)
    traced = make_fx(lambda q, k, v: attention(q, k, v, precision=precision))(*tensors)
    assert torch.equal(traced(*tensors), attention(*tensors, precision=precision))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"precision": "fp8"}, ArgumentError, ("precision='fp8'", "'exact', 'int8_qk', 'int8'")),
        ({"precision": 8}, ArgumentTypeError, ("precision=8", "int", "allowed are None")),
        ({"precision": "int8", "p_dropout": 0.5}, NoKernelError, ("applies no dropout",)),
        (
            {"precision": "int8", "kernel": "fmha_fwd_sm89_d64_m64n64_s1_w4_f16"},
            ArgumentError,
            ("int8 kernels",),
        ),
    ],
    ids=["word", "type", "dropout", "kernel"],
)
def test_refused(
    device: str, options: dict[str, Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        attention(*inputs(device), **options)
    assert all(word in str(caught.value) for word in words), caught.value


def masks(device: str) -> dict[str, torch.Tensor]:
    """One of each kind, with different shapes; every row sees a key."""
    bias = rand(2, 1, 70, 130, device=device, seed=7)
    return {
        "bool": bias.float() > -0.5,
        "bias16": bias[:1],
        "bfloat16": bias[0, 0].bfloat16(),
        "bias32": 3 * bias.float().expand(2, 4, 70, 130),
    }


@pytest.mark.usefixtures("_call_path")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", masks("cpu"))
def test_masks(device: str, kind: str, precision: Precision) -> None:
    """In `attention`, in a second call of the same signature, in `explain`, `plan` and the operator."""
    from sdpa_cutlass.integrations import torch_ops  # noqa: F401  registers them

    tensors, mask = inputs(device), masks(device)[kind]
    options: dict[str, Any] = {"attn_mask": mask, "causal": "bottom_right"}
    exact, exact_lse = attention(*tensors, **options, return_lse=True)
    options["precision"] = precision
    out, lse = attention(*tensors, **options, return_lse=True)
    assert 1e-3 < relative_error(out, exact) < 2e-2
    assert (lse - exact_lse).abs().max() < 0.05
    assert torch.equal(attention(*tensors, **options), out)
    assert torch.equal(attention(*tensors, **options), out)
    assert explain(*tensors, **options).choice.kernel.accuracy is precision.accuracy
    planned = torch.empty_like(out)
    plan(*tensors, **options).run(*tensors, planned)
    assert torch.equal(planned, out)
    operator = torch.ops.sdpa_cutlass.attention_forward
    assert torch.equal(operator(*tensors, **options | {"precision": precision.value})[0], out)


def test_large_head_dims_are_refused_by_name(device: str) -> None:
    with pytest.raises(NoKernelError, match="head_dim is at most 128"):
        attention(*inputs(device, head_dim=136), precision="int8_qk")


def test_no_precision_of_another_family(device: str) -> None:
    with pytest.raises(ArgumentError, match="goes with family='fmha_fwd'"):
        plan(*inputs(device), family=Family.UNFUSED, precision="int8")


def test_calls_without_torchs_allocator_are_refused(device: str) -> None:
    q, k, v = inputs(device)
    lse = torch.empty(q.shape[:3], device=device)
    with pytest.raises(UnsupportedError, match="precision='int8' needs torch installed"):
        attention(q, k, v, out=torch.empty_like(q), softmax_lse=lse, precision="int8")


@pytest.mark.usefixtures("_torch_is_left_as_found")
def test_enable_quantises_what_it_was_asked_to(device: str) -> None:
    """Long calls without dropout, counted apart; all others are exact."""
    q, k, v = inputs(device)
    exact = attention(q, k, v)
    with sdpa_cutlass.enabled(devices=[device], precision="int8", min_seqlen=130) as usage:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        assert (usage.served, usage.quantised) == (1, 1)
        shorter = F.scaled_dot_product_attention(q, k[:, :, :129], v[:, :, :129], enable_gqa=True)
        F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, enable_gqa=True)
        assert (usage.served, usage.quantised) == (3, 1)
    assert torch.equal(out, attention(q, k, v, precision="int8"))
    assert torch.equal(shorter, attention(q, k[:, :, :129], v[:, :, :129]))
    with sdpa_cutlass.enabled(devices=[device]) as usage:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, enable_gqa=True), exact)
        assert usage.quantised == 0


@pytest.mark.usefixtures("_torch_is_left_as_found")
def test_enable_quantises_calls_with_masks(device: str) -> None:
    """Whatever the mask is that torch takes. What torch refuses, torch refuses."""
    q, k, v = inputs(device)
    given = {name: mask for name, mask in masks(device).items() if name != "bfloat16"}
    with sdpa_cutlass.enabled(devices=[device], precision="int8", min_seqlen=130) as usage:
        for count, mask in enumerate(given.values(), 1):
            out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
            assert torch.equal(out, attention(q, k, v, attn_mask=mask, precision="int8"))
            assert (usage.served, usage.quantised) == (count, count)
        for bias, causal in (
            (causal_upper_left(70, 130), "top_left"),
            (causal_lower_right(70, 130), "bottom_right"),
        ):
            out = F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
            assert torch.equal(out, attention(q, k, v, causal=causal, precision="int8"))
        served = (usage.served, usage.quantised)
        assert served == (len(given) + 2, len(given) + 2)
        with pytest.raises(RuntimeError, match="size"):
            F.scaled_dot_product_attention(q[:, :2], k, v, given["bool"][..., :100])
        assert (usage.served, usage.quantised) == served


@pytest.mark.usefixtures("_torch_is_left_as_found")
@pytest.mark.parametrize("has_bias", [False, True])
def test_what_requires_grad_stays_exact(device: str, has_bias: bool) -> None:
    """Quantised kernels have no backward pass: `attention` refuses such calls, and `enable` computes them."""
    tensors = inputs(device)
    if has_bias:
        tensors.append(3 * rand(2, 1, 70, 130, device=device, seed=7).float())
    found = []
    for precision in (None, "int8"):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        with sdpa_cutlass.enabled(devices=[device], precision=precision, min_seqlen=130) as usage:
            out = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
        assert (usage.served, usage.quantised) == (1, 0)
        out.float().pow(2).sum().backward()
        found.append([out, *(leaf.grad for leaf in leaves)])
    assert all(map(torch.equal, *found))
    with pytest.raises(UnsupportedError, match="int8 has no backward pass"):
        attention(*leaves[:3], attn_mask=leaves[3] if has_bias else None, precision="int8")


@pytest.mark.usefixtures("_torch_is_left_as_found")
@pytest.mark.parametrize("options", [{"precision": "fp8"}, {"precision": "int8", "min_seqlen": -1}], ids=str)
def test_enable_refuses(device: str, options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        sdpa_cutlass.enable(devices=[device], **options)


def test_quantising_has_a_price(device: str) -> None:
    """The model: longer problems take longer, fewer key heads have a shorter pass, masks add theirs."""
    row = next(
        row
        for row in rows_of(device)
        if row.accuracy is Accuracy.INT8 and row.head_dim == 64 and row.mask_types
    )
    from sdpa_cutlass.choice.cost import estimate
    from sdpa_cutlass.library.device import HOST
    from sdpa_cutlass.problem import DType, MaskType, Problem

    def microseconds(seqlen: int, heads_kv: int = 8, mask: MaskType | None = None) -> float:
        sizes = {"seqlen_q": seqlen, "seqlen_k": seqlen, "num_heads_q": 8, "num_heads_kv": heads_kv}
        problem = Problem(dtype=DType.F16, batch=4, head_dim=64, head_dim_v=64, mask=mask, **sizes)
        return estimate(row, problem, HOST).microseconds

    times = [microseconds(seqlen) for seqlen in (512, 1024, 4096)]
    assert times == sorted(times)
    assert microseconds(1024, heads_kv=2) < microseconds(1024)
    assert microseconds(1024) < microseconds(1024, mask=MaskType.BOOL) < microseconds(1024, mask=MaskType.F16)
    assert all(map(math.isfinite, times))
