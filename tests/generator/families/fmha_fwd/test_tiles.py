"""The fused kernels of each space are what its tables promise, and a head_dim or a tile is one entry."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from generator.core.family import TEMPLATES
from generator.core.kernel import DType
from generator.core.space import SPACES, IllegalTileError, Space, space_of
from generator.families import FAMILIES
from generator.families.fmha_fwd import FMHA_FWD
from generator.families.fmha_fwd import tiles as module
from generator.families.fmha_fwd.config import FmhaFwd
from generator.families.fmha_fwd.tiles import TABLES, Tables, release, smoke, sweep, tiles
from generator.families.unfused.tiles import UNFUSED_TILES

HEAD_DIMS = (32, 64, 80, 96, 128, 160, 192, 256)
SPLIT_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
UNBIASED_HEAD_DIMS = (96,)
ROOT = TEMPLATES.parent


def _tables(**plain: str) -> Tables:
    """For example `_tables(d64="m64n64_s1_w4 m128n64_s2_w4")`."""
    listed = {int(key[1:]): tiles(*names.split()) for key, names in plain.items()}
    return Tables(arch=TABLES.arch, plain=listed)


def _built(name: str, tables: Tables = TABLES) -> Space:
    """Of this family alone."""
    listing = {"smoke": smoke, "release": release, "sweep": sweep}[name](tables)
    return space_of(name, [listing], FMHA_FWD.refusal)


def _kernels(name: str, tables: Tables = TABLES) -> list[FmhaFwd]:
    return [kernel for kernel in _built(name, tables).kernels if isinstance(kernel, FmhaFwd)]


def _flags(c: FmhaFwd) -> str:
    return c.name.partition(f"{c.group}_{c.dtype.value}")[2]


@pytest.mark.parametrize("name", SPACES)
def test_a_space_of_the_library_has_all_of_them(name: str) -> None:
    built = [kernel for kernel in FAMILIES.build(name).kernels if kernel.family == "fmha_fwd"]
    assert built == _kernels(name)


def test_release_is_the_whole_product_of_its_tables() -> None:
    kernels = _kernels("release")
    for head_dim in HEAD_DIMS:
        here = [c for c in kernels if c.head_dim == head_dim]
        split, others = ({c.tile for c in here if c.split is is_split} for is_split in (True, False))
        assert 2 <= len(others) <= 7, f"compile time: head_dim {head_dim} has {len(others)} tiles"
        assert len(split - others) <= 4, f"compile time: head_dim {head_dim} has {len(split)} split tiles"
    due = set()
    for table, head_dims, variants in (
        (module.PLAIN_TILES, HEAD_DIMS, ["", "_causal"]),
        (module.GENERAL_TILES, HEAD_DIMS, ["_general", "_general_dropout"]),
        (module.SPLIT_TILES, SPLIT_HEAD_DIMS, ["_general_split"]),
        (module.UNBIASED_TILES, UNBIASED_HEAD_DIMS, ["_general_unbiased"]),
    ):
        assert set(table) == set(head_dims)
        listed = [(head_dim, tile) for head_dim in table for tile in table[head_dim]]
        due |= {(*row, dtype, flags) for row, dtype, flags in product(listed, DType, variants)}
    assert {(c.head_dim, c.tile, c.dtype, _flags(c)) for c in kernels} == due
    assert len(kernels) == len(due)
    assert any(c.tile.kv_groups > 1 for c in kernels)  # for small grids


def test_a_general_tile_may_be_a_plain_one_or_have_a_unit_of_its_own() -> None:
    tables = replace(_tables(d64="m64n64_s1_w4"), general={64: tiles("m64n64_s1_w4", "m32n64_s1_w2")})
    units: dict[str, set[str]] = {}
    for c in _kernels("release", tables):
        units.setdefault(c.group, set()).add(c.dtype.value + _flags(c))
    general = {"f16_general", "f16_general_dropout", "bf16_general", "bf16_general_dropout"}
    assert units == {
        "fmha_fwd_sm89_d64_m64n64_s1_w4": {"f16", "f16_causal", "bf16", "bf16_causal", *general},
        "fmha_fwd_sm89_d64_m32n64_s1_w2": general,
    }


def test_smoke_is_a_handful_that_touches_every_axis() -> None:
    kernels = _kernels("smoke")
    assert len(kernels) <= 23
    assert {(c.head_dim, c.dtype) for c in kernels} == set(product(HEAD_DIMS, DType))
    assert {(c.head_dim, c.causal) for c in kernels} == set(product(HEAD_DIMS, (False, True)))
    assert {(c.dtype, c.causal) for c in kernels} == set(product(DType, (False, True)))
    assert {c.tile.kv_groups > 1 for c in kernels} == {False, True}
    general = [c for c in kernels if c.general and not c.split]
    assert {(c.dtype, c.dropout) for c in general} == set(product(DType, (False, True)))
    assert {c.dtype for c in kernels if c.split} == set(DType)
    assert {c.unit for c in general} <= {c.unit for c in kernels if not c.general}  # no unit of their own
    assert {c.name for c in kernels} <= {c.name for c in _kernels("release")}


def test_sweep_spans_its_axes_for_each_head_dim() -> None:
    kernels = _kernels("sweep")
    assert {c.head_dim for c in kernels} == set(HEAD_DIMS)
    for head_dim in HEAD_DIMS[:-2]:  # the largest have room for few tiles
        swept = [c.tile for c in kernels if c.head_dim == head_dim]
        assert {tile.block_m for tile in swept} >= {32, 64, 128}
        assert {tile.block_n for tile in swept} >= {64, 128}
        assert {tile.stages for tile in swept} >= {1, 2}
        assert {tile.warps for tile in swept} >= {2, 4, 8}
        assert {tile.q_in_regs for tile in swept} == {False, True}
        fits = (1, 2, 4) if head_dim <= 128 else (1, 2)  # the rings of four have no room
        kv_groups = {groups for groups in fits if head_dim % (8 * groups) == 0}
        assert {tile.kv_groups for tile in swept} >= kv_groups
    assert {c.dtype for c in kernels} == {DType.F16}
    assert {_flags(c) for c in kernels} == {"", "_causal"}


def test_sweep_contains_the_plain_release_kernels() -> None:
    swept = {c.name for c in _kernels("sweep")}
    plain = [c.name for c in _kernels("release") if c.dtype is DType.F16 and not c.general]
    assert [name for name in plain if name not in swept] == []


def test_sweep_keeps_what_it_drops_with_the_reason() -> None:
    space = _built("sweep")
    assert len(space.rejected) > 1000
    assert all(rejected.reason == FAMILIES.refusal(rejected.config) for rejected in space.rejected)
    built = {c.name for c in space.kernels}
    rejected = {r.config.name for r in space.rejected}
    assert not built & rejected
    axes = (
        module.SWEEP_BLOCK_M,
        module.SWEEP_BLOCK_N,
        module.SWEEP_STAGES,
        module.SWEEP_WARPS,
        module.SWEEP_KV_GROUPS,
        module.SWEEP_Q_IN_REGS,
        module.SWEEP_DTYPES,
        (False, True),
        HEAD_DIMS,
    )
    assert len(built) + len(rejected) == len(list(product(*axes)))


def test_sweep_refuses_the_same_for_every_variant() -> None:
    """The rules are asked once for a tile, so they must not look at what its variants differ in."""
    for config in _built("sweep", _tables(d96="m64n64_s1_w4")).kernels:
        assert FAMILIES.refusal(config) is None


def test_a_listed_tile_that_is_illegal_is_an_error() -> None:
    with pytest.raises(IllegalTileError) as error:
        _built("release", _tables(d80="m64n64_s1_w4 m64n32_s1_w4"))
    text = str(error.value)
    assert "fmha_fwd_sm89_d80_m64n32_s1_w4_f16: load: one pass" in text
    assert "m64n64" not in text


def test_a_general_tile_that_is_illegal_is_an_error() -> None:
    tables = replace(_tables(d64="m64n48_s1_w4"), general={64: tiles("m64n48_s1_w4")})
    with pytest.raises(IllegalTileError) as error:
        _built("release", tables)
    assert str(error.value).count("general_block_n: ") == 4  # two dtypes, with and without dropout
    assert "_causal" not in str(error.value)


def test_a_split_tile_may_share_a_unit_and_has_no_q_in_registers() -> None:
    tables = replace(_tables(d64="m32n64_s1_w8_g4"), split={64: tiles("m32n64_s1_w8_g4")})
    kernels = _kernels("release", tables)
    assert {c.unit for c in kernels} == {"units/fmha_fwd_sm89_d64_m32n64_s1_w8_g4.cu"}
    assert [_flags(c) for c in kernels if c.general] == ["_general_split"] * 2
    with pytest.raises(IllegalTileError) as error:
        _built("release", replace(tables, split={64: tiles("m64n64_s1_w4_qreg")}))
    assert str(error.value).count("split: a split kernel") == 2  # dtypes


def test_a_tile_listed_twice_is_an_error() -> None:
    with pytest.raises(IllegalTileError, match="fmha_fwd_sm89_d64_m64n64_s1_w4_f16_causal: listed 2 times"):
        _built("release", _tables(d64="m64n64_s1_w4 m64n64_s1_w4"))


@pytest.mark.parametrize("name", SPACES)
def test_a_head_dim_is_one_more_entry(name: str) -> None:
    more = replace(TABLES, plain={**TABLES.plain, 112: tiles("m64n64_s1_w4")})
    before = {c.name for c in _kernels(name)}
    added = [c for c in _kernels(name, more) if c.name not in before]
    assert 112 in {c.head_dim for c in added}
    if name != "smoke":  # there, causal alternates with the head_dims
        assert {c.head_dim for c in added} == {112}


def test_a_head_dim_is_one_line_of_tiles_py(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "generator", tmp_path / "generator", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "templates").symlink_to(TEMPLATES)
    file = tmp_path / "generator/families/fmha_fwd/tiles.py"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    above = next(i for i, line in enumerate(lines) if line.startswith("    96: tiles("))
    lines.insert(above + 1, '    112: tiles("m64n64_s1_w4", "m128n64_s1_w4"),\n')
    file.write_text("".join(lines), encoding="utf-8")
    command = [sys.executable, "-m", "generator", "--out", "generated", "--filter", "*_d112_*_f16*"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    units = sorted(path.name for path in (tmp_path / "generated" / "units").iterdir())
    assert units == [
        "fmha_fwd_sm89_d112_m128n64_s1_w4.cu",
        "fmha_fwd_sm89_d112_m64n64_s1_w4.cu",
        *sorted(f"unfused_sm89_{tile.name}.cu" for tile in UNFUSED_TILES),
    ]
