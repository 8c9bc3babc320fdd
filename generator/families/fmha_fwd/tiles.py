"""THE file to edit for the fused kernels: which of them are built.

To add a head_dim or a tile, add one line (or one name) to a table below; every space and every unit follows.
A tile is written as in the kernels' names: m<block_m>n<block_n>_s<stages>_w<warps>[_g<kv_groups>][_qreg].
`python -m generator --explain NAME` says whether a tile is legal, and what it costs; a listed tile must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product

from generator.core.arch import Arch
from generator.core.kernel import DType
from generator.core.space import Listing
from generator.families.fmha_fwd.config import FmhaFwd, FmhaTile

TilesByHeadDim = Mapping[int, Sequence[FmhaTile]]


def tiles(*names: str) -> tuple[FmhaTile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(FmhaTile.parse(name) for name in names)


DTYPES: tuple[DType, ...] = (DType.F16, DType.BF16)

# head_dim → tiles of the plain fused kernels, causal and not; the first is the one in `smoke`.
PLAIN_TILES: dict[int, tuple[FmhaTile, ...]] = {
    32: tiles("m128n64_s2_w4", "m64n64_s2_w4", "m32n128_s1_w4_g2"),
    64: tiles(
        "m128n64_s2_w4_qreg",
        "m64n128_s1_w4",
        "m64n64_s1_w4",
        "m128n80_s1_w4",  # 77 text tokens in one step
        "m32n128_s1_w4_g2",
        "m32n32_s1_w4_g2",  # two small CTAs an SM: for cards with few SMs
        "m16n64_s1_w4_g4",
    ),
    80: tiles("m128n64_s1_w4_qreg", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    96: tiles("m128n64_s1_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    128: tiles("m128n48_s1_w4", "m128n32_s1_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    160: tiles("m128n64_s1_w8", "m64n64_s1_w4", "m32n32_s1_w4_g2"),
    192: tiles("m128n64_s1_w8", "m64n64_s1_w4", "m32n32_s1_w4_g2"),
    256: tiles("m128n32_s1_w8", "m64n64_s1_w4", "m64n32_s1_w4", "m16n16_s1_w2_g2"),
}

# head_dim → tiles of the general kernels, which take masks, lengths and smaller head_dims; each comes
# with and without dropout. A tile that is listed above too shares its unit. `smoke` has one of these tiles:
# the first of SMOKE_GENERAL_HEAD_DIM.
GENERAL_TILES: dict[int, tuple[FmhaTile, ...]] = {
    32: tiles("m128n64_s2_w4", "m64n64_s2_w4"),
    64: tiles("m128n64_s2_w4_qreg", "m64n64_s1_w4", "m32n128_s1_w4_g2"),
    80: tiles("m128n64_s1_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    96: tiles("m128n32_s2_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    128: tiles("m128n32_s2_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    160: tiles("m64n64_s1_w4"),
    192: tiles("m64n64_s1_w4", "m16n32_s1_w2_g2"),
    256: tiles("m64n32_s1_w4", "m32n32_s1_w2"),
}
SMOKE_GENERAL_HEAD_DIM = 64

# head_dim → tiles of the unbiased kernels: general without biases and dropout. They are for tiles that are
# faster than those above and have registers for a boolean mask at most.
UNBIASED_TILES: dict[int, tuple[FmhaTile, ...]] = {
    96: tiles("m128n64_s1_w4"),
}

# head_dim → tiles of the split kernels, for few query rows and many keys: general, without masks and dropout.
# They serve every head_dim up to theirs: memory bounds them, and columns that do not exist cost none of it.
SPLIT_TILES: dict[int, tuple[FmhaTile, ...]] = {
    32: tiles("m64n128_s1_w4"),
    64: tiles("m16n32_s1_w2_g2", "m16n64_s1_w4_g4", "m32n64_s1_w8_g4", "m64n64_s1_w2"),
    96: tiles("m64n64_s1_w8_g2"),
    128: tiles("m16n16_s1_w2_g2", "m16n32_s1_w4_g4", "m32n32_s1_w8_g4", "m64n32_s1_w2", "m64n64_s1_w4"),
    192: tiles("m16n16_s1_w2_g2", "m16n16_s1_w4_g4", "m32n32_s1_w4_g2", "m64n64_s1_w4"),
    256: tiles("m16n16_s1_w2_g2", "m16n16_s1_w4_g4", "m32n16_s1_w4_g2", "m64n64_s1_w4"),
}

# The sweep, for every head_dim of PLAIN_TILES. Warps and KV groups go with every block.
SWEEP_BLOCK_M = (16, 32, 64, 96, 128)
SWEEP_BLOCK_N = (16, 32, 48, 64, 80, 96, 112, 128)
SWEEP_STAGES = (1, 2, 3)
SWEEP_WARPS = (2, 4, 6, 8)
SWEEP_KV_GROUPS = (1, 2, 4)
SWEEP_Q_IN_REGS = (False, True)
SWEEP_DTYPES: tuple[DType, ...] = (DType.F16,)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    arch: Arch  # that the tiles were chosen for: another one needs tables of its own
    plain: TilesByHeadDim
    general: TilesByHeadDim = field(default_factory=dict)
    split: TilesByHeadDim = field(default_factory=dict)
    unbiased: TilesByHeadDim = field(default_factory=dict)


TABLES = Tables(
    arch=Arch.SM89, plain=PLAIN_TILES, general=GENERAL_TILES, split=SPLIT_TILES, unbiased=UNBIASED_TILES
)

# What the kernels of one tile and dtype differ in.
Variant = Callable[..., FmhaFwd]
PLAIN: tuple[Variant, ...] = (FmhaFwd, partial(FmhaFwd, causal=True))
GENERAL: tuple[Variant, ...] = (partial(FmhaFwd, general=True), partial(FmhaFwd, general=True, dropout=True))
SPLIT: tuple[Variant, ...] = (partial(FmhaFwd, general=True, split=True),)
UNBIASED: tuple[Variant, ...] = (partial(FmhaFwd, general=True, unbiased=True),)


def smoke(tables: Tables = TABLES) -> Listing:
    """Every head_dim once in each dtype, one of the two causal; one kernel with KV groups; one general tile
    and one split.
    """
    kernels: list[FmhaFwd] = []
    for i, (head_dim, listed) in enumerate(sorted(tables.plain.items())):
        for j, dtype in enumerate(DTYPES):
            kernels += _kernels(tables.arch, {head_dim: listed[:1]}, PLAIN[(i + j) % 2 :][:1], (dtype,))
    grouped = (
        {head_dim: (tile,)}
        for head_dim, listed in sorted(tables.plain.items())
        for tile in listed
        if tile.kv_groups > 1
    )
    kernels += _kernels(tables.arch, next(grouped, {}), PLAIN[1:], (DType.F16,))
    for table, variants in ((tables.general, GENERAL), (tables.split, SPLIT)):
        first = {SMOKE_GENERAL_HEAD_DIM: table.get(SMOKE_GENERAL_HEAD_DIM, ())[:1]}
        kernels += _kernels(tables.arch, first, variants)
    return Listing(kernels=kernels)


def release(tables: Tables = TABLES) -> Listing:
    """Every tile of the tables, in every dtype and in all the variants of its table."""
    chosen = (
        (tables.plain, PLAIN),
        (tables.general, GENERAL),
        (tables.split, SPLIT),
        (tables.unbiased, UNBIASED),
    )
    return Listing(kernels=chain(*(_kernels(tables.arch, table, variants) for table, variants in chosen)))


def sweep(tables: Tables = TABLES) -> Listing:
    """The product of the axes above, plain and causal, for every head_dim."""
    axes = product(SWEEP_BLOCK_M, SWEEP_BLOCK_N, SWEEP_STAGES, SWEEP_WARPS, SWEEP_KV_GROUPS, SWEEP_Q_IN_REGS)
    swept = [
        FmhaTile(block_m=m, block_n=n, stages=stages, warps=warps, kv_groups=kv_groups, q_in_regs=q_in_regs)
        for m, n, stages, warps, kv_groups, q_in_regs in axes
    ]
    return Listing(
        tried=(
            tuple(_kernels(tables.arch, {head_dim: (tile,)}, PLAIN, SWEEP_DTYPES))
            for head_dim, tile in product(tables.plain, swept)
        )
    )


def _kernels(
    arch: Arch, table: TilesByHeadDim, variants: Iterable[Variant], dtypes: Iterable[DType] = DTYPES
) -> Iterator[FmhaFwd]:
    for head_dim, listed in table.items():
        for tile, dtype, variant in product(listed, dtypes, variants):
            yield variant(arch=arch, head_dim=head_dim, tile=tile, dtype=dtype)
