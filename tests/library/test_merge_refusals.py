"""What merge_states and sdpa_merge_states refuse, by name and before anything is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdpa_cutlass import merge_states
from sdpa_cutlass.errors import (
    ArgumentError,
    ArgumentTypeError,
    NoKernelError,
    SdpaError,
    UnsupportedError,
)
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.locate import Target
from tests.library.merge_parts import made, merging_row, struct


@pytest.fixture(autouse=True)
def _nothing_is_launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an error is expected, no kernel may run before it."""
    if "refus" in request.node.name:

        def launched(*_: object) -> None:
            raise AssertionError("a kernel was launched")

        monkeypatch.setattr(Library, "merge_states", launched)


def replaced(values: list[Any], index: int, value: Any) -> list[Any]:
    return [*values[:index], value, *values[index + 1 :]]


def wide(part: torch.Tensor, spare: int, start: int = 0) -> torch.Tensor:
    """`part` with `spare` columns between its rows, from column `start` on."""
    room = part.new_zeros((*part.shape[:-1], part.shape[-1] + spare))
    return room[..., start : start + part.shape[-1]]


REFUSED: dict[str, tuple[Callable[[list[Any], list[Any]], dict[str, Any]], type[SdpaError], str]] = {
    "nothing": (lambda o, x: {"outs": [], "lses": []}, ArgumentError, "outs is empty; allowed is at least"),
    "no parts": (
        lambda o, x: {"outs": torch.stack(o)[:0], "lses": torch.stack(x)[:0]},
        ArgumentError, r"outs has shape \(0, 2, 3, 5, 32\); allowed is at least one part",
    ),
    "a list and a tensor": (
        lambda o, x: {"lses": torch.stack(x)}, ArgumentTypeError,
        "outs is a list and lses a Tensor; allowed are two",
    ),
    "fewer lses": (lambda o, x: {"lses": x[:2]}, ArgumentError, "lses has 2 parts; outs has 3"),
    "not a tensor": (
        lambda o, x: {"outs": replaced(o, 1, "x")}, ArgumentTypeError,
        r"outs\[1\] is a str; allowed is a torch.Tensor",
    ),
    "None for a tensor": (
        lambda o, x: {"outs": None, "lses": None}, ArgumentTypeError,
        "outs is a NoneType; allowed is a torch.Tensor",
    ),
    "float64": (
        lambda o, x: {"outs": [out.double() for out in o]}, ArgumentTypeError,
        r"outs has dtype torch.float64; allowed are torch.float16, torch.bfloat16 and torch.float32",
    ),
    "mixed dtypes": (
        lambda o, x: {"outs": replaced(o, 2, o[2].float())}, ArgumentTypeError,
        r"outs\[2\] has dtype torch.float32; outs\[0\] has torch.float16",
    ),
    "16-bit lses": (
        lambda o, x: {"lses": replaced(x, 1, x[1].half())}, ArgumentTypeError,
        r"lses\[1\] has dtype torch.float16; allowed is torch.float32",
    ),
    "other shapes": (
        lambda o, x: {"outs": replaced(o, 1, o[1][:, :2])}, ArgumentError,
        r"outs\[1\] has shape \(2, 2, 5, 32\); outs\[0\] has \(2, 3, 5, 32\)",
    ),
    "lse of another shape": (
        lambda o, x: {"lses": replaced(x, 0, x[0].mT)}, ArgumentError,
        r"lses\[0\] has shape \(2, 5, 3\); allowed is \(2, 3, 5\)",
    ),
    "too many dimensions": (
        lambda o, x: {"outs": [out[None] for out in o], "lses": [lse[None] for lse in x]}, ArgumentError,
        r"outs\[0\] has shape \(1, 2, 3, 5, 32\); allowed is \[batch, heads, seqlen_q, head_dim\]",
    ),
    "too few dimensions": (
        lambda o, x: {"outs": o[0][0, 0], "lses": x[0][0, 0]}, ArgumentError,
        r"outs has shape \(5, 32\); allowed is parts \+ \[batch, heads, seqlen_q, head_dim\]",
    ),
    "an odd head_dim": (
        lambda o, x: {"outs": [out[..., :20] for out in o]}, ArgumentError,
        r"outs\[0\] has head_dim 20 \(its last dimension\); allowed are multiples of 8",
    ),
    "no head_dim": (
        lambda o, x: {"outs": [out[..., :0] for out in o]}, ArgumentError, r"outs\[0\] has head_dim 0",
    ),
    "a strided last dimension": (
        lambda o, x: {"outs": replaced(o, 1, torch.cat([o[1], o[1]], -1)[..., ::2])}, ArgumentError,
        r"outs\[1\] has last stride 2; allowed is 1",
    ),
    "strides that are not aligned": (
        lambda o, x: {"outs": replaced(o, 1, wide(o[1], 4))}, ArgumentError,
        r"outs\[1\] has strides \(540, 180, 36, 1\); all but the last must be multiples of 8 elements",
    ),
    "an address that is not aligned": (
        lambda o, x: {"outs": replaced(o, 2, wide(o[2], 8, 4))}, ArgumentError,
        r"outs\[2\] starts at address 0x\w+; it must be a multiple of 16",
    ),
    "sinks of another length": (
        lambda o, x: {"sinks": torch.zeros(2)}, ArgumentError, r"sinks has shape \(2,\); allowed is \(3,\)",
    ),
    "sinks for each batch": (
        lambda o, x: {"sinks": torch.zeros(2, 3)}, ArgumentError,
        r"sinks has shape \(2, 3\); allowed is \(3,\)",
    ),
    "whole sinks": (
        lambda o, x: {"sinks": torch.zeros(3, dtype=torch.int32)}, ArgumentTypeError,
        "sinks has dtype torch.int32",
    ),
    "sinks on another device": (
        lambda o, x: {"sinks": torch.zeros(3, device="meta")}, ArgumentTypeError,
        r"sinks is on meta; allowed are CPU and CUDA",
    ),
    "a part on another device": (
        lambda o, x: {"outs": replaced(o, 1, o[1].to("meta"))}, ArgumentTypeError,
        r"outs\[1\] is on meta; allowed are",
    ),
    "sparse lses": (
        lambda o, x: {"lses": replaced(x, 1, x[1].to_sparse())}, ArgumentTypeError,
        r"lses\[1\] has layout torch.sparse_coo; allowed is torch.strided",
    ),
    "another out_dtype": (
        lambda o, x: {"out_dtype": torch.float64}, ArgumentTypeError,
        "out_dtype is torch.float64; allowed are",
    ),
    "a name for out_dtype": (
        lambda o, x: {"out_dtype": "float32"}, ArgumentTypeError, "out_dtype='float32' is a str; allowed are",
    ),
    "outs that require grad": (
        lambda o, x: {"outs": replaced(o, 1, o[1].float().requires_grad_())}, UnsupportedError,
        r"outs\[1\] requires grad, and this call has no backward pass",
    ),
    "lses that require grad": (
        lambda o, x: {"lses": replaced(x, 2, x[2].requires_grad_())}, UnsupportedError,
        r"lses\[2\] requires grad",
    ),
    "sinks that require grad": (
        lambda o, x: {"sinks": torch.zeros(3, requires_grad=True)}, UnsupportedError, "sinks requires grad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_by_name(case: str) -> None:
    change, error, message = REFUSED[case]
    outs, lses = made()
    arguments: dict[str, Any] = {"outs": outs, "lses": lses, **change(outs, lses)}
    with pytest.raises(error, match=message):
        merge_states(arguments.pop("outs"), arguments.pop("lses"), **arguments)


def test_a_head_dim_beyond_the_kernels_is_refused_by_name() -> None:
    with pytest.raises(NoKernelError, match="takes head_dim up to 256, and outs has 264"):
        merge_states(*made(1, 1, 2, 264))


# ---- the library ----


C_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "struct_size": ({"struct_size": 8}, "params.struct_size is 8"),
    "num_parts": ({"num_parts": 0, "num_listed": 0}, "num_parts is 0; it must be at least 1"),
    "num_listed": ({"num_listed": 2}, "num_listed is 2 and num_parts 3; allowed are 1, and up to 32"),
    "listed beyond 32": ({"num_listed": 33, "num_parts": 33}, "num_listed is 33"),
    "dtype": ({"dtype": 1}, "dtype is 1; this kernel takes 0"),
    "out_dtype": ({"out_dtype": 3}, "out_dtype is 3; allowed are 0 to 2"),
    "head_dim": ({"head_dim": 20}, "head_dim is 20; this kernel takes multiples of 8 up to 256"),
    "large head_dim": ({"head_dim": 264}, "head_dim is 264"),
    "rows": ({"batch": 2**20, "num_heads": 2**11}, "one launch has at most 2147482623 rows"),
    "seqlen_q": ({"seqlen_q": -1}, "seqlen_q is -1; it must be at least 1"),
    "no out": ({"out": 0}, "out is (nil) with strides"),
    "out": ({"out": 24}, "out is 0x18 with strides"),
    "out_stride": ({"out_stride": (480, 160, 36)}, "with strides 480, 160, 36; 16-byte multiples"),
    "sinks": ({"sinks": 6}, "sinks is 0x6 and lse (nil); they must be multiples of 4"),
    "parts": ({"parts": None}, "parts is null"),
    "part stride": (
        {"num_listed": 1, "out_part_stride": 4},
        "out_part_stride is 4; it must be a multiple of 8",
    ),
}


@pytest.mark.parametrize("case", C_REFUSED)
def test_the_library_says_what_is_wrong(case: str) -> None:
    changes, message = C_REFUSED[case]
    native = library(Target.HOST)
    outs, lses = made()
    params = struct(outs, lses, torch.zeros_like(outs[0]))
    for name, value in changes.items():
        setattr(params, name, value)
    with pytest.raises(SdpaError) as found:
        native.merge_states(merging_row(native).index, params, 0, None)
    assert message in str(found.value)


@pytest.mark.parametrize("field", ["out", "lse"])
def test_the_library_refuses_parts_that_are_nowhere(field: str) -> None:
    native = library(Target.HOST)
    outs, lses = made()
    for address, what in ((0, "null"), (2, "misaligned")):
        params = struct(outs, lses, torch.zeros_like(outs[0]))
        setattr(params.parts[1], field, address)
        with pytest.raises(ArgumentError, match=f"{field} of part 1 is .*, which is {what}"):
            native._call("sdpa_merge_states", "", merging_row(native).index, ctypes.byref(params), 0, None)
    params = struct(outs, lses, torch.zeros_like(outs[0]))
    params.parts[2].out_stride[2] = 36
    with pytest.raises(ArgumentError, match="out of part 2: row stride 36 must be a multiple of 8 elements"):
        native._call("sdpa_merge_states", "", merging_row(native).index, ctypes.byref(params), 0, None)
