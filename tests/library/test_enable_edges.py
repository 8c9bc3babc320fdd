"""Under enabled(): what torch knows of a call and kernels do not. Such calls reach torch and are counted."""

from __future__ import annotations

import contextlib
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
import torch.nn.attention.bias
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import sdpa_cutlass
from sdpa_cutlass.integrations import head_dims
from tests.library.torch_calls import ORIGINAL, close, half
from tests.library.torch_features import HAS_ENABLE_GQA

pytestmark = pytest.mark.usefixtures("_torch_is_left_as_found")

Q = half(1, 2, 9, 64)
ALL = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("nested", ["query", "key", "all"])
def test_strided_nested_tensors_are_torchs(nested: str) -> None:
    """They are plain tensors by type, and raise when asked for their shape."""
    made = torch.nested.nested_tensor([half(2, n, 64) for n in (5, 9)])
    tensors = {
        "query": (made, half(2, 2, 9, 64), half(2, 2, 9, 64)),
        "key": (half(2, 2, 9, 64), made, made),
        "all": (made, made, made),
    }[nested]
    try:
        expected: Any = ORIGINAL(*tensors)
    except RuntimeError as error:
        expected = str(error)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        try:
            out: Any = F.scaled_dot_product_attention(*tensors)
        except RuntimeError as error:
            out = str(error)
    assert (usage.served, usage.fallbacks) == (0, {"nested tensor": 1})
    if isinstance(expected, str):
        assert out == expected
    else:
        assert all(torch.equal(a, b) for a, b in zip(out.unbind(), expected.unbind(), strict=True))


def test_a_query_with_a_negative_bit_is_torchs() -> None:
    negative = torch._neg_view(Q)
    expected = ORIGINAL(negative, Q, Q)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        assert torch.equal(F.scaled_dot_product_attention(negative, Q, Q), expected)
    assert (usage.served, usage.fallbacks) == (0, {"negative bit": 1})


def test_tensors_without_memory_are_torchs() -> None:
    """Zeros that were never written. What torch makes of them is not compared: its kernels read no zeros."""
    zeros = torch._efficientzerotensor((1, 2, 9, 64), dtype=torch.float16)
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        F.scaled_dot_product_attention(zeros, Q, Q)
    assert (usage.served, usage.fallbacks) == (0, {"tensor without memory": 1})


def test_a_mask_with_a_negative_bit_is_torchs() -> None:
    mask = torch.randn(9, 9, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)).conj().imag
    assert mask.is_neg()
    expected = ORIGINAL(Q, Q, Q, mask.clone().half())
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage, contextlib.suppress(RuntimeError):
        close(F.scaled_dot_product_attention(Q, Q, Q, mask), expected)  # or torch's error, by its version
    assert (usage.served, usage.fallbacks) == (0, {"negative bit": 1})


def test_functionalised_calls_are_torchs() -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        out = torch.func.functionalize(lambda q: F.scaled_dot_product_attention(q, q, q))(Q)
    assert torch.equal(out, ORIGINAL(Q, Q, Q))
    assert usage.served == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, about torch.jit
def test_forward_mode_gradients_are_torchs() -> None:
    """torch's math backend has them; a kernel would drop the tangent without a word."""
    tangent = half(1, 2, 9, 64, seed=1)
    with fw.dual_level(), sdpa_kernel(ALL), sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        for index in range(3):
            tensors = [Q, Q, Q]
            tensors[index] = fw.make_dual(Q, tangent)
            with contextlib.suppress(NotImplementedError):  # torch's, of a backend without forward mode
                F.scaled_dot_product_attention(*tensors)
        F.scaled_dot_product_attention(Q, Q, Q)
    assert (usage.served, usage.fallbacks) == (1, {"forward-mode gradient": 3})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forward_mode_gradient_is_the_one_without_the_library() -> None:
    query = Q.float().bfloat16()
    tangents = []
    for served in (False, True):
        with contextlib.ExitStack() as stack:
            if served:
                stack.enter_context(sdpa_cutlass.enabled(devices=["cpu"]))
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(fw.dual_level())
            dual = fw.make_dual(query, torch.ones_like(query))
            out = F.scaled_dot_product_attention(dual, query, query)
            tangents.append(fw.unpack_dual(out).tangent.clone())
    assert torch.equal(tangents[0], tangents[1])


@pytest.mark.parametrize(
    "backends", [*([backend] for backend in ALL), ALL[:2], ALL[:3], [SDPBackend.ERROR]], ids=str
)
def test_backends_that_are_named_are_torchs(backends: list[SDPBackend]) -> None:
    if backends == ALL[:3] and not HAS_ENABLE_GQA:
        pytest.skip("torch 2.4 has no switch for cuDNN in sdpa_kernel: these three are all")
    results: list[torch.Tensor | str] = []
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage, sdpa_kernel(backends):
        for function in (ORIGINAL, F.scaled_dot_product_attention):
            try:
                results.append(function(Q, Q, Q))
            except RuntimeError as error:
                results.append(str(error))
    assert (usage.served, usage.fallbacks) == (0, {"backends named by sdpa_kernel": 1})
    assert str(results[0]) == str(results[1])


def test_all_backends_alike_are_no_decision() -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        with sdpa_kernel(ALL):
            F.scaled_dot_product_attention(Q, Q, Q)
        F.scaled_dot_product_attention(Q, Q, Q)
    assert (usage.served, usage.fallbacks) == (2, {})


def test_a_compiled_function_respects_the_backends_of_its_trace() -> None:
    code: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> torch.fx.GraphModule:
        code.append(graph.code)
        return graph

    def function(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    with sdpa_cutlass.enabled(devices=["cpu"]), sdpa_kernel(SDPBackend.MATH):
        out = torch.compile(function, fullgraph=True, backend=backend)(Q)
        assert torch.equal(out, ORIGINAL(Q, Q, Q))
    assert ["sdpa_cutlass" in text for text in code] == [False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, about torch.jit
def test_scripts_are_compiled_with_torchs_own() -> None:
    torch.manual_seed(0)
    with sdpa_cutlass.enabled(devices=["cpu"]):
        module = torch.jit.script(torch.nn.MultiheadAttention(64, 2).eval())
        function = torch.jit.script(scripted)
    assert "aten::scaled_dot_product_attention" in str(function.graph)
    assert torch.equal(function(Q), ORIGINAL(Q, Q, Q, is_causal=True, scale=0.5))
    x = torch.randn(9, 1, 64)
    assert module(x, x, x)[0].shape == x.shape


def scripted(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True, scale=0.5)


def doubled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query * 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripts_are_compiled_with_what_stood_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", doubled)
    with sdpa_cutlass.enabled(devices=["cpu"]):
        function = torch.jit.script(scripted_plainly)
    assert torch.equal(function(Q), Q * 2)


def scripted_plainly(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def test_scripts_know_a_replacement_only_while_it_lives() -> None:
    table = torch.jit._builtins._get_builtin_table()
    gc.collect()
    before = len(table)
    for _ in range(3):
        with sdpa_cutlass.enabled(devices=["cpu"]):
            assert len(table) == before + 1
        gc.collect()
    assert len(table) == before


class Recorder(TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_function_mode_sees_the_call_and_not_what_it_is_made_of() -> None:
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        ours = F.scaled_dot_product_attention
        with Recorder() as recorder:
            out = F.scaled_dot_product_attention(Q, Q, Q, is_causal=True)
            F.scaled_dot_product_attention(Q.float(), Q.float(), Q.float())
    floats = [torch.Tensor.float] * 3
    assert recorder.seen == [ours, *floats, ours]
    close(out, ORIGINAL(Q, Q, Q, is_causal=True))
    assert (usage.served, usage.fallbacks) == (1, {"dtype torch.float32": 1})


def test_a_function_mode_may_answer_by_itself() -> None:
    class Answer(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention:
                return args[0]
            return func(*args, **(kwargs or {}))

    with sdpa_cutlass.enabled(devices=["cpu"]) as usage, Answer():
        assert F.scaled_dot_product_attention(Q, Q, Q) is Q
    assert (usage.served, usage.fallbacks) == (0, {})


def test_the_devices_of_a_block_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a block adds to an `enable` around it, it takes away again."""
    on_gpu = {torch.device("cuda", 0): head_dims.HeadDims(frozenset({64}), 256, 256)}
    monkeypatch.setattr(head_dims, "cuda_head_dims", lambda: on_gpu)
    usage = sdpa_cutlass.enable(devices="cuda")
    try:
        with sdpa_cutlass.enabled(devices="cpu"), sdpa_cutlass.enabled(devices="cuda"):
            F.scaled_dot_product_attention(Q, Q, Q)
        F.scaled_dot_product_attention(Q, Q, Q)
        assert (usage.served, usage.fallbacks) == (1, {"device cpu": 1})
        sdpa_cutlass.enable(devices="cpu")
        F.scaled_dot_product_attention(Q, Q, Q)
        assert usage.served == 2
    finally:
        sdpa_cutlass.disable()


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_a_bias_reaches_torch_where_its_module_keeps_the_function(
    variant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch 2.4: the bias calls the function that it imported, and knows no other operation at all."""
    q, k = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 9, 64)
    bias = variant(5, 9)
    expected = ORIGINAL(q, k, k, bias)
    names = SimpleNamespace(**{**vars(F), "scaled_dot_product_attention": ORIGINAL})
    if hasattr(torch.nn.attention.bias, "F"):  # torch 2.4 has the function alone
        monkeypatch.setattr(torch.nn.attention.bias, "F", names)
    dispatch = CausalBias._dispatch

    def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != torch.nn.functional.scaled_dot_product_attention:
            raise NotImplementedError("CausalBias only supports scaled_dot_product_attention")
        return dispatch(*args, **(kwargs or {}))

    monkeypatch.setattr(CausalBias, "__torch_function__", classmethod(torch_function))
    with sdpa_cutlass.enabled(devices=["cpu"]) as usage:
        assert torch.equal(F.scaled_dot_product_attention(q, k, k, bias), expected)
        assert (usage.served, usage.fallbacks) == (0, {"dtype torch.float32": 1})
        served = F.scaled_dot_product_attention(q.half(), k.half(), k.half(), bias)
    assert usage.served == 1
    close(served, expected.half())


def test_wrong_types_are_torchs_errors() -> None:
    for wrong in (None, 3, [1.0]):
        with pytest.raises(TypeError) as expected:
            ORIGINAL(wrong, Q, Q)
        with sdpa_cutlass.enabled(devices=["cpu"]), pytest.raises(TypeError) as found:
            F.scaled_dot_product_attention(wrong, Q, Q)
        assert str(found.value) == str(expected.value)
