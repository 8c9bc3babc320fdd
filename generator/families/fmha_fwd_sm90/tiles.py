"""THE file to edit for Hopper's fused kernels: which of them are built.

A tile is written as in the kernels' names: m<block_m>n<block_n>_s<stages>_w<warps>[_c<cluster>]. Of the
warps, four load, and four compute for each 64 rows. With _c2 two CTAs load K and V together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product

from generator.core.arch import Arch
from generator.core.kernel import DType
from generator.core.space import Listing
from generator.families.fmha_fwd_sm90.config import MASKED_CONSUMERS, WARPGROUP_ROWS, ClusterTile, FmhaFwdSm90

TilesByHeadDim = Mapping[int, Sequence[ClusterTile]]


def tiles(*names: str) -> tuple[ClusterTile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(ClusterTile.parse(name) for name in names)


# head_dim → tiles of the plain kernels, causal and not; the first is the one in `smoke`.
TILES: dict[int, tuple[ClusterTile, ...]] = {
    64: tiles("m192n128_s3_w16", "m128n128_s3_w12", "m128n48_s3_w12"),
    80: tiles("m192n112_s3_w16", "m128n128_s2_w12"),
    96: tiles("m192n112_s2_w16", "m128n128_s2_w12"),
    128: tiles("m192n80_s3_w16", "m128n128_s2_w12"),
    160: tiles("m128n128_s2_w12"),
    192: tiles("m128n112_s2_w12"),
    256: tiles("m128n64_s2_w12"),
}

# head_dim → tiles of plain kernels whose CTAs come in pairs, causal and not.
PAIRS: dict[int, tuple[ClusterTile, ...]] = {
    96: tiles("m128n128_s2_w12_c2"),
    128: tiles("m128n128_s2_w12_c2"),
    160: tiles("m128n128_s2_w12_c2"),
    192: tiles("m128n112_s2_w12_c2"),
    256: tiles("m128n64_s2_w12_c2"),
}

# head_dim → tiles of the general kernels. Those of 128 rows come with and without dropout, and take masks
# up to head_dim 128.
GENERAL: dict[int, tuple[ClusterTile, ...]] = {
    64: tiles("m192n128_s3_w16", "m128n128_s3_w12"),
    80: tiles("m192n112_s3_w16", "m128n128_s2_w12"),
    96: tiles("m192n112_s2_w16", "m128n128_s2_w12"),
    128: tiles("m192n80_s3_w16", "m128n128_s2_w12"),
    160: tiles("m128n128_s2_w12"),
    192: tiles("m128n96_s2_w12"),
    256: tiles("m128n64_s2_w12"),
}

# head_dim → tiles of the split kernels.
SPLIT: dict[int, tuple[ClusterTile, ...]] = {
    64: tiles("m128n128_s3_w12", "m192n128_s3_w16"),
    80: tiles("m128n128_s2_w12", "m192n112_s3_w16"),
    96: tiles("m128n128_s2_w12", "m192n112_s2_w16"),
    128: tiles("m128n128_s2_w12"),
    160: tiles("m128n128_s2_w12"),
    192: tiles("m128n96_s2_w12"),
    256: tiles("m128n64_s2_w12"),
}

# The sweep, for every head_dim of TILES.
SWEEP_CONSUMERS = (2, 3)
SWEEP_BLOCK_N = (48, 64, 80, 96, 112, 128, 144, 160, 176)
SWEEP_STAGES = (2, 3, 4)


Variant = Callable[..., FmhaFwdSm90]
CAUSAL_VARIANT: Variant = partial(FmhaFwdSm90, causal=True)
PLAIN: tuple[Variant, ...] = (FmhaFwdSm90, CAUSAL_VARIANT)
GENERAL_VARIANT: Variant = partial(FmhaFwdSm90, general=True)
DROPOUT_VARIANT: Variant = partial(FmhaFwdSm90, general=True, dropout=True)
SPLIT_VARIANT: Variant = partial(FmhaFwdSm90, general=True, split=True)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for
    tiles: TilesByHeadDim
    pairs: TilesByHeadDim
    general: TilesByHeadDim
    split: TilesByHeadDim


TABLES = Tables(arch=Arch.SM90, tiles=TILES, pairs=PAIRS, general=GENERAL, split=SPLIT)


def smoke(tables: Tables = TABLES) -> Listing:
    """The first tile of every head_dim in one dtype, one of two causal; a general one, in both dtypes, and a
    split one.
    """
    kernels: list[FmhaFwdSm90] = []
    for head_dim, listed in list(tables.general.items())[:1]:
        kernels += _kernels(tables.arch, {head_dim: listed[:1]}, variants=(GENERAL_VARIANT,))
    for head_dim, listed in list(tables.split.items())[:1]:
        kernels += _kernels(tables.arch, {head_dim: listed[:1]}, (DType.F16,), (SPLIT_VARIANT,))
    for i, (head_dim, listed) in enumerate(sorted(tables.tiles.items())):
        dtype = tuple(DType)[i % 2]
        kernels += _kernels(tables.arch, {head_dim: listed[:1]}, (dtype,), (PLAIN[i % 4 // 2],))
    return Listing(kernels=kernels)


def release(tables: Tables = TABLES) -> Listing:
    """Every tile in every dtype: causal and not, in pairs, split, general, there with dropout if it fits."""
    plain = _kernels(tables.arch, tables.tiles)
    pairs = _kernels(tables.arch, tables.pairs)
    general = _kernels(tables.arch, tables.general, variants=(GENERAL_VARIANT,))
    split = _kernels(tables.arch, tables.split, variants=(SPLIT_VARIANT,))
    return Listing(kernels=chain(plain, pairs, general, _with_dropout(tables), split))


def sweep(tables: Tables = TABLES) -> Listing:
    """The product of the axes above in fp16, plain and causal, for every head_dim."""
    axes = product(SWEEP_CONSUMERS, SWEEP_BLOCK_N, SWEEP_STAGES)
    swept = [
        ClusterTile(block_m=64 * consumers, block_n=n, stages=stages, warps=4 * (consumers + 1))
        for consumers, n, stages in axes
    ]
    return Listing(
        tried=(
            tuple(_kernels(tables.arch, {head_dim: (tile,)}, (DType.F16,)))
            for head_dim, tile in product(tables.tiles, swept)
        )
    )


def _with_dropout(tables: Tables) -> Iterator[FmhaFwdSm90]:
    """The variants with dropout of the general tiles that have registers for it."""
    for head_dim, listed in tables.general.items():
        few = tuple(tile for tile in listed if tile.block_m == WARPGROUP_ROWS * MASKED_CONSUMERS)
        yield from _kernels(tables.arch, {head_dim: few}, variants=(DROPOUT_VARIANT,))


def _kernels(
    arch: Arch,
    table: TilesByHeadDim,
    dtypes: Iterable[DType] = tuple(DType),
    variants: Iterable[Variant] = PLAIN,
) -> Iterator[FmhaFwdSm90]:
    for head_dim, listed in table.items():
        for tile, dtype, variant in product(listed, dtypes, variants):
            yield variant(arch=arch, head_dim=head_dim, tile=tile, dtype=dtype)
