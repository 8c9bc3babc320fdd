"""The kernels of the space `release` as registry rows, without a library: from the generator.

tests/documents/test_predictions.py holds them to the rows of the host library.
"""

from __future__ import annotations

import functools

from generator.core.kernel import Kernel
from generator.families import FAMILIES
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo, Op, Takes
from sdpa_cutlass.problem import DType

# The baseline launches several functions: a row has the shared memory of the largest, and one CTA on an SM.
PV_SMEM_BYTES = 49152  # of the second GEMM at every tile (templates/include/sdpa/unfused/tile.hpp)


@functools.cache
def release() -> tuple[KernelInfo, ...]:
    """Every row that a library of the space `release` has."""
    kernels = FAMILIES.build("release").kernels
    return tuple(_row(index, kernel) for index, kernel in enumerate(kernels))


def _row(index: int, kernel: Kernel) -> KernelInfo:
    takes = Takes(0)
    for name in kernel.takes_names:
        takes |= Takes[name]
    smem_bytes, ctas_per_sm = kernel.smem_bytes, kernel.ctas_per_sm
    if kernel.family == Family.UNFUSED.value:
        smem_bytes, ctas_per_sm = max(smem_bytes, PV_SMEM_BYTES), 1
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
        smem_bytes=smem_bytes,
        ctas_per_sm=ctas_per_sm,
    )
