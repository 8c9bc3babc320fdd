"""THE file to edit for Hopper's quantised kernels: which of them are built.

A tile is written as in the kernels' names: m<block_m>n<block_n>_s<stages>_w<warps>. Of the warps, four load,
and four compute for each 64 rows. Every kernel serves smaller head_dims too, so a head_dim that is missing
here is served by the next larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from generator.core.arch import Arch
from generator.core.kernel import DType, Tile
from generator.core.space import Listing
from generator.families.fmha_fwd_q8.config import Math
from generator.families.fmha_fwd_q8_sm90.config import FmhaFwdQ8Sm90

TilesByHeadDim = Mapping[int, Sequence[Tile]]


def tiles(*names: str) -> tuple[Tile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(Tile.parse(name) for name in names)


# head_dim → tiles.
TILES: dict[int, tuple[Tile, ...]] = {
    64: tiles("m192n64_s4_w16"),
    128: tiles("m128n64_s4_w12"),
}

# The sweep.
SWEEP_HEAD_DIMS = (64, 128)
SWEEP_ROWS = ((128, 12), (192, 16))  # block_m, warps
SWEEP_STAGES = (2, 3, 4, 6)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for
    tiles: TilesByHeadDim


TABLES = Tables(arch=Arch.SM90, tiles=TILES)


def smoke(tables: Tables = TABLES) -> Listing:
    """The first tile of the smallest head_dim, in one dtype."""
    head_dim = min(tables.tiles)
    return Listing(kernels=_kernels(tables.arch, {head_dim: tables.tiles[head_dim][:1]}, (DType.F16,)))


def release(tables: Tables = TABLES) -> Listing:
    """Every tile in every dtype."""
    return Listing(kernels=_kernels(tables.arch, tables.tiles))


def sweep(tables: Tables = TABLES) -> Listing:
    """The product of the axes above in fp16, whatever the tables have."""
    swept = [
        Tile(block_m=m, block_n=64, stages=stages, warps=warps)
        for (m, warps), stages in product(SWEEP_ROWS, SWEEP_STAGES)
    ]
    return Listing(
        tried=(
            tuple(_kernels(tables.arch, {head_dim: (tile,)}, (DType.F16,)))
            for head_dim, tile in product(SWEEP_HEAD_DIMS, swept)
        )
    )


def _kernels(
    arch: Arch, table: TilesByHeadDim, dtypes: Iterable[DType] = tuple(DType)
) -> Iterator[FmhaFwdQ8Sm90]:
    for head_dim, listed in table.items():
        for tile, dtype in product(listed, dtypes):
            yield FmhaFwdQ8Sm90(arch=arch, head_dim=head_dim, tile=tile, dtype=dtype, math=Math.INT8)
