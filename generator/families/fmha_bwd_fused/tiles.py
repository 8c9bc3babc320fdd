"""THE file to edit for the fused backward kernels: which of them are built.

A tile is written as in the names: m<block_m>n<block_n>_s<stages>_w<warps>.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from generator.core.arch import Arch
from generator.core.kernel import DType, Tile
from generator.core.space import Listing
from generator.families.fmha_bwd_fused.config import FmhaBwdFused

TilesByHeadDim = Mapping[int, Sequence[Tile]]


def tiles(*names: str) -> tuple[Tile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(Tile.parse(name) for name in names)


# Smaller head dimensions are served by the next larger one.
TILES: TilesByHeadDim = {
    64: tiles("m32n128_s2_w4"),
    96: tiles("m32n64_s2_w4"),
    128: tiles("m32n64_s2_w4"),
}

# Those with dropout, whose state takes registers.
DROPOUT_TILES: TilesByHeadDim = {
    64: tiles("m64n64_s2_w4"),
    96: tiles("m32n64_s2_w4"),
    128: tiles("m32n64_s2_w4"),
}

# The sweep, in fp16, for every head_dim: as far as the rules allow.
SWEEP_TILES = tiles(
    "m32n64_s2_w4",
    "m64n64_s2_w4",
    "m32n128_s2_w4",
    "m32n128_s2_w8",
    "m64n128_s2_w8",
)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for
    tiles: TilesByHeadDim
    dropout_tiles: TilesByHeadDim


TABLES = Tables(arch=Arch.SM89, tiles=TILES, dropout_tiles=DROPOUT_TILES)


def smoke(tables: Tables = TABLES) -> Listing:
    """The first tile of every head_dim, in one dtype by turns."""
    kernels: list[FmhaBwdFused] = []
    for i, (head_dim, listed) in enumerate(sorted(tables.tiles.items())):
        kernels += _kernels(tables.arch, {head_dim: listed[:1]}, (tuple(DType)[i % 2],))
    return Listing(kernels=kernels)


def release(tables: Tables = TABLES) -> Listing:
    """Every tile in every dtype, and those with dropout."""
    with_dropout = _kernels(tables.arch, tables.dropout_tiles, dropout=True)
    return Listing(kernels=[*_kernels(tables.arch, tables.tiles), *with_dropout])


def sweep(tables: Tables = TABLES) -> Listing:
    """The tiles above, for every head_dim that ships."""
    return Listing(
        tried=(
            tuple(_kernels(tables.arch, {head_dim: (tile,)}, (DType.F16,)))
            for head_dim, tile in product(tables.tiles, SWEEP_TILES)
        )
    )


def _kernels(
    arch: Arch, table: TilesByHeadDim, dtypes: Iterable[DType] = tuple(DType), *, dropout: bool = False
) -> Iterator[FmhaBwdFused]:
    for head_dim, listed in table.items():
        for tile, dtype in product(listed, dtypes):
            yield FmhaBwdFused(arch=arch, head_dim=head_dim, tile=tile, dtype=dtype, dropout=dropout)
