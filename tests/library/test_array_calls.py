"""attention(..., out=array) without torch: what it computes, and how long it keeps memory.

torch is installed where these tests run; calls take the way without it when they are told that it is not
there, or when softmax_lse is given. One test runs in a process in which torch cannot be imported.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from sdpa_cutlass import attention, kernels
from sdpa_cutlass.call.launch import make_params
from sdpa_cutlass.choice import select
from sdpa_cutlass.errors import ArgumentError, ArgumentTypeError
from sdpa_cutlass.library import abi
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family
from sdpa_cutlass.problem import DType, Problem
from tests.library.array_kinds import (
    ALL_KINDS,
    DLPackOnly,
    Edited,
    without_torch,
)
from tests.library.reference import expect_close, rand, torchs_attention

Q, K = rand(2, 4, 9, 64), rand(2, 2, 11, 64, seed=1)


def array(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


def test_in_a_process_without_torch() -> None:
    code = """
    import sys
    sys.modules["torch"] = None  # importing it fails
    import numpy as np
    import sdpa_cutlass

    def refused(error, function, *arrays, **options):
        try:
            function(*arrays, **options)
        except error as found:
            assert isinstance(found, sdpa_cutlass.SdpaError)
            return str(found)
        raise AssertionError(function)

    draw = np.random.default_rng(0).standard_normal
    q, k, v = (draw((2, 3, rows, 64)).astype(np.float16) for rows in (5, 9, 9))
    out, lse = np.full_like(q, np.nan), np.empty(q.shape[:3], np.float32)
    found = sdpa_cutlass.attention(q, k, v, out=out, return_lse=True, softmax_lse=lse)
    assert found[0] is out and found[1] is lse
    scores = q.astype(float) @ k.astype(float).swapaxes(2, 3) / 8
    weights = np.exp(scores)
    sums = weights.sum(-1, keepdims=True)
    assert np.abs(out - weights / sums @ v.astype(float)).max() < 2e-3
    assert np.abs(lse - np.log(sums[..., 0])).max() < 1e-4

    assert "out is missing" in refused(ValueError, sdpa_cutlass.attention, q, k, v)
    assert "out is missing" in refused(ValueError, sdpa_cutlass.scaled_dot_product_attention, q, k, v)
    assert "softmax_lse is missing" in refused(
        ValueError, sdpa_cutlass.attention, q, k, v, out=out, return_lse=True
    )
    for function in (sdpa_cutlass.plan, sdpa_cutlass.unfused_attention, sdpa_cutlass.explain):
        options = {} if function is sdpa_cutlass.explain else {"out": out}
        assert "torch installed" in refused(NotImplementedError, function, q, k, v, **options)
    print("torch" in [name for name, module in sys.modules.items() if module])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


@without_torch
@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "scale": 0.25},
        {"attn_mask": torch.rand(9, 11, generator=torch.Generator().manual_seed(1)) < 0.7},
        {"attn_mask": rand(2, 1, 9, 11, dtype=torch.float32), "causal": "top_left"},
        {
            "seqlens_q": torch.tensor([9, 4], dtype=torch.int32),
            "seqlens_k": torch.tensor([3, 11], dtype=torch.int32),
        },
        {"p_dropout": 0.5, "philox": (3, 4)},
        {"kernel": "fmha_fwd_sm89_d64_m64n64_s1_w4_f16"},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
def test_the_bits_are_those_with_torch(kind: str, options: dict[str, Any]) -> None:
    make = ALL_KINDS[kind]
    expected, expected_lse = attention(Q, K, K, return_lse=True, **options)
    given = {
        name: make(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    out, lse = torch.full_like(Q, torch.nan), torch.full(Q.shape[:3], torch.nan)
    array, lse_array = make(out), make(lse)
    assert attention(make(Q), make(K), make(K), out=array, softmax_lse=lse_array, **given) is array
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    out.fill_(torch.nan)
    assert attention(make(Q), make(K), make(K), out=array, **given) is array
    assert torch.equal(out, expected)


@without_torch
@pytest.mark.parametrize(
    ("q_shape", "k_shape"),
    [
        ((9, 64), (11, 64)),
        ((4, 9, 64), (2, 11, 64)),
        ((2, 3, 4, 9, 64), (2, 3, 2, 11, 64)),
        ((3, 4, 9, 64), (2, 11, 64)),
    ],
    ids=str,
)
def test_ranks(q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
    q, k = rand(*q_shape), rand(*k_shape, seed=1)
    expected, expected_lse = attention(q, k, k, return_lse=True)
    out, lse = np.full(q_shape, np.nan, np.float16), np.full(q_shape[:-1], np.nan, np.float32)
    attention(q.numpy(), k.numpy(), k.numpy(), out=out, softmax_lse=lse)
    assert np.array_equal(out, expected.numpy())
    assert np.array_equal(lse, expected_lse.numpy())


@without_torch
def test_layouts_and_strides() -> None:
    expected = attention(Q, K, K)
    q, k = (np.ascontiguousarray(tensor.transpose(1, 2).numpy()) for tensor in (Q, K))
    out = np.full_like(q, np.nan)
    attention(q, k, k, out=out, layout="bshd")
    assert np.array_equal(out.transpose(0, 2, 1, 3), expected.numpy())
    out[:] = np.nan
    attention(*(array.transpose(0, 2, 1, 3) for array in (q, k, k)), out=out.transpose(0, 2, 1, 3))
    assert np.array_equal(out.transpose(0, 2, 1, 3), expected.numpy())
    wide, wide_out = (np.full((2, 4, 9, 192), np.nan, np.float16) for _ in range(2))
    wide[..., 64:128] = Q.numpy()
    attention(wide[..., 64:128], K.numpy(), K.numpy(), out=wide_out[..., 128:])
    assert np.array_equal(wide_out[..., 128:], expected.numpy())
    assert np.isnan(wide_out[..., :128]).all()


@without_torch
def test_read_only_and_expanded_inputs() -> None:
    k = np.broadcast_to(K.numpy()[:1], (2, 2, 11, 64))  # read-only, stride 0
    out = np.empty(Q.shape, np.float16)
    attention(Q.numpy(), k, k, out=out)
    assert np.array_equal(out, attention(Q, K[:1], K[:1]).numpy())


@without_torch
def test_bfloat16() -> None:
    q, k = Q.bfloat16(), K.bfloat16()
    expected = attention(q, k, k)
    out = torch.full_like(q, torch.nan)
    attention(*map(DLPackOnly, (q, k, k)), out=DLPackOnly(out))
    assert torch.equal(out, expected)

    class MlDtypes:  # as NumPy shows an array of ml_dtypes.bfloat16
        dtype = "bfloat16"

        def __init__(self, tensor: torch.Tensor) -> None:
            self.array = tensor.view(torch.int16).numpy()
            self.__array_interface__ = {**self.array.__array_interface__, "typestr": "<V2"}

    out.fill_(torch.nan)
    attention(*map(MlDtypes, (q, k, k)), out=MlDtypes(out))
    assert torch.equal(out, expected)


@without_torch
def test_capsules_with_an_offset_and_without_strides() -> None:
    q = Q.numpy()
    given = Edited(q, data=q.ctypes.data - 4096, byte_offset=4096, strides=None)
    out = array(*Q.shape)
    attention(given, K.numpy(), K.numpy(), out=out)
    assert np.array_equal(out, attention(Q, K, K).numpy())


def test_tensors_are_taken_in_place_where_softmax_lse_is_given() -> None:
    expected, expected_lse = attention(Q, K, K, return_lse=True)
    out, lse = torch.empty_like(Q), torch.empty(Q.shape[:3])
    found = attention(Q, K, K.numpy(), out=out, softmax_lse=lse, return_lse=True)
    assert found[0] is out
    assert found[1] is lse
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    with pytest.raises(ArgumentError, match="out is missing: nothing is allocated without torch, nor with"):
        attention(Q, K, K, softmax_lse=lse)
    with pytest.raises(ArgumentTypeError, match=r"query is a Tensor of dtype torch\.float16, which"):
        attention(Q.clone().requires_grad_(), K, K, out=out, softmax_lse=lse)


@without_torch
@pytest.mark.parametrize("shape", [(0, 4, 9, 64), (2, 0, 9, 64), (2, 4, 0, 64)], ids=str)
def test_nothing_to_write(shape: tuple[int, ...]) -> None:
    k = np.empty((shape[0], shape[1], 11, 64), np.float16)
    out, lse = np.empty(shape, np.float16), np.empty(shape[:3], np.float32)
    assert attention(np.empty_like(out), k, k, out=out, softmax_lse=lse) is out


class Temporary:
    """Makes the array that it shares when it is asked to, and remembers whether it is still there."""

    def __init__(self, numbers: np.ndarray, max_version: tuple[int, int] | None) -> None:
        self.numbers, self.max_version = numbers, max_version

    def __dlpack__(self, **_: Any) -> Any:
        made = self.numbers.copy()
        self.made = weakref.ref(made)
        return made.__dlpack__(max_version=self.max_version)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@without_torch
@pytest.mark.parametrize("max_version", [None, (1, 0)], ids=str)
def test_memory_is_kept_until_the_call_returns(
    monkeypatch: pytest.MonkeyPatch, max_version: tuple[int, int] | None
) -> None:
    arrays = [Temporary(tensor.numpy(), max_version) for tensor in (Q, K, K)]
    library = abi.library(Target.HOST)
    launch = library.launch_function
    seen: list[bool] = []

    def observed(*arguments: Any) -> int:
        seen.extend(array.made() is not None for array in arrays)
        return launch(*arguments)

    monkeypatch.setattr(library, "launch_function", observed)
    out = array(*Q.shape)
    attention(*arrays, out=out)
    assert seen == [True] * 3
    assert [array.made() for array in arrays] == [None] * 3
    assert np.array_equal(out, attention(Q, K, K).numpy())


@without_torch
@pytest.mark.parametrize("way", ["chosen", "named", "forced"])
def test_no_kernel_needs_a_workspace(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query against many keys: with torch, several CTAs share the keys of a tile."""
    q, k = rand(1, 2, 1, 64), rand(1, 1, 2048, 64, seed=1)
    split = next(
        row.name
        for row in kernels(Target.HOST)
        if row.is_split and row.serves(Family.FMHA_FWD) and "_d64_" in row.name and row.dtype is DType.F16
    )
    name = split if way == "named" else None
    if way == "forced":
        monkeypatch.setattr(select, "forced_pattern", lambda: split)
    library = abi.library(Target.HOST)
    problem = Problem(
        dtype=DType.F16, batch=1, num_heads_q=2, num_heads_kv=1, seqlen_q=1, seqlen_k=2048, head_dim=64
    )
    found = []
    for has_workspace in (True, False):
        params = make_params(problem, 0.125, q, k, k, torch.empty_like(q), None)
        choice = select.choose(
            library, problem, Family.FMHA_FWD, HOST, params, name=name, has_workspace=has_workspace
        )
        kernel, params.num_splits = choice.kernel, choice.num_splits
        found.append((kernel.name, library.workspace_bytes(kernel.index, params) > 0))
    (with_one, needs_one), (without_one, needs_none) = found
    assert needs_one
    assert not needs_none
    # What is fast only with many CTAs for a tile comes last.
    assert (with_one != without_one) == (way == "chosen")
    out = array(1, 2, 1, 64)
    attention(q.numpy(), k.numpy(), k.numpy(), out=out, kernel=name)
    expect_close(torch.from_numpy(out), torchs_attention(q, k, k, enable_gqa=True))
