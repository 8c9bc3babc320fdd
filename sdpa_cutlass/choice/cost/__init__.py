"""How long a kernel should take: one model a family, in a module of its name.

model_of(kernel, problem, device)   what prices `kernel` for all problems of a kind
estimate(kernel, problem, device)   all that there is to say about one problem
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...errors import LibraryMismatchError
from ...library.device import DeviceInfo
from ...library.registry import Family, KernelInfo
from ...problem import Problem
from .copied_mask import with_copies
from .fmha_bwd import FmhaBwd
from .fmha_bwd_fused import FmhaBwdFused
from .fmha_fwd import FmhaFwd
from .fmha_fwd_q8 import model as fmha_fwd_q8_model
from .fmha_fwd_q8_sm90 import FmhaFwdQ8Sm90
from .fmha_fwd_sm90 import FmhaFwdSm90
from .model import Estimate, Model
from .unfused import Unfused

__all__ = ["MODELS", "Estimate", "Model", "estimate", "model_of"]


MODELS: Mapping[Family, Callable[[KernelInfo, Problem, DeviceInfo], Model]] = {
    Family.FMHA_FWD: with_copies(FmhaFwd),
    Family.FMHA_FWD_SM90: with_copies(FmhaFwdSm90),
    Family.UNFUSED: Unfused,
    Family.FMHA_FWD_Q8: fmha_fwd_q8_model,
    Family.FMHA_FWD_Q8_SM90: FmhaFwdQ8Sm90,
    Family.FMHA_BWD: FmhaBwd,
    Family.FMHA_BWD_FUSED: FmhaBwdFused,
}
"""Every family has one: its kernels are priced by no other's."""


def model_of(kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> Model:
    """The model of `kernel` for all problems of the kind of `problem`, for which it is legal.

    Raises LibraryMismatchError for a family that has none.
    """
    model = MODELS.get(kernel.family)
    if model is None:
        raise LibraryMismatchError(
            f"{kernel.name} is of the family {kernel.family.value}, which has no cost model; those that have "
            f"one: {', '.join(family.value for family in MODELS)}"
        )
    return model(kernel, problem, device)


def estimate(kernel: KernelInfo, problem: Problem, device: DeviceInfo) -> Estimate:
    """What `kernel`, legal for `problem`, should cost on `device`."""
    return model_of(kernel, problem, device).estimate(problem)
