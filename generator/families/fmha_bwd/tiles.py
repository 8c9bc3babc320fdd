"""THE file to edit for the backward kernels: which of them are built.

A tile is written as in the names: m<block_m>n<block_n>_s<stages>_w<warps>_q<dq_block_m>k<dq_block_n>.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from generator.core.arch import Arch
from generator.core.kernel import DType
from generator.core.space import Listing
from generator.families.fmha_bwd.config import FmhaBwd, FmhaBwdTile

TilesByHeadDim = Mapping[int, Sequence[FmhaBwdTile]]


def tiles(*names: str) -> tuple[FmhaBwdTile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(FmhaBwdTile.parse(name) for name in names)


# Smaller head dimensions are served by the next larger one. Above 128 registers do not hold dK and dV at
# once: tiles have one stage.
# At 192, m64n64_s1_w4_q64k64 spills 24 bytes a thread where there may be a mask.
TILES: TilesByHeadDim = {
    64: tiles("m64n64_s2_w4_q64k64"),
    96: tiles("m32n64_s2_w4_q64k64"),
    128: tiles("m32n64_s2_w4_q64k64"),
    192: tiles("m32n64_s1_w4_q64k32"),
    256: tiles("m32n64_s1_w4_q64k32"),
}

# The sweep, in fp16, for every head_dim: as far as the rules allow.
SWEEP_TILES = tiles(
    "m32n64_s1_w4_q64k32",
    "m64n64_s1_w4_q64k64",
    "m64n64_s2_w4_q64k64",
    "m32n64_s2_w4_q64k64",
    "m32n64_s2_w4_q128k32",
    "m32n128_s2_w4_q64k64",
    "m32n128_s2_w4_q128k32",
    "m32n128_s2_w4_q128k64",
    "m32n128_s2_w8_q128k32",
    "m64n128_s2_w4_q128k64",
    "m64n128_s2_w8_q128k64",
)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for
    tiles: TilesByHeadDim


TABLES = Tables(arch=Arch.SM89, tiles=TILES)


def smoke(tables: Tables = TABLES) -> Listing:
    """The first tile of every head_dim, in one dtype by turns, one of two with dropout."""
    kernels: list[FmhaBwd] = []
    for i, (head_dim, listed) in enumerate(sorted(tables.tiles.items())):
        dtype = tuple(DType)[i % 2]
        kernels += _kernels(tables.arch, {head_dim: listed[:1]}, (dtype,), (i % 4 in (1, 2),))
    return Listing(kernels=kernels)


def release(tables: Tables = TABLES) -> Listing:
    """Every tile in every dtype, with dropout and without."""
    return Listing(kernels=_kernels(tables.arch, tables.tiles))


def sweep(tables: Tables = TABLES) -> Listing:
    """The tiles above without dropout, for every head_dim that ships."""
    return Listing(
        tried=(
            tuple(_kernels(tables.arch, {head_dim: (tile,)}, (DType.F16,), (False,)))
            for head_dim, tile in product(tables.tiles, SWEEP_TILES)
        )
    )


def _kernels(
    arch: Arch,
    table: TilesByHeadDim,
    dtypes: Iterable[DType] = tuple(DType),
    dropout: Iterable[bool] = (False, True),
) -> Iterator[FmhaBwd]:
    for head_dim, listed in table.items():
        for tile, dtype, has_dropout in product(listed, dtypes, dropout):
            yield FmhaBwd(arch=arch, head_dim=head_dim, tile=tile, dtype=dtype, dropout=has_dropout)
