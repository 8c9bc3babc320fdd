"""Whether a model gives the same with sdpa_cutlass.enabled() as with torch: both against its float32 copy.

The rounding of a whole model in float16 or bfloat16 is what torch's own run of it shows. So this library's
run may be off by at most twice that, plus one unit in the last place of the largest value.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import sdpa_cutlass


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Largest absolute errors of two runs of one model, and what became of the attention calls of ours."""

    error: float
    torch_error: float
    magnitude: float
    """The largest absolute value of the float32 model."""
    dtype: torch.dtype
    served: int
    fallbacks: dict[str, int]

    @property
    def bound(self) -> float:
        """What `error` may be."""
        return 2 * self.torch_error + torch.finfo(self.dtype).eps * self.magnitude

    @property
    def holds(self) -> bool:
        """Whether the results agree; False for a NaN, too."""
        return self.error <= self.bound


def measure(
    model: torch.nn.Module,
    run: Callable[[torch.nn.Module], torch.Tensor],
    *,
    dtype: torch.dtype,
    device: str,
) -> Agreement:
    """Runs `model` with weights rounded to `dtype`: in `dtype` by torch, by this library, and in float32."""
    rounded = copy.deepcopy(model).to(device, dtype)
    with torch.no_grad():
        with exact_attention():
            reference = run(in_float32(rounded)).double()
        by_torch = run(rounded)
        with sdpa_cutlass.enabled(devices=[device]) as usage:
            ours = run(rounded)
    return Agreement(
        error=(ours.double() - reference).abs().max().item(),
        torch_error=(by_torch.double() - reference).abs().max().item(),
        magnitude=reference.abs().max().item(),
        dtype=dtype,
        served=usage.served,
        fallbacks=dict(usage.fallbacks),
    )


def in_float32(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of `model` that computes in float32 with the same weights."""
    return copy.deepcopy(model).float()


@contextlib.contextmanager
def exact_attention() -> Iterator[None]:
    """torch's attention by plain matrix products, and no TF32 in convolutions (in products it is off)."""
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def check(found: Agreement, *, calls: int) -> None:
    """Raises AssertionError unless all `calls` attention calls were served and the results agree."""
    assert (found.served, found.fallbacks) == (calls, {})
    assert found.torch_error < 0.05 * found.magnitude, "the model amplifies rounding: it shows nothing"
    assert found.holds, f"{found}, bound {found.bound}"
