"""Every context of contexts.py around everything that can be called: right, or refused by name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sdpa_cutlass.integrations.torch_ops  # noqa: F401  registers the operators
from sdpa_cutlass import (
    AttentionPlan,
    SdpaError,
    attention,
    attention_varlen,
    enabled,
    plan,
    scaled_dot_product_attention,
    unfused_attention,
)
from tests.library.contexts import (
    CONTEXTS,
    REFUSED,
    RIGHT,
    TORCH_REFUSES,
    TORCHS,
    Call,
    Tensors,
    table,
)
from tests.library.reference import rand
from tests.library.torch_calls import ORIGINAL, close

DOCUMENT = Path(__file__).parents[2] / "docs" / "semantics.md"
SHAPE, PACKED = (1, 2, 9, 64), (9, 2, 64)
NAMES = r"query|key|value|torch does not see plans|AttentionPlan|dtype"


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    return out


def drop_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v)


def baseline(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = unfused_attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    return out


def varlen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=q.device)
    out = attention_varlen(q, k, v, lengths, lengths, 5, 5)
    assert isinstance(out, torch.Tensor)
    return out


def operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.ops.sdpa_cutlass.attention_forward(q, k, v)[0]


def varlen_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32, device=q.device)
    return torch.ops.sdpa_cutlass.attention_varlen_forward(q, k, v, lengths, lengths, 5, 5)[0]


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Planned(torch.nn.Module):
    """A plan's run, as a call."""

    def __init__(self, made: AttentionPlan) -> None:
        super().__init__()
        self.plan = made

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        self.plan.run(q, k, v, out)
        return out


FUNCTIONS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "attention": (fused, SHAPE),
    "scaled_dot_product_attention": (drop_in, SHAPE),
    "unfused_attention": (baseline, SHAPE),
    "attention_varlen": (varlen, PACKED),
}
OPERATORS: dict[str, tuple[Call, tuple[int, ...]]] = {
    "attention_forward": (operator, SHAPE),
    "attention_varlen_forward": (varlen_operator, PACKED),
}
GRADIENTS = ("requires_grad", "func_grad", "func_vjp")
"""What the baseline refuses and everybody else does."""
FAST = [name for name, context in CONTEXTS.items() if not context.is_slow]
SLOW = [name for name, context in CONTEXTS.items() if context.is_slow]
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own: deprecations, batching and tracers


def tensors(shape: tuple[int, ...], device: str, seed: int = 0) -> Tensors:
    return tuple(rand(*shape, device=device, seed=3 * seed + i) for i in range(3))


def holds(name: str, outcome: str, call: Call, shape: tuple[int, ...], device: str) -> None:
    """Raises AssertionError unless `outcome`, right or one of the refusals, is what becomes of the call."""
    run, example, inputs = CONTEXTS[name].run, tensors(shape, device, 1), tensors(shape, device)
    if outcome == RIGHT:
        assert torch.equal(run(call, example, inputs), call(*inputs))
        return
    with pytest.raises(Exception) as caught:  # noqa: PT011  torch wraps some
        run(call, example, inputs)
    errors: list[BaseException | None] = [caught.value]
    while errors[-1] is not None:
        errors.append(errors[-1].__cause__ or errors[-1].__context__)
    ours = [error for error in errors if isinstance(error, SdpaError)]
    if outcome == REFUSED:
        assert ours
        assert re.search(NAMES, str(ours[0]))
    else:
        assert outcome == TORCH_REFUSES
        assert not ours


def both_signatures(
    name: str, outcome: str, call: Call, shape: tuple[int, ...], device: str, forget: Callable[[], None]
) -> None:
    """`holds` for a signature that is not known, and for one that is."""
    forget()
    holds(name, outcome, call, shape, device)
    for _ in range(3):
        call(*tensors(shape, device, 2))
    holds(name, outcome, call, shape, device)


@pytest.mark.parametrize("callee", FUNCTIONS)
@pytest.mark.parametrize("name", FAST)
@pytest.mark.usefixtures("_call_path")
def test_functions(name: str, callee: str, device: str, forget: Callable[[], None]) -> None:
    outcome = CONTEXTS[name].outcomes[0]
    if callee == "unfused_attention" and name in GRADIENTS:
        outcome = REFUSED
    both_signatures(name, outcome, *FUNCTIONS[callee], device, forget)


@pytest.mark.parametrize("callee", OPERATORS)
@pytest.mark.parametrize("name", FAST)
def test_operators(name: str, callee: str, device: str, forget: Callable[[], None]) -> None:
    both_signatures(name, CONTEXTS[name].outcomes[1], *OPERATORS[callee], device, forget)


@pytest.mark.parametrize("name", FAST)
@pytest.mark.usefixtures("_torch_is_left_as_found")
def test_enable(name: str, device: str) -> None:
    context = CONTEXTS[name]
    example, inputs = tensors(SHAPE, device, 1), tensors(SHAPE, device)
    if context.outcomes[2] == TORCH_REFUSES:
        with enabled(devices=device):
            holds(name, TORCH_REFUSES, torchs, SHAPE, device)
        return
    expected = context.run(torchs, example, inputs)
    with enabled(devices=device) as usage:
        got = context.run(torchs, example, inputs)
    assert F.scaled_dot_product_attention is ORIGINAL
    close(got, expected)
    if context.outcomes[2] == TORCHS and name not in ("fake_tensors", "jit_script"):
        assert usage.fallbacks.total() > 0
        assert usage.served == 0


@pytest.mark.parametrize("name", FAST)
@pytest.mark.usefixtures("_call_path")
def test_plan(name: str, device: str) -> None:
    outcome = CONTEXTS[name].outcomes[3]
    if outcome in (RIGHT, REFUSED, TORCH_REFUSES):
        holds(name, outcome, Planned(plan(*tensors(SHAPE, device))), SHAPE, device)


def test_plan_asks_what_its_runs_do_not(device: str) -> None:
    def planned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan(q, k, v)
        return q

    for name in ("requires_grad", "negative_bit", "conjugate_bit", "forward_mode", "func_functionalize"):
        holds(name, REFUSED, planned, SHAPE, device)


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
@pytest.mark.usefixtures("_torch_is_left_as_found")
def test_inductor(name: str, device: str) -> None:
    inputs = tensors(SHAPE, device)
    calls: dict[str, Call] = {"functions": fused, "operators": operator, "plan": Planned(plan(*inputs))}
    for call in calls.values():
        holds(name, RIGHT, call, SHAPE, device)
    with enabled(devices=device):
        close(CONTEXTS[name].run(torchs, inputs, inputs), ORIGINAL(*inputs))


def test_fork() -> None:
    """A forked child computes what its parent does; in a process of its own, because torch has threads."""
    code = """
import os, sys, torch, sdpa_cutlass
q = torch.randn(1, 2, 9, 64).half()
planned, out = sdpa_cutlass.plan(q, q, q), torch.empty_like(q)
expected = sdpa_cutlass.attention(q, q, q)
child = os.fork()
planned.run(q, q, q, out)
same = torch.equal(sdpa_cutlass.attention(q, q, q), expected) and torch.equal(out, expected)
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("callee", FUNCTIONS | OPERATORS)
def test_another_stream(callee: str) -> None:
    call, shape = (FUNCTIONS | OPERATORS)[callee]
    inputs = tensors(shape, "cuda")
    expected = call(*inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = call(*inputs)
    stream.synchronize()
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("callee", FUNCTIONS | OPERATORS)
def test_another_device_than_the_current_one(callee: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    call, shape = (FUNCTIONS | OPERATORS)[callee]
    inputs = tensors(shape, "cuda:1")
    with torch.cuda.device(0):
        got = call(*inputs)
    with torch.cuda.device(1):
        assert torch.equal(got, call(*inputs))


def test_the_table_is_in_the_document() -> None:
    """Else: put what `table()` gives in the place of the old one."""
    assert f"\n{table()}\n" in DOCUMENT.read_text(encoding="utf-8")
