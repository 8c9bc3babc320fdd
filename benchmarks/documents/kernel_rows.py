"""The kernels of the space `release` as registry rows, without a library: from the generator.

What the rows of a built library say is checked elsewhere (tests/library/test_capabilities.py and the units'
own assertions); here they are what the cost models price.
"""

from __future__ import annotations

import functools

from generator.core.kernel import Kernel
from generator.families import FAMILIES
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo, Op, Takes
from sdpa_cutlass.problem import DType


@functools.cache
def release() -> tuple[KernelInfo, ...]:
    """Every row that a library of the space `release` has."""
    kernels = FAMILIES.build("release").kernels
    return tuple(_row(index, kernel) for index, kernel in enumerate(kernels))


def _row(index: int, kernel: Kernel) -> KernelInfo:
    takes = Takes(0)
    for name in kernel.takes_names:
        takes |= Takes[name]
    return KernelInfo(
        index=index,
        name=kernel.name,
        family=Family(kernel.family),
        op=Op[kernel.op.name],
        accuracy=Accuracy[kernel.accuracy.name],
        dtype=DType(kernel.dtype.value),
        arch=kernel.arch.limits.compute_capability,
        code=kernel.code,
        head_dim=kernel.head_dim,
        takes=takes,
        details=tuple((name, int(value)) for name, value in kernel.details.items()),
        smem_bytes=kernel.smem_bytes,
        ctas_per_sm=kernel.ctas_per_sm,
    )
