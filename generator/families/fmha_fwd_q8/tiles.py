"""THE file to edit for the quantised kernels: which of them are built.

A tile is written as in the kernels' names: m<block_m>n<block_n>_s<stages>_w<warps>[_g<kv_groups>]. Every
kernel serves smaller head_dims too, so a head_dim that is missing here is served by the next larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from generator.core.arch import Arch
from generator.core.kernel import DType
from generator.core.space import Listing
from generator.families.fmha_fwd_q8.config import FmhaFwdQ8, Math, Q8Tile

TilesByHeadDim = Mapping[int, Sequence[Q8Tile]]


def tiles(*names: str) -> tuple[Q8Tile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(Q8Tile.parse(name) for name in names)


# math → head_dim → tiles.
TILES: dict[Math, dict[int, tuple[Q8Tile, ...]]] = {
    Math.INT8: {
        64: tiles("m64n64_s2_w4"),
        128: tiles("m64n64_s2_w4"),
    },
    Math.INT8_QK: {
        64: tiles("m128n64_s2_w4"),
        128: tiles("m64n64_s2_w4"),  # 128 rows spill
    },
}

# The same of the split kernels, for few query rows and many keys: without masks.
SPLIT_TILES: dict[Math, dict[int, tuple[Q8Tile, ...]]] = {
    math: {64: tiles("m16n64_s1_w4_g4"), 128: tiles("m16n64_s1_w4_g4")} for math in Math
}

# The sweep, for every math and head_dim of TILES.
SWEEP_ROWS = ((64, 4), (128, 4), (128, 8))  # block_m, warps
SWEEP_STAGES = (2, 3)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for
    tiles: Mapping[Math, TilesByHeadDim]
    split: Mapping[Math, TilesByHeadDim] = field(default_factory=dict)


TABLES = Tables(arch=Arch.SM89, tiles=TILES, split=SPLIT_TILES)


def smoke(tables: Tables = TABLES) -> Listing:
    """The first tile of each math in one dtype, of the smallest head_dim, split and not."""
    kernels: list[FmhaFwdQ8] = []
    for split, by_math in ((False, tables.tiles), (True, tables.split)):
        for i, (math, table) in enumerate(by_math.items()):
            head_dim = min(table)
            dtype = tuple(DType)[i % 2]
            first = {head_dim: table[head_dim][:1]}
            kernels += _kernels(tables.arch, math, first, (dtype,), split=split)
    return Listing(kernels=kernels)


def release(tables: Tables = TABLES) -> Listing:
    """Every tile in every dtype."""
    return Listing(
        kernels=(
            kernel
            for split, by_math in ((False, tables.tiles), (True, tables.split))
            for math, table in by_math.items()
            for kernel in _kernels(tables.arch, math, table, tuple(DType), split=split)
        )
    )


def sweep(tables: Tables = TABLES) -> Listing:
    """The product of the axes above in fp16, for every math and head_dim."""
    swept = [
        Q8Tile(block_m=m, block_n=64, stages=stages, warps=warps)
        for (m, warps), stages in product(SWEEP_ROWS, SWEEP_STAGES)
    ]
    return Listing(
        tried=(
            tuple(_kernels(tables.arch, math, {head_dim: (tile,)}, (DType.F16,)))
            for math, table in tables.tiles.items()
            for head_dim, tile in product(table, swept)
        )
    )


def _kernels(
    arch: Arch, math: Math, table: TilesByHeadDim, dtypes: Iterable[DType], *, split: bool = False
) -> Iterator[FmhaFwdQ8]:
    for head_dim, listed in table.items():
        for tile, dtype in product(listed, dtypes):
            yield FmhaFwdQ8(arch=arch, head_dim=head_dim, tile=tile, dtype=dtype, math=math, split=split)
