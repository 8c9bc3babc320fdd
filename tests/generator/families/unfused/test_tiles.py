"""The baseline is built for the head_dims of the fused kernels that its GEMMs cover."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from generator.core.kernel import DType
from generator.families import FAMILIES
from generator.families.unfused.config import Unfused
from generator.families.unfused.tiles import TABLES, UNFUSED_TILES, release

HEAD_DIMS = (32, 64, 80, 96, 128)


def _built(space: str) -> list[Unfused]:
    return [kernel for kernel in FAMILIES.build(space).kernels if isinstance(kernel, Unfused)]


def test_release_is_the_whole_product_of_its_tables() -> None:
    kernels = _built("release")
    due = set(product(HEAD_DIMS, UNFUSED_TILES, DType, (False, True)))
    assert {(c.head_dim, c.tile, c.dtype, c.causal) for c in kernels} == due
    assert len(kernels) == len(due)
    assert len(UNFUSED_TILES) >= 2


def test_smoke_has_one_tile_and_sweep_one_dtype() -> None:
    assert {c.tile for c in _built("smoke")} == {UNFUSED_TILES[-1]}
    assert {c.tile for c in _built("sweep")} == set(UNFUSED_TILES)
    assert {c.dtype for c in _built("sweep")} == {DType.F16}


def test_a_head_dim_beyond_the_gemms_has_no_rows() -> None:
    rows = list(release(replace(TABLES, head_dims=(128, 192))).kernels)
    assert {row.head_dim for row in rows} == {128}
