"""merge_states as a function and as an operator: what it refuses, tracing, arrays of other libraries."""

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
    SdpaError,
    UnsupportedError,
)
from sdpa_cutlass.library.abi import Library, MergeParams, MergePart, Params, library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, Op, read_kernels
from sdpa_cutlass.problem import DType

OP = torch.ops.sdpa_cutlass.merge_states.default
Parts = tuple[list[torch.Tensor], list[torch.Tensor]]


def made(*shape: int, num_parts: int = 3, dtype: torch.dtype = torch.float16, device: str = "cpu") -> Parts:
    draw = torch.Generator().manual_seed(1)
    size = shape or (2, 3, 5, 32)
    outs = [torch.randn(size, generator=draw).to(device, dtype) for _ in range(num_parts)]
    return outs, [torch.randn(size[:-1], generator=draw).to(device) for _ in range(num_parts)]


def stacked(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.stack(parts[0]), torch.stack(parts[1])


@pytest.fixture(autouse=True)
def _nothing_is_launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an error is expected, no kernel may run before it."""
    if "refus" in request.node.name:

        def launched(*_: object) -> None:
            raise AssertionError("a kernel was launched")

        monkeypatch.setattr(Library, "merge_states", launched)


# ---- what is refused ----


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
        r"outs\[1\] requires grad, and this version has no backward pass",
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


def merging_row(native: Library, dtype: DType = DType.F16) -> KernelInfo:
    return next(row for row in read_kernels(native) if row.op is Op.MERGE and row.dtype is dtype)


def struct(outs: list[torch.Tensor], lses: list[torch.Tensor], out: torch.Tensor) -> MergeParams:
    """The C struct of fp16 parts without gaps."""
    batch, heads, rows, head_dim = outs[0].shape
    listed = (MergePart * len(outs))()
    for entry, part, lse in zip(listed, outs, lses, strict=True):
        entry.out, entry.lse = part.data_ptr(), lse.data_ptr()
        entry.out_stride, entry.lse_stride = part.stride()[:3], lse.stride()
    return MergeParams(
        struct_size=ctypes.sizeof(MergeParams), dtype=0, out_dtype=0, num_parts=len(outs),
        num_listed=len(outs), batch=batch, num_heads=heads, seqlen_q=rows, head_dim=head_dim, parts=listed,
        out=out.data_ptr(), out_stride=out.stride()[:3],
    )  # fmt: skip


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
