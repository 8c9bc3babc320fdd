"""Every refusal of the public functions: its type, and that it names argument, value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass import attention, scaled_dot_product_attention, unfused_attention
from sdpa_cutlass.library.device import DeviceInfo, archs_serve, check_can_serve
from sdpa_cutlass.library.locate import Target


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


Q, K, OVER = half(2, 4, 8, 64), half(2, 4, 10, 64), half(2, 4, 8, 64)
MASK, LENGTHS = torch.ones(8, 10, dtype=torch.bool), torch.ones(2, dtype=torch.int32)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a tensor": (lambda: attention([1], K, K), TypeError, r"query is a list; allowed is a torch\.Tensor"),
    "an endless scale": (
        lambda: attention(Q, K, K, scale=10**400),
        ValueError,
        "scale=10+; allowed is",
    ),
    "an endless probability": (
        lambda: attention(Q, K, K, p_dropout=10**400),
        ValueError,
        "p_dropout=10+; all",
    ),
    "an array of probabilities": (
        lambda: attention(Q, K, K, p_dropout=numpy.array([0.1, 0.2])),
        TypeError,
        r"p_dropout=array\(\[0\.1, 0\.2\]\) is a ndarray; allowed is a float",
    ),
    "a tensor of probabilities": (
        lambda: scaled_dot_product_attention(Q, K, K, dropout_p=torch.tensor([0.1, 0.2])),
        TypeError,
        "dropout_p=tensor.* is a Tensor; allowed is a float",
    ),
    "an array of flags": (
        lambda: attention(Q, K, K, return_lse=numpy.array([True, False])),
        TypeError,
        "return_lse=array.* allowed is a bool",
    ),
    "an array that says what to return": (
        lambda: attention(Q, K, K, return_philox=numpy.array([True, False])),
        TypeError,
        "return_philox=array.* allowed is a bool",
    ),
    "an array of layouts": (
        lambda: attention(Q, K, K, layout=numpy.array(["bhsd", "bshd"])),
        ValueError,
        "layout=array.*; allowed are 'bhsd'",
    ),
    "an array that says whether heads are grouped": (
        lambda: attention(Q, K, K, enable_gqa=numpy.array([True, False])),
        TypeError,
        "enable_gqa=array.* allowed is a bool",
    ),
    "key is None": (lambda: attention(Q, None, K), TypeError, r"key is a NoneType"),
    "float32": (
        lambda: attention(Q.float(), K, K),
        TypeError,
        r"query has dtype torch\.float32; allowed are torch\.f",
    ),
    "mixed dtypes": (
        lambda: attention(Q, K.bfloat16(), K),
        TypeError,
        r"key has dtype torch\.bfloat16; query has",
    ),
    "meta device": (
        lambda: attention(Q.to("meta"), K, K),
        TypeError,
        "query is on meta; allowed are CPU and CUDA",
    ),
    "mixed devices": (lambda: attention(Q, K, K.to("meta")), TypeError, "value is on meta"),
    "sparse": (lambda: attention(Q.to_sparse(), K, K), TypeError, r"layout torch\.sparse_coo"),
    "rank 1": (lambda: attention(half(64), K, K), ValueError, r"query has shape \(64,\); allowed are"),
    "head_dim": (
        lambda: attention(Q, half(2, 4, 10, 32), K),
        ValueError,
        "key has head_dim 32 .* query has 64",
    ),
    "seqlen": (lambda: attention(Q, K, half(2, 4, 11, 64)), ValueError, "value has seqlen 11 .* key has 10"),
    "batch": (
        lambda: attention(Q, half(3, 4, 10, 64), half(3, 4, 10, 64)),
        ValueError,
        "neither agree nor broadc",
    ),
    "heads": (
        lambda: attention(Q, half(2, 3, 10, 64), half(2, 3, 10, 64)),
        ValueError,
        "3 heads .* a divisor of 4",
    ),
    "heads without enable_gqa": (
        lambda: scaled_dot_product_attention(Q, half(2, 2, 10, 64), half(2, 2, 10, 64)),
        ValueError,
        "2 heads .* enable_gqa=True",
    ),
    "key and value heads": (
        lambda: attention(Q, K, half(2, 2, 10, 64)),
        ValueError,
        "key has 4 heads .* value has 2",
    ),
    "unbuilt head_dim": (
        lambda: attention(half(1, 1, 4, 264), half(1, 1, 4, 264), half(1, 1, 4, 264)),
        NotImplementedError,
        r"no fmha_fwd kernel can run .*head_dim=264(.|\n)*32, 64, 80, 96, 128.*, and up to \d+ with general",
    ),
    "unbuilt head_dim of value": (
        lambda: attention(Q, K, half(2, 4, 10, 264)),
        NotImplementedError,
        "no fmha_fwd kernel can run .*head_dim=64/264",
    ),
    "head_dim without a baseline": (
        lambda: unfused_attention(half(1, 1, 4, 72), half(1, 1, 4, 72), half(1, 1, 4, 72)),
        NotImplementedError,
        "no unfused kernel can run .*head_dim=72",
    ),
    "causal": (
        lambda: attention(Q, K, K, causal="left"),
        ValueError,
        "causal='left'; allowed is None, 'top_left' or",
    ),
    "causal=True": (lambda: attention(Q, K, K, causal=True), ValueError, "causal=True; allowed is"),
    "infinite scale": (
        lambda: attention(Q, K, K, scale=float("inf")),
        ValueError,
        "scale=inf; allowed is any finite",
    ),
    "NaN scale": (lambda: attention(Q, K, K, scale=float("nan")), ValueError, "scale=nan"),
    "scale of another type": (lambda: attention(Q, K, K, scale="1"), TypeError, "scale='1' is a str"),
    "attn_mask and is_causal": (
        lambda: scaled_dot_product_attention(Q, K, K, MASK, is_causal=True),
        ValueError,
        "Explicit attn_mask should not be set when is_causal=True",
    ),
    "mask of another type": (lambda: attention(Q, K, K, attn_mask="m"), TypeError, "attn_mask is a str; all"),
    "integer mask": (
        lambda: attention(Q, K, K, attn_mask=MASK.int()),
        TypeError,
        r"attn_mask has dtype torch\.int32; allowed are torch\.bool .* torch\.float32",
    ),
    "float64 mask": (
        lambda: attention(Q, K, K, attn_mask=MASK.double()),
        TypeError,
        "torch.float64; allowed",
    ),
    "mask's device": (
        lambda: attention(Q, K, K, attn_mask=MASK.to("meta")),
        TypeError,
        "attn_mask is on meta; query is on cpu",
    ),
    "sparse mask": (
        lambda: attention(Q, K, K, attn_mask=MASK.to_sparse()),
        TypeError,
        r"attn_mask has layout torch\.sparse_coo",
    ),
    "mask's rows": (
        lambda: attention(Q, K, K, attn_mask=MASK[:7]),
        ValueError,
        r"attn_mask has shape \(7, 10\); allowed is any shape that broadcasts to \(2, 4, 8, 10\)",
    ),
    "mask's heads": (
        lambda: attention(Q, K, K, attn_mask=MASK.expand(3, 8, 10)),
        ValueError,
        r"attn_mask has shape \(3, 8, 10\)",
    ),
    "mask that broadcasts the inputs": (
        lambda: attention(Q[:1], K[:1], K[:1], attn_mask=MASK.expand(2, 1, 8, 10)),
        ValueError,
        r"broadcasts to \(1, 4, 8, 10\)",
    ),
    "mask of too high a rank": (
        lambda: attention(Q[0], K[0], K[0], attn_mask=MASK.expand(1, 1, 4, 8, 10)),
        ValueError,
        r"broadcasts to \(4, 8, 10\)",
    ),
    "mask's grad in a plan": (
        lambda: sdpa_cutlass.plan(Q, K, K, attn_mask=MASK.float().requires_grad_()),
        NotImplementedError,
        r"attn_mask requires grad.*torch\.no_grad\(\)",
    ),
    "mask's grad with out": (
        lambda: attention(Q, K, K, out=torch.empty_like(Q), attn_mask=MASK.float().requires_grad_()),
        NotImplementedError,
        "out is given and an input requires grad",
    ),
    "dropout_p": (
        lambda: scaled_dot_product_attention(Q, K, K, dropout_p=1.5),
        ValueError,
        "dropout_p=1.5; ",
    ),
    "dropout_p's type": (
        lambda: scaled_dot_product_attention(Q, K, K, dropout_p="0"),
        TypeError,
        "dropout_p='0' is a str",
    ),
    "p_dropout": (lambda: attention(Q, K, K, p_dropout=-0.1), ValueError, "p_dropout=-0.1; allowed is a pro"),
    "p_dropout NaN": (lambda: attention(Q, K, K, p_dropout=float("nan")), ValueError, "p_dropout=nan"),
    "p_dropout None": (lambda: attention(Q, K, K, p_dropout=None), TypeError, "p_dropout=None is a NoneType"),
    "lengths' type": (
        lambda: attention(Q, K, K, seqlens_k=[1, 2]),
        TypeError,
        "seqlens_k is a list; allowed",
    ),
    "lengths' dtype": (
        lambda: attention(Q, K, K, seqlens_q=torch.ones(2, dtype=torch.int64)),
        TypeError,
        r"seqlens_q has dtype torch\.int64; allowed is torch\.int32",
    ),
    "lengths' device": (
        lambda: attention(Q, K, K, seqlens_k=LENGTHS.to("meta")),
        TypeError,
        "seqlens_k is on meta; query is on cpu",
    ),
    "lengths' shape": (
        lambda: attention(Q, K, K, seqlens_q=LENGTHS[:1]),
        ValueError,
        r"seqlens_q has shape \(1,\); allowed is \(2,\)",
    ),
    "lengths' stride": (
        lambda: attention(Q, K, K, seqlens_k=LENGTHS.repeat(2)[::2]),
        ValueError,
        "seqlens_k has stride 2; it must be contiguous",
    ),
    "grad of the baseline": (
        lambda: unfused_attention(Q, K.clone().requires_grad_(), K),
        NotImplementedError,
        "key or value requires grad, and the family unfused has no backward pass",
    ),
    "grad with out": (
        lambda: attention(Q, K.clone().requires_grad_(), K, out=torch.empty_like(Q)),
        NotImplementedError,
        "out is given and an input requires grad",
    ),
    "out's shape": (
        lambda: attention(Q, K, K, out=half(2, 4, 10, 64)),
        ValueError,
        r"out has shape \(2, 4, 10, 64\)",
    ),
    "out's dtype": (
        lambda: attention(Q, K, K, out=torch.empty_like(Q).float()),
        TypeError,
        r"out has dtype torch\.fl",
    ),
    "out's device": (
        lambda: attention(Q, K, K, out=Q.to("meta")),
        TypeError,
        "out is on meta; query is on cpu",
    ),
    "out's last stride": (
        lambda: attention(Q, K, K, out=half(2, 4, 64, 8).transpose(2, 3)),
        ValueError,
        "out has last stride 8; allowed is 1",
    ),
    "out's strides": (
        lambda: attention(Q, K, K, out=half(2, 4, 8, 67)[..., :64]),
        ValueError,
        "out has strides .* multiples of 8",
    ),
    "out's address": (
        lambda: attention(Q, K, K, out=half(2 * 4 * 8 * 64 + 1)[1:].view(2, 4, 8, 64)),
        ValueError,
        "out starts at address .* multiple of 16",
    ),
    "expanded out": (
        lambda: attention(Q, K, K, out=half(1, 4, 8, 64).expand(2, 4, 8, 64)),
        ValueError,
        "share their",
    ),
    "out overlaps the mask": (
        lambda: attention(Q, K, K, attn_mask=OVER[..., :10], out=OVER),
        ValueError,
        "out overlaps attn_mask in memory",
    ),
    "out overlaps": (lambda: attention(Q, K, K, out=Q), ValueError, "out overlaps query in memory"),
    "kernel": (
        lambda: attention(Q, K, K, kernel="fmha_fwd_none"),
        ValueError,
        "kernel='fmha_fwd_none' is not one of",
    ),
    "explain without work": (
        lambda: sdpa_cutlass.explain(Q, K[:, :, :0], K[:, :, :0]),
        ValueError,
        "runs no kernel",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert isinstance(caught.value, sdpa_cutlass.SdpaError)


@pytest.mark.parametrize("case", ["grad with out", "out overlaps", "out's address"])
def test_refused_as_well_when_the_signature_is_known(case: str) -> None:
    attention(Q, K, K)
    attention(Q, K, K, out=torch.empty_like(Q))
    test_refused(case)


def test_refused_as_well_when_the_signature_with_a_mask_is_known() -> None:
    bias = MASK.float()
    out, whole = torch.empty_like(Q), half(Q.numel() + 1)
    attention(Q, K, K, attn_mask=bias)
    attention(Q, K, K, attn_mask=bias, out=out)
    attention(Q, K, K, attn_mask=OVER[..., :10], out=out)
    with pytest.raises(NotImplementedError, match="out is given and an input requires grad"):
        attention(Q, K.clone().requires_grad_(), K, attn_mask=bias, out=out)
    with pytest.raises(NotImplementedError, match="out is given and an input requires grad"):
        attention(Q, K, K, attn_mask=bias.clone().requires_grad_(), out=out)
    assert attention(Q, K, K, attn_mask=bias.clone().requires_grad_()).requires_grad
    with pytest.raises(NotImplementedError, match="out requires grad"):
        attention(Q, K, K, attn_mask=bias, out=out.clone().requires_grad_())
    with pytest.raises(ValueError, match="out overlaps attn_mask"):
        attention(Q, K, K, attn_mask=OVER[..., :10], out=OVER)
    with pytest.raises(ValueError, match="out starts at address"):
        attention(Q, K, K, attn_mask=bias, out=whole[1:].view(Q.shape))
    with torch.no_grad():
        attention(Q, K, K, attn_mask=bias.clone().requires_grad_())


def test_a_kernel_that_does_not_fit_says_why() -> None:
    rows = sdpa_cutlass.kernels(Target.HOST)
    other = next(row for row in rows if row.head_dim == 32 and row.name.startswith("fmha"))
    with pytest.raises(sdpa_cutlass.NoKernelError, match=r"head_dim is (32, not 64|at most 32)"):
        attention(Q, K, K, kernel=other.name)


def test_grad_is_allowed_where_torch_records_none() -> None:
    with torch.no_grad():
        attention(Q, K.clone().requires_grad_(), K)


@pytest.mark.parametrize(
    ("archs", "capability", "serves"),
    [
        ("89", (8, 9), True),
        ("89", (9, 0), True),
        ("89", (8, 6), False),
        ("86-real", (8, 9), True),
        ("89-real", (9, 0), False),
        ("80-real;90-virtual", (12, 0), True),
        ("80-real;90-virtual", (8, 9), True),
        ("90a", (9, 0), True),
        ("90a", (10, 0), False),
        ("", (8, 9), False),
    ],
)
def test_which_gpus_a_build_serves(archs: str, capability: tuple[int, int], serves: bool) -> None:
    assert archs_serve(archs, capability) is serves


@pytest.mark.parametrize(
    ("driver", "capability", "message"),
    [
        (None, (8, 9), "no NVIDIA driver"),
        (12040, (8, 9), r"driver supports CUDA 12\.4; the library was built with CUDA 13.*580"),
        (13000, (7, 5), r"compute capability 7\.5; the library was built for '89'"),
    ],
)
def test_a_gpu_that_cannot_run_the_library_is_refused(
    monkeypatch: pytest.MonkeyPatch, driver: int | None, capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr("sdpa_cutlass.library.device.driver_version", lambda: driver)
    target = sdpa_cutlass.public.api.Target.CUDA
    build = sdpa_cutlass.library.abi.BuildInfo(
        version="", target=target, digest="", space="", archs="89", sanitizers="",
        cuda_runtime_version=13000, cutlass_version=420,
    )  # fmt: skip
    device = DeviceInfo(
        target=target, index=0, name="a GPU", compute_capability=capability, sms=1, mma_flops_per_clock=1
    )
    with pytest.raises(sdpa_cutlass.DriverError, match=message):
        check_can_serve(build, device)
