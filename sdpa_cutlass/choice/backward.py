"""Problem → the kernel that makes its gradients: the cheapest legal one of both families, by the models."""

from __future__ import annotations

import fnmatch
import functools
from typing import TYPE_CHECKING

from ..errors import NoKernelError
from ..library.device import DeviceInfo
from ..library.registry import Family, KernelInfo, read_kernels
from ..library.structs import BwdParams
from ..problem import Problem
from .legal import mismatches, unsupported
from .select import forced_pattern, ranking

if TYPE_CHECKING:
    from ..library.abi import Library

_NEAREST = 5  # refused kernels that an error lists


@functools.lru_cache(maxsize=1024)
def legal_kernels(library: Library, problem: Problem, device: DeviceInfo) -> tuple[KernelInfo, ...]:
    """Those whose rows say that they can, on `device`, the cheapest first. May be empty."""
    return tuple(kernel for kernel, _ in ranking(library, problem, Family.FMHA_BWD, device))


def why_none(library: Library, problem: Problem, device: DeviceInfo) -> str:
    """What speaks against each of the kernels that come nearest to `problem`, none of which is legal."""
    rows = [kernel for kernel in read_kernels(library) if kernel.serves(Family.FMHA_BWD)]
    if not rows:
        return f"the library at {library.path} has no backward kernel"
    found = []
    for kernel in sorted(rows, key=lambda kernel: (len(mismatches(kernel, problem)), kernel.head_dim)):
        elsewhere = unsupported(kernel, library, device)
        reasons = mismatches(kernel, problem) + ([elsewhere] if elsewhere else [])
        found.append(f"{kernel.name}: {'; '.join(reasons)}")
    return ". ".join(found[:_NEAREST])


def choose_backward(
    library: Library, problem: Problem, device: DeviceInfo, params: BwdParams, *, name: str | None = None
) -> KernelInfo:
    """The kernel for `problem` with the strides and addresses of `params`. Raises NoKernelError.

    With `name`, that very kernel. `SDPA_CUTLASS_FORCE_KERNEL` narrows the choice as it does the forward's:
    see select.py.
    """
    forced = _forced(library) if name is None else frozenset((name,))
    reason = ""
    for kernel in legal_kernels(library, problem, device):
        if forced is not None and kernel.name not in forced:
            continue
        refusal = library.backward_refusal(kernel.index, params)
        if refusal is None:
            return kernel
        reason = reason or f"{kernel.name}: {refusal}"
    if name is not None:
        raise NoKernelError(f"kernel={name!r} cannot make the gradients of {problem}. {reason}")
    raise NoKernelError(
        f"no backward kernel can run {problem}: {reason or why_none(library, problem, device)}"
    )


@functools.cache
def _forced(library: Library) -> frozenset[str] | None:
    """The backward kernels whose names match the environment variable; None when it names none of them."""
    pattern = forced_pattern()
    if pattern is None:
        return None
    rows = (kernel for kernel in read_kernels(library) if kernel.serves(Family.FMHA_BWD))
    return frozenset(kernel.name for kernel in rows if fnmatch.fnmatchcase(kernel.name, pattern)) or None


@functools.cache
def largest_head_dim(library: Library, device: DeviceInfo) -> int:
    """Of the backward kernels that run on `device`; 0 when there is none."""
    rows = [kernel for kernel in read_kernels(library) if kernel.serves(Family.FMHA_BWD)]
    return max((row.head_dim for row in rows if unsupported(row, library, device) is None), default=0)
