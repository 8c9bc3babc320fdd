"""Spaces: what families list must be legal and there once, what they try is kept as far as it is legal."""

from __future__ import annotations

from itertools import product

import pytest

from generator.core.kernel import DType
from generator.core.space import SPACES, IllegalTileError, Listing, Space, space_of
from generator.families import FAMILIES

GOOD = "fmha_fwd_sm89_d80_m64n64_s1_w4_f16"
BAD = "fmha_fwd_sm89_d80_m64n32_s1_w4_f16"
SMALL = "unfused_sm89_d64_m64n64_s4_w4_f16"


def _space(*listed: str, tried: tuple[str, ...] = ()) -> Space:
    kernels = [FAMILIES.parse(name) for name in listed]
    groups = [[FAMILIES.parse(name), FAMILIES.parse(f"{name}_causal")] for name in tried]
    return space_of("smoke", [Listing(kernels=kernels), Listing(tried=groups)], FAMILIES.refusal)


@pytest.mark.parametrize("name", SPACES)
def test_every_kernel_is_legal_listed_once_and_sorted(name: str) -> None:
    kernels = FAMILIES.build(name).kernels
    assert [FAMILIES.refusal(c) for c in kernels] == [None] * len(kernels)
    assert all(c.smem_bytes <= c.arch.limits.smem_per_cta for c in kernels)
    names = [c.name for c in kernels]
    assert names == sorted(set(names))


def test_what_is_listed_must_be_legal() -> None:
    assert [kernel.name for kernel in _space(SMALL, GOOD).kernels] == [GOOD, SMALL]
    with pytest.raises(IllegalTileError) as error:
        _space(SMALL, BAD, GOOD)
    assert f"  {BAD}: load: one pass" in str(error.value)
    assert GOOD not in str(error.value)
    assert SMALL not in str(error.value)


def test_what_is_listed_twice_is_an_error() -> None:
    with pytest.raises(IllegalTileError, match=f"{GOOD}: listed 2 times"):
        _space(GOOD, GOOD)
    with pytest.raises(IllegalTileError, match=f"{GOOD}: listed 2 times"):
        _space(GOOD, tried=(GOOD,))


def test_what_is_tried_and_refused_is_kept_with_the_reason() -> None:
    space = _space(SMALL, tried=(BAD, GOOD))
    assert [kernel.name for kernel in space.kernels] == [GOOD, f"{GOOD}_causal", SMALL]
    assert [rejected.config.name for rejected in space.rejected] == [BAD, f"{BAD}_causal"]
    assert all(rejected.reason == FAMILIES.refusal(rejected.config) for rejected in space.rejected)


def test_filter_keeps_the_names_that_match() -> None:
    release = FAMILIES.build("release")
    some = release.filtered("*_d80_*_bf16")
    assert some.kernels
    assert all(c.head_dim == 80 and c.dtype is DType.BF16 and c.name.endswith("_bf16") for c in some.kernels)
    assert {c.name for c in some.kernels} <= {c.name for c in release.kernels}
    assert release.filtered("*").kernels == release.kernels
    assert release.filtered("*D80*").kernels == ()
    assert some.filter == "*_d80_*_bf16"
    both = release.filtered("*_d80_*_bf16,*_d64_*_f16_causal")
    assert both.kernels == tuple(
        c for c in release.kernels if c in some.kernels + release.filtered("*_d64_*_f16_causal").kernels
    )
    rejected = _space(tried=(BAD,)).filtered("*_causal").rejected
    assert [entry.config.name for entry in rejected] == [f"{BAD}_causal"]


def test_smoke_has_a_row_of_the_baseline_for_every_fused_problem() -> None:
    kernels = FAMILIES.build("smoke").kernels
    problems = {
        family: {(c.head_dim, c.dtype, "_causal" in c.name) for c in kernels if c.family == family}
        for family in ("fmha_fwd", "unfused")
    }
    covered = {problem for problem in problems["fmha_fwd"] if problem[0] <= 128}
    assert covered == covered & problems["unfused"]
    assert {(head_dim, dtype) for head_dim, dtype, _ in covered} == set(product((32, 64, 80, 96, 128), DType))


def test_a_space_that_does_not_exist() -> None:
    with pytest.raises(KeyError):
        FAMILIES.build("nightly")
