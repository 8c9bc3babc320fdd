"""merge_states as a function and as an operator: derivatives, ops of rows, tracing, other arrays."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import sdpa_cutlass
import sdpa_cutlass.integrations.merge_ops
from sdpa_cutlass import Family, merge_states
from sdpa_cutlass.errors import (
    ArgumentError,
    ArgumentTypeError,
    NoKernelError,
    UnsupportedError,
)
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Op, read_kernels
from sdpa_cutlass.library.structs import Params
from sdpa_cutlass.problem import DType
from tests.library.merge_parts import made, merging_row, stacked, struct

OP = torch.ops.sdpa_cutlass.merge_states.default


def test_parts_that_require_grad_merge_under_no_grad() -> None:
    outs, lses = made(dtype=torch.float32)
    expected = merge_states(outs, lses)
    with torch.no_grad():
        found = merge_states([out.requires_grad_() for out in outs], lses)
    assert torch.equal(found[0], expected[0])
    assert not found[0].requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, about torch.jit
def test_autograd_refuses_the_operator_too() -> None:
    outs, lses = made(dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"outs\[1\] requires grad"):
        OP([outs[0], outs[1].requires_grad_()], lses[:2])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(lses[0].detach(), torch.ones_like(lses[0]))
        with pytest.raises(UnsupportedError, match=r"lses\[0\] has a forward-mode gradient"):
            merge_states([out.detach() for out in outs], [dual, *lses[1:]])


# ---- the library ----


def test_lse_is_optional_in_the_library() -> None:
    native = library(Target.HOST)
    outs, lses = made()
    out = torch.zeros_like(outs[0])
    native.merge_states(merging_row(native).index, struct(outs, lses, out), 0, None)
    assert torch.equal(out, merge_states(outs, lses)[0])


def test_kernels_of_one_op_are_refused_where_another_is_asked_for() -> None:
    """A row that merges has no function for attention, and one of attention none that merges."""
    native = library(Target.HOST)
    merging = merging_row(native)
    params = Params(struct_size=ctypes.sizeof(Params))
    asked: list[Callable[[], object]] = [
        lambda: native.make_plan(merging.index, params, 0),
        lambda: native.workspace_bytes(merging.index, params),
        lambda: native._call("sdpa_launch", "", merging.index, ctypes.byref(params), 0, None),
    ]
    for call in asked:
        with pytest.raises(ArgumentError, match=f"{merging.name} has op 1; a kernel for attention is needed"):
            call()
    assert "a kernel for attention is needed" in (native.refusal(merging.index, params) or "")
    outs, lses = made()
    other = next((row for row in read_kernels(native) if row.op is Op.FORWARD), None)
    if other is None:
        pytest.skip("the library has no kernel of attention")
    with pytest.raises(ArgumentError, match=f"{other.name} has op 0; a kernel for merging is needed"):
        native._call(
            "sdpa_merge_states",
            "",
            other.index,
            ctypes.byref(struct(outs, lses, torch.zeros_like(outs[0]))),
            0,
            None,
        )


def test_no_choice_of_attentions_sees_the_kernels() -> None:
    rows = [row for row in read_kernels(library(Target.HOST)) if row.family is Family.COMBINE]
    assert {row.op for row in rows} == {Op.MERGE}
    assert {row.dtype for row in rows} == set(DType)
    assert not [row for row in rows for family in Family if row.serves(family)]
    q = torch.zeros(1, 1, 8, 32, dtype=torch.float16)
    with pytest.raises(NoKernelError, match="no combine kernel can run"):
        sdpa_cutlass.plan(q, q, q, family=Family.COMBINE)
    with pytest.raises(ArgumentError, match="is not one of the"):
        sdpa_cutlass.attention(q, q, q, kernel=rows[0].name)


# ---- tracing ----


@pytest.mark.parametrize("form", ["list", "stacked"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_operator_checks(form: str, layout: str, device: str) -> None:
    outs, lses = made(device=device)
    if layout == "bshd":
        outs = [out.transpose(1, 2).contiguous().transpose(1, 2) for out in outs]
    sinks = torch.ones(3, device=device)
    if form == "stacked":
        torch.library.opcheck(OP, ([torch.stack(outs)], [torch.stack(lses)], sinks), {"stacked": True})
    else:
        torch.library.opcheck(OP, (outs, lses), {"out_dtype": torch.float32})
        torch.library.opcheck(OP, (outs, lses, sinks))


@pytest.mark.parametrize("form", ["list", "stacked"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_code_calls_the_operator_and_gives_the_same_bits(
    form: str, dynamic: bool, device: str
) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph

    def merged(outs: Any, lses: Any, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_states(outs, lses, sinks=sinks, out_dtype=torch.bfloat16)

    compiled = torch.compile(merged, backend=keep, fullgraph=True, dynamic=dynamic)
    for rows in (5, 9):
        parts: Any = made(2, 3, rows, 32, device=device)
        if form == "stacked":
            parts = stacked(parts)
        sinks = torch.tensor([0.5, -1.0, 2.0], device=device)
        for got, wanted in zip(compiled(*parts, sinks), merged(*parts, sinks), strict=True):
            assert torch.equal(got, wanted)
    targets = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert len([target for target in targets if "sdpa_cutlass.merge_states" in target]) == 1


def test_fake_tensors_have_the_sizes_strides_and_dtypes_of_real_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    outs, lses = made()
    swapped = [out.transpose(1, 2).contiguous().transpose(1, 2) for out in outs]
    for parts in ((outs, lses), (swapped, lses), stacked((outs, lses))):
        for dtype in (None, torch.float32):
            real = merge_states(*parts, out_dtype=dtype)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                given: Any = [
                    [mode.from_tensor(x) for x in side] if isinstance(side, list) else mode.from_tensor(side)
                    for side in parts
                ]
                fake = merge_states(*given, out_dtype=dtype)
            for a, b in zip(fake, real, strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_errors_while_tracing_name_the_argument() -> None:
    outs, lses = (tensors for tensors in made())
    meta = [out.to("meta") for out in outs], [lse.to("meta") for lse in lses]
    assert OP(*meta)[0].shape == outs[0].shape
    with pytest.raises(ArgumentError, match=r"lses\[0\] has shape \(2, 5, 3\)"):
        OP(meta[0], [meta[1][0].mT, *meta[1][1:]])
    with pytest.raises(ArgumentTypeError, match=r"sinks has dtype torch\.int32"):
        OP(*meta, torch.zeros(3, dtype=torch.int32, device="meta"))


# ---- other kinds of tensors ----


def test_arrays_of_other_libraries_are_read_in_place() -> None:
    outs, lses = made(dtype=torch.float32)
    expected = merge_states(outs, lses)
    arrays = [out.numpy() for out in outs], [lse.numpy() for lse in lses]
    for parts in (arrays, tuple(numpy.stack(side) for side in arrays)):
        found = merge_states(*parts, sinks=numpy.full(3, -math.inf))
        assert isinstance(found[0], torch.Tensor)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_views_with_the_negative_bit_mean_their_values() -> None:
    outs, lses = made(dtype=torch.float32)
    negative = torch._neg_view(-outs[1])
    assert negative.is_neg()
    found = merge_states([outs[0], negative, outs[2]], [lses[0], torch._neg_view(-lses[1]), lses[2]])
    assert torch.equal(found[0], merge_states(outs, lses)[0])


def test_autocast_leaves_the_parts_alone(device: str) -> None:
    outs, lses = made(dtype=torch.float32, device=device)
    expected = merge_states(outs, lses)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(merge_states(outs, lses)[0], expected[0])
        assert torch.equal(OP(outs, lses)[0], expected[0])


def test_the_inputs_are_not_written(device: str) -> None:
    outs, lses = made(num_parts=40, device=device)
    kept = [tensor.clone() for tensor in (*outs, *lses)]
    merge_states(outs, lses)
    for tensor, before in zip((*outs, *lses), kept, strict=True):
        assert torch.equal(tensor, before)


@pytest.mark.gpu
def test_a_cuda_graph_replays_it_on_new_values() -> None:
    outs, lses = made(device="cuda")
    sinks = torch.zeros(3, device="cuda")
    merge_states(outs, lses, sinks=sinks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = merge_states(outs, lses, sinks=sinks)
    outs[1].mul_(-2)
    lses[0].add_(3)
    graph.replay()
    for got, wanted in zip(found, merge_states(outs, lses, sinks=sinks), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_the_host_and_the_gpu_agree() -> None:
    outs, lses = made(2, 4, 130, 64, num_parts=9)
    ours = merge_states(outs, lses, out_dtype=torch.float32)
    theirs = merge_states([x.cuda() for x in outs], [x.cuda() for x in lses], out_dtype=torch.float32)
    torch.testing.assert_close(theirs[0].cpu(), ours[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(theirs[1].cpu(), ours[1], rtol=0, atol=1e-5)
