"""THE file to edit: which kernels are built.

To add a head_dim or a tile, add one line (or one name) to a table below; every space and every unit follows.
A tile is written as in the kernels' names: m<block_m>n<block_n>_s<stages>_w<warps>[_g<kv_groups>][_qreg].
`python -m generator --explain NAME` says whether a tile is legal, and what it costs.

    smoke    a few kernels that touch every head_dim, dtype and variant: for a quick build
    release  what ships: every tile of the tables, in every dtype and in all the variants of its table
    sweep    the products below, fp16, plain and causal, as far as the rules allow: for tuning

A tile in a table must be legal. The illegal combinations of a product are dropped: see `Space.rejected`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product

from generator.config import Arch, DType, Family, KernelConfig, Tile
from generator.rules import MAX_HEAD_DIM, refusal


def tiles(*names: str) -> tuple[Tile, ...]:
    """The tiles of these names. Raises InvalidNameError."""
    return tuple(Tile.parse(name) for name in names)


ARCHS: tuple[Arch, ...] = (Arch.SM89,)
DTYPES: tuple[DType, ...] = (DType.F16, DType.BF16)

# head_dim → tiles of the plain fused kernels, causal and not; the first is the one in `smoke`.
FMHA_FWD_TILES: dict[int, tuple[Tile, ...]] = {
    32: tiles("m128n64_s2_w4", "m64n64_s2_w4", "m32n128_s1_w4_g2"),
    64: tiles("m128n64_s2_w4_qreg", "m64n128_s1_w4", "m64n64_s1_w4", "m32n128_s1_w4_g2", "m16n64_s1_w4_g4"),
    80: tiles("m128n64_s1_w4_qreg", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    96: tiles("m128n64_s1_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    128: tiles("m128n48_s1_w4", "m128n32_s1_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    256: tiles("m128n32_s1_w8", "m64n32_s1_w4"),
}

# head_dim → tiles of the general kernels, which take masks, lengths and smaller head_dims; each comes
# with and without dropout. A tile that is listed above too shares its unit. `smoke` has one of these tiles:
# the first of SMOKE_GENERAL_HEAD_DIM.
FMHA_FWD_GENERAL_TILES: dict[int, tuple[Tile, ...]] = {
    32: tiles("m128n64_s2_w4", "m64n64_s2_w4"),
    64: tiles("m128n64_s2_w4_qreg", "m64n64_s1_w4", "m32n128_s1_w4_g2"),
    80: tiles("m128n64_s1_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    96: tiles("m128n32_s2_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    128: tiles("m128n32_s2_w4", "m64n64_s1_w4", "m32n64_s1_w4_g2"),
    256: tiles("m64n32_s1_w4"),
}
SMOKE_GENERAL_HEAD_DIM = 64

# head_dim → tiles of the unbiased kernels: general without biases and dropout. They are for tiles that are
# faster than those above and have registers for a boolean mask at most.
FMHA_FWD_UNBIASED_TILES: dict[int, tuple[Tile, ...]] = {
    96: tiles("m128n64_s1_w4"),
}

# head_dim → tiles of the split kernels, for few query rows and many keys: general, without masks and dropout.
# They serve every head_dim up to theirs: memory bounds them, and columns that do not exist cost none of it.
FMHA_FWD_SPLIT_TILES: dict[int, tuple[Tile, ...]] = {
    64: tiles("m16n64_s1_w4_g4", "m32n64_s1_w8_g4"),
    128: tiles("m16n32_s1_w4_g4", "m32n32_s1_w8_g4"),
}

# Tiles of the unfused GEMMs, for every head_dim of FMHA_FWD_TILES up to 128; the last is the one in `smoke`.
UNFUSED_TILES: tuple[Tile, ...] = tiles("m128n128_s3_w4", "m64n64_s4_w4")

# The sweep, for every head_dim of FMHA_FWD_TILES. Warps and KV groups go with every block.
SWEEP_BLOCK_M = (16, 32, 64, 96, 128)
SWEEP_BLOCK_N = (32, 48, 64, 80, 96, 112, 128)
SWEEP_STAGES = (1, 2, 3)
SWEEP_WARPS = (2, 4, 6, 8)
SWEEP_KV_GROUPS = (1, 2, 4)
SWEEP_Q_IN_REGS = (False, True)
SWEEP_DTYPES: tuple[DType, ...] = (DType.F16,)


class IllegalTileError(ValueError):
    """A table names a tile that a rule refuses, or names one twice."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A combination of a product that is not built, and why."""

    config: KernelConfig
    reason: str


@dataclass(frozen=True, kw_only=True)
class Space:
    """A set of kernels to build, sorted by name."""

    name: str
    kernels: tuple[KernelConfig, ...]
    rejected: tuple[Rejected, ...] = ()
    filter: str | None = None  # the glob that `filtered` was given

    def filtered(self, glob: str) -> Space:
        """`<name>_filtered`: the kernels, and the rejected ones, whose names match a shell-style glob.

        Case counts.
        """
        return Space(
            name=f"{self.name}_filtered",
            kernels=tuple(config for config in self.kernels if fnmatchcase(config.name, glob)),
            rejected=tuple(rejected for rejected in self.rejected if fnmatchcase(rejected.config.name, glob)),
            filter=glob,
        )


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What the spaces are made from; a test or a tool may pass its own."""

    fmha_fwd_tiles: Mapping[int, Sequence[Tile]]
    unfused_tiles: Sequence[Tile]
    fmha_fwd_general_tiles: Mapping[int, Sequence[Tile]] = field(default_factory=dict)
    fmha_fwd_split_tiles: Mapping[int, Sequence[Tile]] = field(default_factory=dict)
    fmha_fwd_unbiased_tiles: Mapping[int, Sequence[Tile]] = field(default_factory=dict)


TABLES = Tables(
    fmha_fwd_tiles=FMHA_FWD_TILES,
    unfused_tiles=UNFUSED_TILES,
    fmha_fwd_general_tiles=FMHA_FWD_GENERAL_TILES,
    fmha_fwd_split_tiles=FMHA_FWD_SPLIT_TILES,
    fmha_fwd_unbiased_tiles=FMHA_FWD_UNBIASED_TILES,
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What the kernels of one tile and dtype differ in: fields of KernelConfig."""

    causal: bool = False
    general: bool = False
    dropout: bool = False
    split: bool = False
    unbiased: bool = False


PLAIN = (Variant(), Variant(causal=True))
GENERAL = (Variant(general=True), Variant(general=True, dropout=True))
SPLIT = (Variant(general=True, split=True),)
UNBIASED = (Variant(general=True, unbiased=True),)


def build(name: str, tables: Tables = TABLES) -> Space:
    """The space of that name. Raises KeyError if there is none, IllegalTileError if a table breaks a rule."""
    return SPACES[name](tables)


def _smoke(tables: Tables) -> Space:
    """Every head_dim once in each dtype, one of the two causal; one kernel with KV groups; one general tile
    and one split; the piped rows.
    """
    fused: list[KernelConfig] = []
    for i, (head_dim, head_dim_tiles) in enumerate(sorted(tables.fmha_fwd_tiles.items())):
        for j, dtype in enumerate(DTYPES):
            variants = (PLAIN[(i + j) % 2],)
            fused += _kernels(
                Family.FMHA_FWD, head_dim, head_dim_tiles[:1], dtypes=(dtype,), variants=variants
            )
    grouped = (
        (head_dim, tile)
        for head_dim, head_dim_tiles in sorted(tables.fmha_fwd_tiles.items())
        for tile in head_dim_tiles
        if tile.kv_groups > 1
    )
    for head_dim, tile in list(grouped)[:1]:
        causal = (Variant(causal=True),)
        fused += _kernels(Family.FMHA_FWD, head_dim, (tile,), dtypes=(DType.F16,), variants=causal)
    general_tiles = tables.fmha_fwd_general_tiles.get(SMOKE_GENERAL_HEAD_DIM, ())
    fused += _kernels(Family.FMHA_FWD, SMOKE_GENERAL_HEAD_DIM, general_tiles[:1], variants=GENERAL)
    split_tiles = tables.fmha_fwd_split_tiles.get(SMOKE_GENERAL_HEAD_DIM, ())
    fused += _kernels(Family.FMHA_FWD, SMOKE_GENERAL_HEAD_DIM, split_tiles[:1], variants=SPLIT)
    return _listed("smoke", [*fused, *_unfused(tables, tables.unfused_tiles[-1:])])


def _release(tables: Tables) -> Space:
    fused = [
        config
        for table, variants in (
            (tables.fmha_fwd_tiles, PLAIN),
            (tables.fmha_fwd_general_tiles, GENERAL),
            (tables.fmha_fwd_split_tiles, SPLIT),
            (tables.fmha_fwd_unbiased_tiles, UNBIASED),
        )
        for head_dim, head_dim_tiles in table.items()
        for config in _kernels(Family.FMHA_FWD, head_dim, head_dim_tiles, variants=variants)
    ]
    return _listed("release", [*fused, *_unfused(tables, tables.unfused_tiles)])


def _sweep(tables: Tables) -> Space:
    product_tiles = [
        Tile(block_m=m, block_n=n, stages=stages, warps=warps, kv_groups=kv_groups, q_in_regs=q_in_regs)
        for m, n, stages, warps, kv_groups, q_in_regs in product(
            SWEEP_BLOCK_M, SWEEP_BLOCK_N, SWEEP_STAGES, SWEEP_WARPS, SWEEP_KV_GROUPS, SWEEP_Q_IN_REGS
        )
    ]
    kernels: list[KernelConfig] = []
    rejected: list[Rejected] = []
    for head_dim, tile in product(tables.fmha_fwd_tiles, product_tiles):
        variants = list(_kernels(Family.FMHA_FWD, head_dim, (tile,), dtypes=SWEEP_DTYPES))
        reason = refusal(variants[0])  # no rule looks at what plain and causal kernels differ in
        if reason is None:
            kernels += variants
        else:
            rejected += [Rejected(config=config, reason=reason) for config in variants]
    kernels += _unfused(tables, tables.unfused_tiles, dtypes=SWEEP_DTYPES)
    return Space(
        name="sweep",
        kernels=tuple(sorted(kernels, key=_by_name)),
        rejected=tuple(sorted(rejected, key=lambda r: r.config.name)),
    )


SPACES: dict[str, Callable[[Tables], Space]] = {"smoke": _smoke, "release": _release, "sweep": _sweep}


def _kernels(
    family: Family,
    head_dim: int,
    head_dim_tiles: Iterable[Tile],
    *,
    dtypes: Iterable[DType] = DTYPES,
    variants: Iterable[Variant] = PLAIN,
) -> Iterator[KernelConfig]:
    for arch, tile, dtype, variant in product(ARCHS, head_dim_tiles, dtypes, variants):
        yield KernelConfig(
            family=family,
            arch=arch,
            dtype=dtype,
            head_dim=head_dim,
            tile=tile,
            causal=variant.causal,
            general=variant.general,
            dropout=variant.dropout,
            split=variant.split,
            unbiased=variant.unbiased,
        )


def _unfused(
    tables: Tables, unfused_tiles: Sequence[Tile], *, dtypes: Iterable[DType] = DTYPES
) -> Iterator[KernelConfig]:
    """Rows for every head_dim that the GEMMs cover; larger ones have no baseline."""
    for head_dim in tables.fmha_fwd_tiles:
        if head_dim <= MAX_HEAD_DIM[Family.UNFUSED]:
            yield from _kernels(Family.UNFUSED, head_dim, unfused_tiles, dtypes=tuple(dtypes))


def _by_name(config: KernelConfig) -> str:
    return config.name


def _listed(name: str, configs: Sequence[KernelConfig]) -> Space:
    """A space whose every config was asked for, so that each must be legal and named once."""
    complaints = [f"{config.name}: {reason}" for config in configs if (reason := refusal(config)) is not None]
    names = [config.name for config in configs]
    complaints += [f"{name}: listed {count} times" for name, count in Counter(names).items() if count > 1]
    if complaints:
        raise IllegalTileError("\n  ".join(["generator/space.py lists what cannot be built:", *complaints]))
    return Space(name=name, kernels=tuple(sorted(configs, key=_by_name)))
