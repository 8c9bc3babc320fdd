"""The spaces hold what they promise, and nothing that the rules refuse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from generator import space
from generator.config import DType, Family, Tile, parse
from generator.rules import refusal
from generator.space import IllegalTileError, Tables, build, tiles

HEAD_DIMS = (32, 64, 80, 96, 128, 256)
UNFUSED_HEAD_DIMS = (32, 64, 80, 96, 128)
SPLIT_HEAD_DIMS = (64, 128)
UNBIASED_HEAD_DIMS = (96,)
ROOT = Path(space.__file__).parent.parent


def _tables(*unfused: str, **fused: str) -> Tables:
    """For example `_tables("m64n64_s4_w4", d64="m64n64_s1_w4 m128n64_s2_w4")`."""
    return Tables(
        fmha_fwd_tiles={int(key[1:]): tiles(*names.split()) for key, names in fused.items()},
        unfused_tiles=tiles(*unfused),
    )


@pytest.mark.parametrize("name", list(space.SPACES))
def test_every_kernel_is_legal_listed_once_and_sorted(name: str) -> None:
    kernels = build(name).kernels
    assert [refusal(c) for c in kernels] == [None] * len(kernels)
    assert all(c.smem_bytes <= 101376 for c in kernels)
    names = [c.name for c in kernels]
    assert names == sorted(set(names))


def test_release_is_the_whole_product_of_its_tables() -> None:
    kernels = build("release").kernels
    for head_dim in HEAD_DIMS:
        fused = [c for c in kernels if c.family is Family.FMHA_FWD and c.head_dim == head_dim]
        split, others = ({c.tile for c in fused if c.split is is_split} for is_split in (True, False))
        assert 2 <= len(others) <= 5, f"compile time: head_dim {head_dim} has {len(others)} tiles"
        assert len(split - others) <= 2, f"compile time: head_dim {head_dim} has {len(split)} split tiles"
    due = set()
    for table, head_dims, variants in (
        (space.FMHA_FWD_TILES, HEAD_DIMS, [(), ("causal",)]),
        (space.FMHA_FWD_GENERAL_TILES, HEAD_DIMS, [("general",), ("general", "dropout")]),
        (space.FMHA_FWD_SPLIT_TILES, SPLIT_HEAD_DIMS, [("general", "split")]),
        (space.FMHA_FWD_UNBIASED_TILES, UNBIASED_HEAD_DIMS, [("general", "unbiased")]),
    ):
        assert set(table) == set(head_dims)
        listed = [(Family.FMHA_FWD, head_dim, tile) for head_dim in table for tile in table[head_dim]]
        due |= {(*row, dtype, flags) for row, dtype, flags in product(listed, DType, variants)}
    due |= set(product([Family.UNFUSED], UNFUSED_HEAD_DIMS, space.UNFUSED_TILES, DType, [(), ("causal",)]))
    assert {(c.family, c.head_dim, c.tile, c.dtype, c.flags) for c in kernels} == due
    assert len(kernels) == len(due)


def test_a_general_tile_may_be_a_plain_one_or_have_a_unit_of_its_own() -> None:
    tables = _tables(d64="m64n64_s1_w4")
    tables = replace(tables, fmha_fwd_general_tiles={64: tiles("m64n64_s1_w4", "m32n64_s1_w2")})
    units: dict[str, set[str]] = {}
    for c in build("release", tables).kernels:
        units.setdefault(c.group, set()).add("_".join([c.dtype.value, *c.flags]))
    general = {"f16_general", "f16_general_dropout", "bf16_general", "bf16_general_dropout"}
    assert units == {
        "fmha_fwd_sm89_d64_m64n64_s1_w4": {"f16", "f16_causal", "bf16", "bf16_causal", *general},
        "fmha_fwd_sm89_d64_m32n64_s1_w2": general,
    }


def test_release_has_a_small_grid_kernel_and_piped_tiles_for_each_head_dim() -> None:
    kernels = build("release").kernels
    assert any(c.tile.kv_groups > 1 for c in kernels if c.family is Family.FMHA_FWD)
    for head_dim in UNFUSED_HEAD_DIMS:
        assert len({c.tile for c in kernels if c.family is Family.UNFUSED and c.head_dim == head_dim}) >= 2


def test_smoke_is_a_handful_that_touches_every_axis() -> None:
    fused = [c for c in build("smoke").kernels if c.family is Family.FMHA_FWD]
    assert len(fused) <= 19
    assert {(c.head_dim, c.dtype) for c in fused} == set(product(HEAD_DIMS, DType))
    assert {(c.head_dim, c.causal) for c in fused} == set(product(HEAD_DIMS, (False, True)))
    assert {(c.dtype, c.causal) for c in fused} == set(product(DType, (False, True)))
    assert {c.tile.kv_groups > 1 for c in fused} == {False, True}
    general = [c for c in fused if c.general and not c.split]
    assert {(c.dtype, c.dropout) for c in general} == set(product(DType, (False, True)))
    assert {c.dtype for c in fused if c.split} == set(DType)
    assert {c.unit for c in general} <= {c.unit for c in fused if not c.general}  # no unit of their own
    release = {c.name for c in build("release").kernels}
    assert {c.name for c in build("smoke").kernels} <= release


def test_smoke_has_a_piped_row_beside_every_fused_problem() -> None:
    kernels = build("smoke").kernels
    problems = {
        family: {(c.head_dim, c.dtype, c.causal) for c in kernels if c.family is family} for family in Family
    }
    covered = {problem for problem in problems[Family.FMHA_FWD] if problem[0] in UNFUSED_HEAD_DIMS}
    assert covered <= problems[Family.UNFUSED]
    assert len({c.tile for c in kernels if c.family is Family.UNFUSED}) == 1


def test_sweep_spans_its_axes_for_each_head_dim() -> None:
    kernels = [c for c in build("sweep").kernels if c.family is Family.FMHA_FWD]
    assert {c.head_dim for c in kernels} == set(HEAD_DIMS)
    for head_dim in UNFUSED_HEAD_DIMS:  # the largest has room for few tiles
        swept = [c.tile for c in kernels if c.head_dim == head_dim]
        assert {tile.block_m for tile in swept} >= {32, 64, 128}
        assert {tile.block_n for tile in swept} >= {64, 128}
        assert {tile.stages for tile in swept} >= {1, 2}
        assert {tile.warps for tile in swept} >= {2, 4, 8}
        assert {tile.q_in_regs for tile in swept} == {False, True}
        kv_groups = {groups for groups in (1, 2, 4) if head_dim % (8 * groups) == 0}
        assert {tile.kv_groups for tile in swept} >= kv_groups
    assert {c.dtype for c in kernels} == {DType.F16}
    assert {c.flags for c in kernels} == {(), ("causal",)}


def test_sweep_contains_the_plain_release_kernels() -> None:
    swept = {c.name for c in build("sweep").kernels}
    release = [c.name for c in build("release").kernels if c.dtype is DType.F16 and not c.general]
    assert [name for name in release if name not in swept] == []


def test_sweep_keeps_what_it_drops_with_the_reason() -> None:
    sweep = build("sweep")
    assert len(sweep.rejected) > 1000
    assert all(rejected.reason == refusal(rejected.config) for rejected in sweep.rejected)
    fused = {c.name for c in sweep.kernels if c.family is Family.FMHA_FWD}
    rejected = {r.config.name for r in sweep.rejected}
    assert not fused & rejected
    axes = (
        space.SWEEP_BLOCK_M,
        space.SWEEP_BLOCK_N,
        space.SWEEP_STAGES,
        space.SWEEP_WARPS,
        space.SWEEP_KV_GROUPS,
        space.SWEEP_Q_IN_REGS,
        space.SWEEP_DTYPES,
        (False, True),
        HEAD_DIMS,
    )
    assert len(fused) + len(rejected) == len(list(product(*axes)))


def test_sweep_refuses_the_same_for_every_variant() -> None:
    """The rules are asked once for a tile, so they must not look at what its variants differ in."""
    for config in build("sweep", _tables(d96="m64n64_s1_w4")).kernels:
        assert refusal(config) is None


def test_a_listed_tile_that_is_illegal_is_an_error() -> None:
    with pytest.raises(IllegalTileError) as error:
        build("release", _tables("m64n64_s4_w4", d80="m64n64_s1_w4 m64n32_s1_w4"))
    text = str(error.value)
    assert "fmha_fwd_sm89_d80_m64n32_s1_w4_f16: load: one pass" in text
    assert "m64n64" not in text


def test_a_head_dim_beyond_the_gemms_has_no_piped_rows() -> None:
    kernels = build("release", _tables("m64n64_s4_w4", d128="m64n64_s1_w4", d192="m64n32_s1_w4")).kernels
    assert {(c.family, c.head_dim) for c in kernels} == {
        (Family.FMHA_FWD, 128),
        (Family.FMHA_FWD, 192),
        (Family.UNFUSED, 128),
    }


def test_a_general_tile_that_is_illegal_is_an_error() -> None:
    tables = replace(_tables(d64="m64n48_s1_w4"), fmha_fwd_general_tiles={64: tiles("m64n48_s1_w4")})
    with pytest.raises(IllegalTileError) as error:
        build("release", tables)
    assert str(error.value).count("general_block_n: ") == 4  # two dtypes, with and without dropout
    assert "_causal" not in str(error.value)


def test_a_split_tile_may_share_a_unit_and_must_have_groups() -> None:
    tables = replace(_tables(d64="m32n64_s1_w8_g4"), fmha_fwd_split_tiles={64: tiles("m32n64_s1_w8_g4")})
    kernels = build("release", tables).kernels
    assert {c.unit for c in kernels} == {"units/fmha_fwd_sm89_d64_m32n64_s1_w8_g4.cu"}
    assert [c.flags for c in kernels if c.general] == [("general", "split")] * 2
    tables = replace(tables, fmha_fwd_split_tiles={64: tiles("m64n64_s1_w4")})
    with pytest.raises(IllegalTileError) as error:
        build("release", tables)
    assert str(error.value).count("split: a split kernel") == 2  # dtypes


def test_a_tile_listed_twice_is_an_error() -> None:
    with pytest.raises(IllegalTileError, match="fmha_fwd_sm89_d64_m64n64_s1_w4_f16_causal: listed 2 times"):
        build("release", _tables(d64="m64n64_s1_w4 m64n64_s1_w4"))


def test_filter_keeps_the_names_that_match() -> None:
    release = build("release")
    some = release.filtered("*_d80_*_bf16")
    assert some.kernels
    assert all(c.head_dim == 80 and c.dtype is DType.BF16 and not c.causal for c in some.kernels)
    assert {c.name for c in some.kernels} <= {c.name for c in release.kernels}
    assert release.filtered("*").kernels == release.kernels
    assert release.filtered("*D80*").kernels == ()
    assert some.filter == "*_d80_*_bf16"


@pytest.mark.parametrize("name", list(space.SPACES))
def test_a_head_dim_is_one_more_entry(name: str) -> None:
    tables = Tables(
        fmha_fwd_tiles={**space.FMHA_FWD_TILES, 112: [Tile(block_m=64, block_n=64, stages=1, warps=4)]},
        unfused_tiles=space.UNFUSED_TILES,
        fmha_fwd_general_tiles=space.FMHA_FWD_GENERAL_TILES,
        fmha_fwd_split_tiles=space.FMHA_FWD_SPLIT_TILES,
        fmha_fwd_unbiased_tiles=space.FMHA_FWD_UNBIASED_TILES,
    )
    added = {c.name for c in build(name, tables).kernels} - {c.name for c in build(name).kernels}
    assert {parse(kernel).family for kernel in added if parse(kernel).head_dim == 112} == set(Family)
    if name != "smoke":  # there, causal alternates with the head_dims
        assert {parse(kernel).head_dim for kernel in added} == {112}


def test_a_head_dim_is_one_line_of_space_py(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "generator", tmp_path / "generator", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "templates").symlink_to(ROOT / "templates")
    file = tmp_path / "generator" / "space.py"
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
        *sorted(f"unfused_sm89_{tile.name}.cu" for tile in space.UNFUSED_TILES),
    ]
