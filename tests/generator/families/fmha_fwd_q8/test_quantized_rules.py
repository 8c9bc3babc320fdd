"""What the rules of the quantised kernels refuse, and what their CTAs occupy."""

from __future__ import annotations

from typing import Any

import pytest

from generator.core.kernel import Accuracy, Takes
from generator.families import FAMILIES
from generator.families.fmha_fwd_q8 import FMHA_FWD_Q8
from generator.families.fmha_fwd_q8.config import FmhaFwdQ8, Math

NAME = "fmha_fwd_q8_sm89_d{d}_m{m}n{n}_s{s}_w{w}{g}_f16_{math}{tail}"
SPLIT = {"m": 16, "s": 1, "g": 4, "tail": "_split"}


def kernel(
    *,
    d: int = 64,
    m: int = 128,
    n: int = 64,
    s: int = 2,
    w: int = 4,
    g: int = 1,
    math: str = "int8",
    tail: str = "",
) -> FmhaFwdQ8:
    groups = f"_g{g}" if g > 1 else ""
    parsed: FmhaFwdQ8 = FAMILIES.parse(NAME.format(d=d, m=m, n=n, s=s, w=w, g=groups, math=math, tail=tail))
    return parsed


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"d": 80}, "head_dim: head_dim 80 is not a multiple of 32"),
        ({"d": 288}, "head_dim: head_dim 288"),
        ({"n": 128}, "block_n: block_n 128 is not 64"),
        ({"w": 2}, "warps: 2 warps are neither 4 nor 8"),
        ({"m": 96}, "block_m: block_m 96 is not a multiple of 64"),
        ({"s": 1}, "stages: stages 1 is not one of 2, 3, 4"),
        ({"d": 256}, "registers: at least"),
        ({"tail": "_split"}, "kv_groups: kv_groups 1 is not 4"),
        ({"g": 4}, "kv_groups: kv_groups 4 is not 1"),
        (SPLIT | {"g": 2}, "kv_groups: kv_groups 2 is not 4"),
        (SPLIT | {"m": 24}, "block_m: block_m 24 is not a multiple of 16"),
        (SPLIT | {"s": 2}, "stages: stages 2 is not one of 1"),
        (SPLIT | {"d": 192}, "smem: "),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any], rule: str) -> None:
    assert FMHA_FWD_Q8.refusal(kernel()) is None
    assert FMHA_FWD_Q8.refusal(kernel(**SPLIT)) is None
    refusal = FMHA_FWD_Q8.refusal(kernel(**changes))
    assert refusal is not None
    assert refusal.startswith(rule)


@pytest.mark.parametrize(
    ("math", "head_dim", "block_m", "smem"),
    [
        ("int8", 128, 128, 128 * 128 + 2 * (2 * 64 * 128 + 512)),
        ("int8", 64, 64, 64 * 64 + 2 * (2 * 64 * 64 + 512)),
        ("int8qk", 128, 128, 128 * 128 + 2 * 3 * 64 * 128),
    ],
)
def test_shared_memory(math: str, head_dim: int, block_m: int, smem: int) -> None:
    """Q, and of two stages K, V and the tokens' scales; the result finds room over these."""
    assert kernel(d=head_dim, m=block_m, math=math).smem_bytes == smem


@pytest.mark.parametrize(("math", "stage"), [("int8", 2 * 64 * 128 + 512), ("int8qk", 3 * 64 * 128)])
def test_shared_memory_of_split_kernels(math: str, stage: int) -> None:
    """Q once, and K, V and the tokens' scales of every warp."""
    assert kernel(d=128, math=math, **SPLIT).smem_bytes == 16 * 128 + 4 * stage


def release(*, split: bool) -> list[FmhaFwdQ8]:
    kernels = [found for found in FMHA_FWD_Q8.spaces["release"]().kernels if isinstance(found, FmhaFwdQ8)]
    return [found for found in kernels if found.split is split]


def test_every_release_kernel_serves_smaller_head_dims() -> None:
    for split in (False, True):
        kernels = release(split=split)
        assert {(k.math, k.head_dim) for k in kernels} == {(m, d) for m in Math for d in (64, 128)}
        for found in kernels:
            assert Takes.SMALLER_HEAD_DIM | Takes.LENGTHS | Takes.WINDOW | Takes.SINKS in found.takes
            assert (Takes.SPLITS in found.takes) == split
            assert bool(found.takes & (Takes.BOOL | Takes.BIAS16 | Takes.BIAS32)) != split
            assert not found.takes & Takes.DROPOUT
    for found in release(split=False):
        assert found.ctas_per_sm >= (2 if found.math is Math.INT8 else 1)
        assert Takes.BOOL | Takes.BIAS16 | Takes.BIAS32 in found.takes


def test_functions() -> None:
    """One for each kind of mask and one for the bytes."""
    for found in release(split=True):
        assert [function.symbol for function in found.functions] == [found.name, f"{found.name}_quantize"]
    for found in release(split=False):
        suffixes = [function.symbol.removeprefix(found.name) for function in found.functions]
        assert suffixes == ["", "_bool", "_bias16", "_bias32", "_quantize"]
    assert kernel(d=64, m=64, math="int8").ctas_by_registers == 3


def test_accuracy_follows_the_math() -> None:
    assert kernel(math="int8").accuracy is Accuracy.INT8
    assert kernel(math="int8qk").accuracy is Accuracy.INT8_QK
    assert kernel().group != kernel(math="int8qk").group
