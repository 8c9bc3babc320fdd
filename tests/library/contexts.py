"""What torch's users do around a call, and what becomes of the call there: the table of docs/semantics.md.

A context runs a callee in its way and gives a tensor; it is right where that is what the callee gives
without it (under enable(): what torch's own function gives in the same context).
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Call = Callable[..., torch.Tensor]
Tensors = tuple[torch.Tensor, ...]

RIGHT = "right"
REFUSED = "refused"
"""An SdpaError, whose message names what is in the way."""
TORCHS = "torch's"
"""torch serves the call, and its result is that without enable()."""
TORCH_REFUSES = "torch refuses"
"""The error is torch's: it comes before this library is asked."""
COLUMNS = ("functions", "operators", "enable()", "plan")


@dataclass(frozen=True)
class Context:
    """`run` takes a call, the example that it is traced on, and the inputs: q, k and v each."""

    what: str
    outcomes: tuple[str, str, str, str]  # as COLUMNS
    run: Callable[[Call, Tensors, Tensors], torch.Tensor]
    is_slow: bool = False  # it compiles C++, or asks a compiler for long


CONTEXTS: dict[str, Context] = {}


def context(
    what: str, *outcomes: str, is_slow: bool = False
) -> Callable[[Callable[[Call, Tensors, Tensors], torch.Tensor]], None]:
    """Adds a row. One outcome stands for all columns."""

    def add(run: Callable[[Call, Tensors, Tensors], torch.Tensor]) -> None:
        found = outcomes * 4 if len(outcomes) == 1 else outcomes
        assert len(found) == len(COLUMNS)
        CONTEXTS[run.__name__] = Context(what, found, run, is_slow)

    return add


class Attention(torch.nn.Module):
    """A module that does nothing but one call."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.call(q, k, v)


class _Passing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _PassingFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    """One that adds nothing."""


def _compiled(call: Call, inputs: Tensors, **options: Any) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.compile(call, **options)(*inputs)


@context("nothing", RIGHT)
def eager(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return call(*inputs)


@context("`torch.no_grad()`, with a query that requires grad", RIGHT)
def no_grad(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with torch.no_grad():
        return call(inputs[0].clone().requires_grad_(), *inputs[1:])


@context("`torch.inference_mode()`, its result used outside", RIGHT)
def inference_mode(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with torch.inference_mode():
        made = call(*(tensor.clone() for tensor in inputs))
    return made + 0


@context("`torch.autocast` to the inputs' own dtype", RIGHT)
def autocast(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with torch.autocast(inputs[0].device.type, dtype=inputs[0].dtype):
        return call(*inputs)


@context("a query that requires grad, and its backward pass", RIGHT, RIGHT, RIGHT, "not asked by `run`")
def requires_grad(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    query = inputs[0].clone().requires_grad_()
    out = call(query, *inputs[1:])
    out.float().square().sum().backward()
    assert query.grad is not None
    assert query.grad.any()
    return out.detach()


@context('`torch.compile(backend="eager")`', RIGHT)
def compile_eager(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return _compiled(call, inputs, backend="eager")


@context('`torch.compile(backend="aot_eager")`', RIGHT)
def compile_aot_eager(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return _compiled(call, inputs, backend="aot_eager")


@context("`torch.compile(fullgraph=True)`", RIGHT, RIGHT, RIGHT, TORCH_REFUSES)
def compile_fullgraph(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return _compiled(call, inputs, backend="aot_eager", fullgraph=True)


@context("`torch.compile(dynamic=True)`, with two sizes", RIGHT, RIGHT, RIGHT, "not asked by `run`")
def compile_dynamic(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", dynamic=True)
    compiled(*(torch.cat([tensor, tensor], -1)[..., :64] for tensor in example))
    return compiled(*inputs)


@context("`torch.compile()`", RIGHT, is_slow=True)
def compile_inductor(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return _compiled(call, inputs)


@context('`torch.compile(mode="reduce-overhead")`', RIGHT, is_slow=True)
def compile_reduce_overhead(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    torch._dynamo.reset()
    compiled = torch.compile(call, mode="reduce-overhead")
    for _ in range(3):  # the first runs record
        made = compiled(*inputs).clone()
    return made


@context('`torch.compile(mode="max-autotune")`', RIGHT, is_slow=True)
def compile_max_autotune(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return _compiled(call, inputs, mode="max-autotune")


@context("`torch.export.export(strict=False)`", RIGHT, RIGHT, RIGHT, REFUSED)
def export(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return torch.export.export(Attention(call), example, strict=False).module()(*inputs)


@context("`torch.export.export(strict=True)`", RIGHT, RIGHT, RIGHT, TORCH_REFUSES)
def export_strict(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    torch._dynamo.reset()
    return torch.export.export(Attention(call), example, strict=True).module()(*inputs)


@context("`torch.jit.trace`", RIGHT, RIGHT, TORCHS, REFUSED)
def jit_trace(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return torch.jit.trace(call, example, check_trace=False)(*inputs)


@context("`torch.jit.script`", TORCH_REFUSES, RIGHT, TORCHS, TORCH_REFUSES)
def jit_script(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return torch.jit.script(call)(*inputs)


@context("`make_fx`", RIGHT, RIGHT, TORCHS, REFUSED)
def fx(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return make_fx(call)(*example)(*inputs)


@context("`make_fx(pre_dispatch=True)`", RIGHT, RIGHT, RIGHT, REFUSED)
def fx_pre_dispatch(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return make_fx(call, pre_dispatch=True)(*example)(*inputs)


@context('`make_fx(tracing_mode="symbolic")`', RIGHT, RIGHT, TORCHS, REFUSED)
def fx_symbolic(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return make_fx(call, tracing_mode="symbolic")(*example)(*inputs)


@context("`torch.func.grad`", RIGHT, REFUSED, TORCHS, REFUSED)
def func_grad(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    def loss(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = call(q, *inputs[1:])
        return out.float().square().sum(), out

    grad, out = torch.func.grad(loss, has_aux=True)(inputs[0])
    assert grad.any()
    return out


@context("`torch.func.vjp`", RIGHT, REFUSED, TORCHS, REFUSED)
def func_vjp(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    out, vjp = torch.func.vjp(lambda v: call(*inputs[:2], v), inputs[2])
    assert vjp(torch.ones_like(out))[0].any()
    return out


@context("`torch.func.jvp`", REFUSED, REFUSED, TORCHS, REFUSED)
def func_jvp(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with _only_math():
        return torch.func.jvp(lambda q: call(q, *inputs[1:]), inputs[:1], example[:1])[1]


@context("`torch.func.vmap`", RIGHT, RIGHT, TORCHS, REFUSED)
def func_vmap(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    pairs = [torch.stack(pair) for pair in zip(inputs, example, strict=True)]
    return torch.func.vmap(call)(*pairs)[0]


@context("`torch.func.vmap` of `torch.func.grad`", REFUSED, REFUSED, TORCHS, REFUSED)
def func_vmap_of_grad(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    grad = torch.func.grad(lambda q: call(q, *inputs[1:]).float().sum())
    return torch.func.vmap(grad)(inputs[0][None])[0]


@context("`torch.func.grad` of `torch.func.vmap`", REFUSED, REFUSED, TORCHS, REFUSED)
def func_grad_of_vmap(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    batched = torch.func.vmap(lambda q: call(q, *inputs[1:]))
    with _only_math():  # the gradients of torch 2.11's batched memory-efficient kernel are arbitrary
        return torch.func.grad(lambda q: batched(q).float().sum())(inputs[0][None])[0]


@context("`torch.func.functionalize`", RIGHT, RIGHT, TORCHS, REFUSED)
def func_functionalize(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return torch.func.functionalize(call)(*inputs)


@context("a dual tensor of `torch.autograd.forward_ad`", REFUSED, REFUSED, TORCHS, REFUSED)
def forward_mode(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with fw.dual_level(), _only_math():
        dual = fw.make_dual(inputs[0], example[0])
        return fw.unpack_dual(call(dual, *inputs[1:])).tangent.clone()


@context("a `dual_level` without dual tensors", RIGHT, RIGHT, RIGHT, REFUSED)
def forward_mode_constants(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with fw.dual_level():
        return call(*inputs)


@context("`FakeTensorMode`: sizes and dtype", RIGHT, RIGHT, TORCHS, REFUSED)
def fake_tensors(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    expected = call(*inputs)
    with FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(tensor) for tensor in inputs))
    assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype)
    return expected


@context("a `TorchDispatchMode`, which sees the call", RIGHT, RIGHT, TORCHS, REFUSED)
def dispatch_mode(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with _Passing() as mode:
        made = call(*inputs)
    assert any("attention" in name for name in mode.seen)
    return made


@context("a `TorchFunctionMode`", RIGHT)
def function_mode(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    with _PassingFunctions():
        return call(*inputs)


@context("a subclass of `torch.Tensor` that adds nothing", RIGHT, RIGHT, TORCHS, RIGHT)
def subclass(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return call(*(tensor.as_subclass(Subclass) for tensor in inputs)).as_subclass(torch.Tensor)


@context("an `nn.Parameter` without grad", RIGHT)
def parameter(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return call(*(torch.nn.Parameter(tensor, requires_grad=False) for tensor in inputs))


@context("views with the negative bit: `x.conj().imag`", RIGHT, RIGHT, TORCHS, "not asked by `run`")
def negative_bit(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return call(*(_as_negative_view(tensor) for tensor in inputs))


@context("complex tensors with the conjugate bit", REFUSED, REFUSED, TORCH_REFUSES, "not asked by `run`")
def conjugate_bit(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return call(*(torch.complex(tensor.float(), tensor.float()).conj() for tensor in inputs))


@context("four threads at once", RIGHT)
def threads(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    made: list[torch.Tensor] = []
    started = [threading.Thread(target=lambda: made.append(call(*inputs))) for _ in range(4)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert len(made) == 4
    assert all(torch.equal(other, made[0]) for other in made)
    return made[0]


@context("`copy.deepcopy` of a module", RIGHT, RIGHT, RIGHT, REFUSED)
def deepcopy(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return copy.deepcopy(Attention(call))(*inputs)


@context("`pickle` of a module", RIGHT, RIGHT, RIGHT, REFUSED)
def pickled(call: Call, example: Tensors, inputs: Tensors) -> torch.Tensor:
    return pickle.loads(pickle.dumps(Attention(call)))(*inputs)  # noqa: S301  its own


def _as_negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, stored as their negatives."""
    pairs = torch.stack([torch.zeros_like(tensor), -tensor], -1)
    view = torch.view_as_complex(pairs).conj().imag
    assert view.is_neg()
    return view


def _only_math() -> contextlib.AbstractContextManager[Any]:
    """torch's one backend with forward-mode gradients."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def table() -> str:
    """Markdown: a row for each context."""
    head = ["around the call", *(f"`{column}`" if column == "enable()" else column for column in COLUMNS)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {row.what} | {' | '.join(row.outcomes)} |" for row in CONTEXTS.values()]
    return "\n".join(lines)
