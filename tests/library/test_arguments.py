"""Every refusal of the public functions: its type, and that it names argument, value and what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sdpa_cutlass
from sdpa_cutlass import attention, scaled_dot_product_attention
from sdpa_cutlass.device import DeviceInfo, archs_serve, check_can_serve


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


Q, K = half(2, 4, 8, 64), half(2, 4, 10, 64)

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "not a tensor": (lambda: attention([1], K, K), TypeError, r"query is a list; allowed is a torch\.Tensor"),
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
    "value's head_dim": (
        lambda: attention(Q, K, half(2, 4, 10, 32)),
        NotImplementedError,
        "value has head_dim 32",
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
        lambda: attention(half(1, 1, 4, 72), half(1, 1, 4, 72), half(1, 1, 4, 72)),
        NotImplementedError,
        r"no fmha_fwd kernel can run .*head_dim=72(.|\n)*serve head_dim 32, 64, 80, 96, 128",
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
    "attn_mask": (
        lambda: scaled_dot_product_attention(Q, K, K, attn_mask=torch.ones(8, 10, dtype=torch.bool)),
        NotImplementedError,
        "attn_mask is not supported yet.* planned for",
    ),
    "dropout": (
        lambda: scaled_dot_product_attention(Q, K, K, dropout_p=0.1),
        NotImplementedError,
        "dropout_p=0.1 is not supported yet.* planned for",
    ),
    "dropout above 1": (
        lambda: scaled_dot_product_attention(Q, K, K, dropout_p=1.5),
        ValueError,
        "dropout_p=1.5",
    ),
    "grad": (
        lambda: attention(Q, K.clone().requires_grad_(), K),
        NotImplementedError,
        r"key requires grad.*torch\.no_grad\(\)",
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


@pytest.mark.parametrize("case", ["grad", "out overlaps", "out's address"])
def test_refused_as_well_when_the_signature_is_known(case: str) -> None:
    attention(Q, K, K)
    attention(Q, K, K, out=torch.empty_like(Q))
    test_refused(case)


def test_a_kernel_that_does_not_fit_says_why() -> None:
    other = next(row for row in sdpa_cutlass.kernels() if row.head_dim == 32 and row.name.startswith("fmha"))
    with pytest.raises(sdpa_cutlass.NoKernelError, match="head_dim is 32, not 64"):
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
    monkeypatch.setattr("sdpa_cutlass.device.driver_version", lambda: driver)
    target = sdpa_cutlass.api.Target.CUDA
    build = sdpa_cutlass._c_api.BuildInfo(
        version="", target=target, digest="", space="", archs="89", sanitizers="",
        cuda_runtime_version=13000, cutlass_version=420,
    )  # fmt: skip
    device = DeviceInfo(
        target=target, index=0, name="a GPU", compute_capability=capability, sms=1, mma_flops_per_clock=1
    )
    with pytest.raises(sdpa_cutlass.DriverError, match=message):
        check_can_serve(build, device)
