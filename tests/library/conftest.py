"""Fixtures of the tests of enable(), and of calls without torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sdpa_cutlass import calls, torch_sdpa
from tests.library.torch_calls import ORIGINAL


@pytest.fixture
def _torch_is_left_as_found() -> Iterator[None]:
    torch._dynamo.reset()
    assert F.scaled_dot_product_attention is ORIGINAL
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch_sdpa._state.watchers == ()


@pytest.fixture
def _without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays find no torch, although it is installed."""
    monkeypatch.setattr(calls, "has_torch", lambda: False)
