"""From the measurements of a sweep, the tiles that should ship.

What ships is decided by tile, not by kernel: all kernels of one tile share a unit, whose compile time hardly
grows with their number, and generator/families/fmha_fwd/tiles.py lists tiles. So the candidates of the set
cover are tiles, apart as plain and as general ones; a tile covers the buckets at which one of its kernels is
within the limit of the sweep's best. The fewest that cover every bucket are chosen, and among equally many
those with the least mean loss (cover.py).

The output has the form of that file's tables, for a person to put there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tiles.cover import improved, smallest_cover
from sdpa_cutlass.cli.tuning.derive import Choice, geometric_mean
from sdpa_cutlass.library.registry import KernelInfo

_TABLES = ("PLAIN_TILES", "GENERAL_TILES", "SPLIT_TILES", "UNBIASED_TILES")


@dataclass(frozen=True, order=True)
class Tile:
    """A tile of one head_dim in a table of the generator: of plain, general or split kernels."""

    table: str
    head_dim: int
    name: str  # as in the generator's tables
    unit: str

    @property
    def key(self) -> str:
        """Sorts as tiles do."""
        return f"{_TABLES.index(self.table)}/{self.head_dim:04}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was chosen from `candidates`, and what each bucket loses by it (0: nothing)."""

    candidates: tuple[Tile, ...]
    tiles: tuple[Tile, ...]
    is_proven: bool
    losses: tuple[float, ...]  # of the buckets, in order
    users: Mapping[Tile, int]  # at how many buckets each tile is the best of the chosen


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the units of some tiles cost to build, as far as the build's record knows them."""

    units: int
    unknown_units: int
    kernels: int
    seconds: float
    object_bytes: int


def tile_of(kernel: KernelInfo) -> Tile:
    """The tile of a kernel, from its name: <family>_<arch>_d<head_dim>_<tile>_<dtype>..."""
    unit = kernel.name.partition(f"_{kernel.dtype.value}")[0]
    name = unit.partition(f"_d{kernel.head_dim}_")[2]
    table = _TABLES[kernel.is_general + kernel.is_split + 2 * kernel.is_unbiased]
    return Tile(table, kernel.head_dim, name, unit)


def select(found: Sequence[Choice], kernels: Mapping[str, KernelInfo], within: float) -> Selection:
    """The fewest tiles with which no bucket is more than `within` (0.03: 3 %) slower than its best."""
    tiles: dict[str, Tile] = {}
    ratios: list[dict[str, float]] = []  # bucket → tile → time over the best
    for choice in found:
        at_bucket: dict[str, float] = {}
        for name, microseconds in choice.times:  # the fastest first
            tile = tile_of(kernels[name])
            tiles[tile.key] = tile
            at_bucket.setdefault(tile.key, microseconds / choice.best_us)
        ratios.append(at_bucket)
    covers = {
        key: frozenset(
            i for i, at_bucket in enumerate(ratios) if at_bucket.get(key, 2 + within) <= 1 + within
        )
        for key in tiles
    }

    def losses(chosen: Sequence[str]) -> list[float]:
        return [min(at_bucket[key] for key in chosen if key in at_bucket) - 1 for at_bucket in ratios]

    def loss(chosen: tuple[str, ...]) -> tuple[float, float]:
        each = losses(chosen)
        return sum(each) / len(each), max(each)

    cover = smallest_cover(covers)
    chosen = improved(cover.chosen, covers, loss)
    users = dict.fromkeys((tiles[key] for key in chosen), 0)
    for at_bucket in ratios:
        users[tiles[min((at_bucket[key], key) for key in chosen if key in at_bucket)[1]]] += 1
    return Selection(
        candidates=tuple(sorted(tiles.values())),
        tiles=tuple(sorted(users)),
        is_proven=cover.is_proven,
        losses=tuple(losses(chosen)),
        users=users,
    )


def cost(tiles: Sequence[Tile], resources: Mapping[str, Mapping[str, object]]) -> Cost:
    """What the units of `tiles` cost, from read_resources()."""
    units = sorted({tile.unit for tile in tiles})
    known = [resources[unit] for unit in units if unit in resources]
    return Cost(
        units=len(units),
        unknown_units=len(units) - len(known),
        kernels=sum(len(list(_as_list(unit.get("kernels")))) for unit in known),
        seconds=sum(_number(unit.get("seconds")) for unit in known),
        object_bytes=int(sum(_number(unit.get("object_bytes")) for unit in known)),
    )


def read_resources(path: Path) -> dict[str, Mapping[str, object]]:
    """unit → its entry in a build's resource_usage.json. Raises OSError, ValueError when it is not one."""
    document = json.loads(path.read_text(encoding="utf-8"))
    try:
        return {str(unit["unit"]): unit for unit in document["units"]}
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no resource_usage.json: {error}") from error


def report(selection: Selection, found: Sequence[Choice], within: float) -> list[str]:
    """The choice as lines of text: what was chosen, as the generator's tables have it, and what it loses."""
    chosen, proven = selection.tiles, "proven smallest" if selection.is_proven else "not proven smallest"
    lines = [
        f"{len(chosen)} of {len(selection.candidates)} tiles stay within {within:.1%} of the best kernel "
        f"measured at each of {len(found)} buckets ({proven})."
    ]
    for table in _TABLES:
        some = [tile for tile in chosen if tile.table == table]
        if some:
            lines += ["", f"{table}, the most used tile first:"]
        for head_dim in sorted({tile.head_dim for tile in some}):
            here = [tile for tile in some if tile.head_dim == head_dim]
            here.sort(key=lambda tile: (-selection.users[tile], tile.name))
            names = ", ".join(f'"{tile.name}"' for tile in here)
            uses = ", ".join(str(selection.users[tile]) for tile in here)
            lines.append(f"    {head_dim}: tiles({names}),  # the best at {uses} buckets")
    worst = max(range(len(found)), key=lambda i: selection.losses[i])
    mean = geometric_mean(1 + loss for loss in selection.losses) - 1
    lines += [
        "",
        f"loss against the best kernel: {mean:.2%} in the mean, {selection.losses[worst]:.2%} at worst",
    ]
    lines[-1] += f" ({found[worst].bucket})"
    return lines


def cost_line(what: str, spent: Cost) -> str:
    """One line for a cost."""
    unknown = f"; {spent.unknown_units} of them not in the build's record" if spent.unknown_units else ""
    return (
        f"{what}: {spent.units} units{unknown}, {spent.kernels} kernels, {spent.seconds:.0f} s of compiling, "
        f"{spent.object_bytes / 2**20:.1f} MiB of objects"
    )


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0
