"""Fixtures of the tests of enable()."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from sdpa_cutlass import torch_sdpa
from tests.library.torch_calls import ORIGINAL


@pytest.fixture
def _torch_is_left_as_found() -> Iterator[None]:
    torch._dynamo.reset()
    assert F.scaled_dot_product_attention is ORIGINAL
    yield
    assert F.scaled_dot_product_attention is ORIGINAL
    assert torch_sdpa._state.watchers == ()
