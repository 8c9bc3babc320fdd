"""What the rules of the quantised kernels refuse, and what their CTAs occupy."""

from __future__ import annotations

import pytest

from generator.core.kernel import Accuracy, Takes
from generator.families import FAMILIES
from generator.families.fmha_fwd_q8 import FMHA_FWD_Q8
from generator.families.fmha_fwd_q8.config import FmhaFwdQ8, Math

NAME = "fmha_fwd_q8_sm89_d{d}_m{m}n{n}_s{s}_w{w}_f16_{math}"


def kernel(
    *, d: int = 64, m: int = 128, n: int = 64, s: int = 2, w: int = 4, math: str = "int8"
) -> FmhaFwdQ8:
    parsed: FmhaFwdQ8 = FAMILIES.parse(NAME.format(d=d, m=m, n=n, s=s, w=w, math=math))
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
    ],
    ids=str,
)
def test_refused(changes: dict[str, int], rule: str) -> None:
    assert FMHA_FWD_Q8.refusal(kernel()) is None
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


def test_every_release_kernel_serves_smaller_head_dims() -> None:
    kernels = list(FMHA_FWD_Q8.spaces["release"]().kernels)
    assert {(k.math, k.head_dim) for k in kernels} >= {(m, d) for m in Math for d in (64, 128)}  # type: ignore[attr-defined]
    for found in kernels:
        assert found.ctas_per_sm >= (2 if found.math is Math.INT8 else 1)
        assert Takes.SMALLER_HEAD_DIM | Takes.LENGTHS | Takes.WINDOW | Takes.SINKS in found.takes
        assert Takes.BOOL | Takes.BIAS16 | Takes.BIAS32 in found.takes
        assert not found.takes & (Takes.DROPOUT | Takes.SPLITS)


def test_functions() -> None:
    """One for each kind of mask and one for the bytes; those with masks have registers for them."""
    for found in FMHA_FWD_Q8.spaces["release"]().kernels:
        assert isinstance(found, FmhaFwdQ8)
        suffixes = [function.symbol.removeprefix(found.name) for function in found.functions]
        assert suffixes == ["", "_bool", "_bias16", "_bias32", "_quantize"]
        assert found.masked_ctas_by_registers <= found.ctas_by_registers
    narrow = kernel(d=64, m=64, math="int8")
    assert (narrow.ctas_by_registers, narrow.masked_ctas_by_registers) == (4, 3)


def test_accuracy_follows_the_math() -> None:
    assert kernel(math="int8").accuracy is Accuracy.INT8
    assert kernel(math="int8qk").accuracy is Accuracy.INT8_QK
    assert kernel().group != kernel(math="int8qk").group
