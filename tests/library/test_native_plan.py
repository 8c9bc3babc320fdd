"""sdpa_plan_*: what a plan checks when it is made, what a launch checks of its addresses, the messages."""

from __future__ import annotations

import ctypes

import pytest
import torch

from sdpa_cutlass import UnsupportedError, attention
from sdpa_cutlass.call import launch
from sdpa_cutlass.library import abi
from sdpa_cutlass.library.abi import INVALID_ARGUMENT, OK, Library, NativePlan
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Family, KernelInfo, read_kernels
from sdpa_cutlass.library.structs import Addresses, Params
from sdpa_cutlass.problem import DType, Problem
from tests.library.reference import rand

SHAPE = (1, 2, 33, 64)
PLAIN = "fmha_fwd_sm89_d64_m64n64_s1_w4_f16"
PROBLEM = Problem(
    dtype=DType.F16, batch=1, num_heads_q=2, num_heads_kv=2, seqlen_q=33, seqlen_k=33, head_dim=64
)


class Call:
    """A plan of a plain kernel, and addresses that it can be launched with."""

    def __init__(self, library: Library, *, has_lse: bool = False) -> None:
        self.library = library
        self.tensors = [rand(*SHAPE, device="cpu", seed=seed) for seed in range(3)]
        self.out, self.lse = torch.zeros_like(self.tensors[0]), torch.zeros(SHAPE[:3])
        lse = self.lse if has_lse else None
        self.params = launch.make_params(PROBLEM, 0.125, *self.tensors, self.out, lse)
        self.row = next(row for row in read_kernels(library) if row.name == PLAIN)
        self.plan = library.make_plan(self.row.index, self.params, 0)
        names = (name for name, *_ in Addresses._fields_[2:])
        self.addresses = Addresses(
            struct_size=ctypes.sizeof(Addresses), **{name: getattr(self.params, name) for name in names}
        )

    def status(self) -> int:
        return int(self.library.launch_plan(self.plan.address, bytes(self.addresses), None))

    def expected(self) -> torch.Tensor:
        return attention(*self.tensors, kernel=PLAIN)  # type: ignore[return-value]


def is_fit(row: KernelInfo) -> bool:
    return row.dtype is DType.F16 and row.head_dim == 64 and not row.is_causal


@pytest.fixture
def call() -> Call:
    return Call(abi.library(Target.HOST))


def test_a_plan_is_launched_again_and_again(call: Call) -> None:
    for _ in range(3):
        call.out.zero_()
        assert call.status() == OK
        assert torch.equal(call.out, call.expected())
    other = torch.zeros_like(call.out)
    call.addresses.out = other.data_ptr()
    call.out.zero_()
    assert call.status() == OK
    assert torch.equal(other, call.expected())
    assert not call.out.any()


def test_nothing_of_the_struct_is_kept(call: Call) -> None:
    ctypes.memset(ctypes.byref(call.params), 0xFF, ctypes.sizeof(Params))
    assert call.status() == OK
    assert torch.equal(call.out, call.expected())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"struct_size": 128}, r"addresses.struct_size is 128; this library was built with 144"),
        ({"q": None}, "q is null"),
        ({"k": None}, "k is null"),
        ({"v": None}, "v is null"),
        ({"out": None}, "out is null"),
        ({"q": 8}, "q: address 0x8 must be a multiple of 16"),
        ({"k": 24}, "k: address 0x18 must be a multiple of 16"),
        ({"v": 4}, "v: address 0x4 must be a multiple of 16"),
        ({"out": 2}, "out: address 0x2 must be a multiple of 16"),
        ({"softmax_lse": 64}, "softmax_lse, mask, sinks, seqlens and cu_seqlens must be null exactly where"),
        ({"softmax_lse": 66}, "softmax_lse is 0x42; it must be a multiple of 4"),
        ({"philox_state": 4}, "philox_state is 0x4; it must be a multiple of 8"),
        ({"mask": 64}, "mask is 0x40 and mask_type 0"),
        ({"sinks": 64}, "sinks is 0x40 and sinks_type 0"),
        ({"seqlens_q": 64}, "seqlens_q is given; this kernel takes no lengths"),
        ({"seqlens_k": 64}, "seqlens_k is given; this kernel takes no lengths"),
        ({"cu_seqlens_q": 64}, "cu_seqlens_q is given; this kernel takes no packed sequences"),
        ({"cu_seqlens_k": 66}, "cu_seqlens_k is 0x42; it must be a multiple of 4"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_addresses_are_refused_by_name(
    changes: dict[str, int | None], message: str, call: Call
) -> None:
    for name, value in changes.items():
        setattr(call.addresses, name, value)
    assert call.status() != OK
    with pytest.raises(Exception, match=message):
        call.library.check(INVALID_ARGUMENT, "launch")
    assert not call.out.any()


def test_softmax_lse_is_given_as_when_the_plan_was_made() -> None:
    call = Call(abi.library(Target.HOST), has_lse=True)
    assert call.status() == OK
    assert call.lse.any()
    call.addresses.softmax_lse = None
    assert call.status() == INVALID_ARGUMENT
    assert "null exactly where they were" in call.library.last_error()


@pytest.mark.parametrize(
    ("given", "bytes_given"), [(None, 1 << 30), (256, 1), (128, 1 << 30)], ids=["null", "short", "odd"]
)
def test_a_workspace_is_there_large_and_aligned(given: int | None, bytes_given: int, call: Call) -> None:
    rows = read_kernels(call.library)
    index = next(r.index for r in rows if r.family is Family.UNFUSED and is_fit(r))
    needed = call.library.workspace_bytes(index, call.params)
    plan = call.library.make_plan(index, call.params, 0)
    assert plan.workspace_bytes == needed > 0
    call.addresses.workspace, call.addresses.workspace_bytes = given, bytes_given
    status = call.library.launch_plan(plan.address, bytes(call.addresses), None)
    assert status == INVALID_ARGUMENT
    assert "workspace is" in call.library.last_error()
    room = torch.empty(needed + 256, dtype=torch.uint8)
    call.addresses.workspace = room.data_ptr() + -room.data_ptr() % 256
    call.addresses.workspace_bytes = needed
    assert call.library.launch_plan(plan.address, bytes(call.addresses), None) == OK
    torch.testing.assert_close(call.out.float(), call.expected().float(), atol=2e-3, rtol=0)


def test_a_problem_that_does_not_fit_makes_no_plan(call: Call) -> None:
    call.params.head_dim = 72
    with pytest.raises(UnsupportedError, match="head_dim is 72"):
        call.library.make_plan(call.row.index, call.params, 0)
    with pytest.raises(Exception, match="index is -1"):
        call.library.make_plan(-1, call.params, 0)
    call.params.head_dim = 64
    with pytest.raises(Exception, match="device is -1"):
        call.library.make_plan(call.row.index, call.params, -1)


def test_null_is_no_plan(call: Call) -> None:
    assert call.library.launch_plan(None, bytes(call.addresses), None) == INVALID_ARGUMENT
    assert "plan is null" in call.library.last_error()
    assert call.library.launch_plan(call.plan.address, None, None) == INVALID_ARGUMENT
    assert "addresses is null" in call.library.last_error()
    call.library._functions["sdpa_plan_free"](None)
    make, params, device = call.library._functions["sdpa_plan_make"], call.params, 0
    plan, size = ctypes.c_void_p(), ctypes.c_uint64()
    assert make(call.row.index, params, device, None, size) == INVALID_ARGUMENT
    assert "plan is null" in call.library.last_error()
    assert make(call.row.index, params, device, plan, None) == INVALID_ARGUMENT
    assert "workspace_bytes is null" in call.library.last_error()
    assert not plan


def test_a_plan_is_freed_with_its_object_and_once() -> None:
    freed: list[int | None] = []
    plan = NativePlan(ctypes.c_void_p(64), 0, lambda address: freed.append(address.value))
    assert freed == []
    del plan
    assert freed == [64]


def test_a_compiled_launcher_keeps_its_plan() -> None:
    """It has the address alone, and may be the last to have it."""
    q, k, v = (rand(*SHAPE, device="cpu", seed=seed) for seed in range(3))
    library, device = launch.library_for(q)
    call = Call(library)
    plan = launch.Plan(library, call.row, PROBLEM, call.params, device)
    compiled = plan.launcher
    if compiled is None:
        pytest.skip("no compiled launcher here")
    freed: list[int | None] = []
    free, plan._native._free = plan._native._free, lambda address: freed.append(address.value)
    address = plan._native.address
    del plan
    assert freed == []
    out = torch.empty_like(q)
    assert compiled.run(q, k, v, out, None)
    assert torch.equal(out, attention(q, k, v, kernel=PLAIN))
    del compiled
    assert freed == [address.value]
    free(address)
