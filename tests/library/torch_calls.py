"""torch's own attention, its inputs and comparisons with it, for the tests of enable()."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ORIGINAL = F.scaled_dot_product_attention
"""What enable() replaces."""


def half(*shape: int, device: str = "cpu", seed: int = 0) -> torch.Tensor:
    """The same random float16 tensor on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.float16)


def close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises AssertionError unless both agree within float16's rounding of values around 1."""
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(out.float(), expected.float(), atol=3e-3, rtol=3e-3)
