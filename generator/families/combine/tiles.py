"""THE file to edit for the kernels that merge partial results: which of them are built.

A tile is written as in the kernels' names: s<stages>_w<warps>.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from generator.core.arch import Arch
from generator.core.space import Listing
from generator.families.combine.config import Combine, CombineTile, PartType

ARCH = Arch.SM89
HEAD_DIM = 256  # the largest; smaller ones take fewer threads a row
TILES = (CombineTile.parse("s4_w4"),)

# The sweep, in fp32 and fp16.
SWEEP_STAGES = (2, 4, 8)
SWEEP_WARPS = (2, 4, 8)


def smoke() -> Listing:
    """All that ships: the unit is small."""
    return release()


def release() -> Listing:
    """Every tile in every element type."""
    return Listing(kernels=_kernels(TILES, PartType))


def sweep() -> Listing:
    """The product of the axes above."""
    swept = [CombineTile(stages=stages, warps=warps) for stages, warps in product(SWEEP_STAGES, SWEEP_WARPS)]
    return Listing(tried=([kernel] for kernel in _kernels(swept, (PartType.F16, PartType.F32))))


def _kernels(tiles: Iterable[CombineTile], dtypes: Iterable[PartType]) -> Iterator[Combine]:
    for tile, dtype in product(tiles, dtypes):
        yield Combine(arch=ARCH, head_dim=HEAD_DIM, tile=tile, dtype=dtype)
