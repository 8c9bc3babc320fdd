"""THE file to edit for the baseline: which GEMM tiles are built.

A tile is written as in the kernels' names: m<block_m>n<block_n>_s<stages>_w<warps>. The head_dims are
those of the fused kernels, whose baseline this is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from generator.core.arch import Arch
from generator.core.kernel import DType, Tile
from generator.core.space import Listing
from generator.families.fmha_fwd.tiles import PLAIN_TILES
from generator.families.unfused.config import Unfused
from generator.families.unfused.rules import MAX_HEAD_DIM


def tiles(*names: str) -> tuple[Tile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(Tile.parse(name) for name in names)


# For every head_dim of the fused kernels up to MAX_HEAD_DIM; the last is the one in `smoke`.
UNFUSED_TILES: tuple[Tile, ...] = tiles("m128n128_s3_w4", "m64n64_s4_w4")


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for
    head_dims: Sequence[int]  # those above MAX_HEAD_DIM have no baseline
    tiles: Sequence[Tile]


TABLES = Tables(arch=Arch.SM89, head_dims=tuple(PLAIN_TILES), tiles=UNFUSED_TILES)


def smoke(tables: Tables = TABLES) -> Listing:
    """The last tile."""
    return release(replace(tables, tiles=tables.tiles[-1:]))


def release(tables: Tables = TABLES) -> Listing:
    """Every tile in every head_dim and dtype."""
    return Listing(kernels=_kernels(tables, tuple(DType)))


def sweep(tables: Tables = TABLES) -> Listing:
    """The same in fp16: what fused kernels are compared with."""
    return Listing(kernels=_kernels(tables, (DType.F16,)))


def _kernels(tables: Tables, dtypes: Sequence[DType]) -> Iterator[Unfused]:
    head_dims = [head_dim for head_dim in tables.head_dims if head_dim <= MAX_HEAD_DIM]
    for head_dim, tile, dtype, causal in product(head_dims, tables.tiles, dtypes, (False, True)):
        yield Unfused(arch=tables.arch, head_dim=head_dim, tile=tile, dtype=dtype, causal=causal)
