"""Which kernels may run a problem, by their registry rows alone: legal ones, in no order.

The code of a kernel has to run on the device (`unsupported`), and its row has to take the problem
(`mismatches`). What the library has against strides and alignment is asked in select.py.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ..library.device import DeviceInfo, archs_serve
from ..library.locate import Target
from ..library.registry import TAKES_OF_MASK, Asked, KernelInfo, Takes, read_kernels
from ..problem import Problem

if TYPE_CHECKING:
    from ..library.abi import Library


def mismatches(kernel: KernelInfo, problem: Problem) -> list[str]:
    """What the registry row alone says against running `problem`; empty when nothing does.

    Reads nothing of `problem` but its `kind`.
    """
    found = []
    if kernel.dtype is not problem.dtype:
        found.append(f"dtype is {kernel.dtype.value}, not {problem.dtype.value}")
    missing = needs(kernel, problem) & ~kernel.takes
    found += dict.fromkeys(_lacks(kernel, problem, bit) for bit in Takes if bit in missing)
    if Takes.SMALLER_HEAD_DIM in kernel.takes and kernel.head_dim < max(problem.head_dim, problem.head_dim_v):
        found.append(f"head_dim is at most {kernel.head_dim}")
    return found


def needs(kernel: KernelInfo, problem: Problem) -> Takes:
    """What `problem` needs of `kernel`: the library's question to its rows, of a kind of problem."""
    found = Takes.CAUSAL if problem.is_causal else Takes.FULL
    found |= TAKES_OF_MASK[problem.mask]
    found |= Takes.DROPOUT if problem.has_dropout else Takes.UNDROPPED
    if problem.has_lengths:
        found |= Takes.LENGTHS | Takes.PACKED
    if not problem.head_dim == problem.head_dim_v == kernel.head_dim:
        found |= Takes.SMALLER_HEAD_DIM
    if problem.window is not None:
        found |= Takes.WINDOW
    if problem.has_sinks:
        found |= Takes.SINKS
    return found


def _lacks(kernel: KernelInfo, problem: Problem, bit: Takes) -> str:
    """What `bit` says about a kernel without it."""
    if bit is Takes.SMALLER_HEAD_DIM:
        if kernel.head_dim != problem.head_dim:
            return f"head_dim is {kernel.head_dim}, not {problem.head_dim}"
        return "value's head_dim is query's"
    if bit in (Takes.BOOL, Takes.BIAS16, Takes.BIAS32):
        return "takes no bias" if Takes.BOOL in kernel.takes else "takes no mask"
    return _WITHOUT[bit]


_WITHOUT = {
    Takes.FULL: "is causal",
    Takes.CAUSAL: "is not causal",
    Takes.LENGTHS: "takes no lengths",
    Takes.PACKED: "takes no lengths",
    Takes.UNDROPPED: "applies dropout",
    Takes.DROPOUT: "applies no dropout",
    Takes.WINDOW: "takes no window",
    Takes.SINKS: "takes no sinks",
}


def unsupported(kernel: KernelInfo, library: Library, device: DeviceInfo) -> str | None:
    """Why the code of `kernel` does not run on `device`, or None when it does.

    The host runs every kernel.
    """
    if device.target is Target.HOST or _runs_on(kernel, library, device.compute_capability):
        return None
    major, minor = device.compute_capability
    return f"is for sm_{kernel.arch}, and {device.name} is sm_{major}{minor}"


def _runs_on(kernel: KernelInfo, library: Library, compute_capability: tuple[int, int]) -> bool:
    """Machine code with the instructions of one architecture runs there alone. Other code is machine code of
    `kernel.arch` and PTX, which newer GPUs run too; on an older GPU of the same major version, it runs if the
    library was built for that one as well.
    """
    if kernel.is_for_one_arch:
        return archs_serve(kernel.code, compute_capability)
    major, minor = compute_capability
    if kernel.arch <= 10 * major + minor:
        return True
    return kernel.arch // 10 == major and archs_serve(library.build.archs, compute_capability)


@functools.cache
def competing(library: Library, family: Asked, device: DeviceInfo) -> tuple[KernelInfo, ...]:
    """The rows that compete for `family` and run on `device`, or on the GPU that the host stands for."""
    rows = (kernel for kernel in read_kernels(library) if kernel.serves(family))
    return tuple(kernel for kernel in rows if _runs_on(kernel, library, device.compute_capability))
