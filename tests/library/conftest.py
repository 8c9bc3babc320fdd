"""Fixtures of the tests of enable(), of calls without torch, of known signatures, and of gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from sdpa_cutlass.call import call_table, calls, growing, launch
from sdpa_cutlass.call.plan_cache import Plans
from sdpa_cutlass.integrations import usage
from sdpa_cutlass.library import launcher
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Op
from sdpa_cutlass.problem import ATTENTION_DTYPES
from sdpa_cutlass.public.api import kernels
from tests.library.torch_calls import ORIGINAL

_GRADIENTS_HEAD_DIM = 64  # of the tests of gradients


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes every signature unknown."""

    def forget_all() -> None:
        monkeypatch.setattr(calls, "_plain", Plans())
        monkeypatch.setattr(calls, "_general", Plans())
        monkeypatch.setattr(calls, "_packed", Plans())
        monkeypatch.setattr(growing, "_known", {})
        monkeypatch.setattr(call_table, "table", None)
        monkeypatch.setattr(call_table, "latest", None)

    return forget_all


@pytest.fixture(params=["compiled", "python"])
def _call_path(
    request: pytest.FixtureRequest, forget: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known signatures take the compiled path, or the one that there always is."""
    if request.param == "python":
        monkeypatch.setattr(launcher, "module", lambda: None)
    else:
        request.getfixturevalue("_compiled_only")
    forget()


@pytest.fixture
def _compiled_only(forget: Callable[[], None]) -> None:
    """Skips where there is no compiled launcher; known signatures are forgotten."""
    if not launcher.is_used():
        pytest.skip("no compiled launcher for this Python and torch")
    forget()


@pytest.fixture
def without_python(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """When called, takes the launch through Python away."""

    def take_away() -> None:
        monkeypatch.setattr(launch.Plan, "launch_at", None)

    return take_away


@pytest.fixture
def module() -> ModuleType:
    """The compiled launcher."""
    found = launcher.module()
    assert found is not None
    return found


@pytest.fixture
def _torch_is_left_as_found() -> Iterator[None]:
    torch._dynamo.reset()
    assert F.scaled_dot_product_attention is ORIGINAL
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert usage.watchers == ()


@pytest.fixture
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays find no torch, although it is installed."""
    monkeypatch.setattr(calls, "has_torch", lambda: False)


@pytest.fixture
def _gradient_kernels(request: pytest.FixtureRequest) -> None:
    """Skips where the library was built with some kernels only, and lacks some that gradients need."""
    target = Target.CUDA if "cuda" in request.node.name else Target.HOST
    if not library(target).build.space.endswith("_filtered"):
        return
    for dtype, op, has_dropout in product(ATTENTION_DTYPES, (Op.FORWARD, Op.BACKWARD), (False, True)):
        if not any(
            (row.dtype, row.op, row.has_dropout) == (dtype, op, has_dropout)
            and row.is_general
            and row.head_dim >= _GRADIENTS_HEAD_DIM
            for row in kernels(target)
        ):
            pytest.skip(f"the library has no {op.name} kernel of {dtype.value} with dropout={has_dropout}")
