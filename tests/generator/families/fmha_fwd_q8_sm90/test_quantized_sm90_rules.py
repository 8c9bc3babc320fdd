"""What the rules of Hopper's quantised kernels refuse, what their CTAs occupy, and which are built."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from generator.core.arch import Arch
from generator.core.kernel import Accuracy, DType, Takes
from generator.families import FAMILIES
from generator.families.fmha_fwd_q8_sm90 import FMHA_FWD_Q8_SM90, tiles
from generator.families.fmha_fwd_q8_sm90.config import FmhaFwdQ8Sm90

NAME = "fmha_fwd_q8_sm90_d{d}_m{m}n{n}_s{s}_w{w}_f16_{math}"

STAGE = 640 + 2 * 8  # bytes of a stage's scales, and its barriers


def kernel(
    *, d: int = 128, m: int = 128, n: int = 64, s: int = 4, w: int = 12, math: str = "int8"
) -> FmhaFwdQ8Sm90:
    parsed: FmhaFwdQ8Sm90 = FAMILIES.parse(NAME.format(d=d, m=m, n=n, s=s, w=w, math=math))
    return parsed


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("stages", [2, 8])
def test_two_consumers_fit_both_head_dims(head_dim: int, stages: int) -> None:
    assert FMHA_FWD_Q8_SM90.refusal(kernel(d=head_dim, s=stages)) is None


def test_three_consumers_fit_the_smaller_one() -> None:
    assert FMHA_FWD_Q8_SM90.refusal(kernel(d=64, m=192, w=16)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"d": 96}, "head_dim: head_dim 96 is neither 64 nor 128"),
        ({"d": 256}, "head_dim: head_dim 256"),
        ({"math": "int8qk"}, "math: math int8qk is not int8"),
        ({"n": 128}, "block_n: block_n 128 is not 64"),
        ({"m": 64, "w": 8}, "block_m: block_m 64 is not one of 128, 192"),
        ({"m": 96}, "block_m: block_m 96 is not one of 128, 192"),
        ({"m": 256, "w": 20}, "block_m: block_m 256 is not one of 128, 192"),
        ({"w": 8}, "warps: block_m 128 needs 12 warps, not 8"),
        ({"d": 64, "m": 192}, "warps: block_m 192 needs 16 warps, not 12"),
        ({"s": 1}, "stages: stages 1 is not one of 2 to 8"),
        ({"s": 9}, "stages: stages 9 is not one of 2 to 8"),
        (
            {"m": 192, "w": 16},
            "consumer_registers: at least 212 registers a thread (184 for operands and sums), "
            "the limit of 3 consumers is 160",
        ),
    ],
    ids=str,
)
def test_refused(changes: dict[str, Any], reason: str) -> None:
    refusal = FMHA_FWD_Q8_SM90.refusal(kernel(**changes))
    assert refusal is not None
    assert refusal.startswith(reason)


def test_rules_speak_for_themselves() -> None:
    """Each has a verdict on every kernel with a name, those included that an earlier rule refuses."""
    illegal = kernel(d=256, m=256, n=128, s=40, w=4, math="int8qk")
    reasons = {rule.name: rule.why_not(illegal) for rule in FMHA_FWD_Q8_SM90.rules}
    assert [name for name, reason in reasons.items() if reason is None] == ["consumer_registers"]


@pytest.mark.parametrize(
    ("sizes", "used", "registers"),
    [
        ({}, 4 * (2 * 64 * 128 + STAGE) + 128 * 128 * 2, 168),
        ({"d": 64, "s": 2}, 2 * (2 * 64 * 64 + STAGE) + 128 * 64 * 2, 168),
        ({"d": 64, "m": 192, "w": 16}, 4 * (2 * 64 * 64 + STAGE) + 192 * 64 * 2, 128),
    ],
    ids=str,
)
def test_resources(sizes: dict[str, int], used: int, registers: int) -> None:
    """K and V of every stage and O, in units of 1024 bytes; what the launch gives a thread."""
    found = kernel(**sizes)
    assert 0 <= found.smem_bytes - used < 1024
    assert found.smem_bytes % 1024 == 0
    assert (found.registers, found.ctas_per_sm) == (registers, 1)


def test_what_it_takes() -> None:
    """No tensor of masks, no dropout, and one CTA for all keys of a tile."""
    everything = Takes.FULL | Takes.CAUSAL | Takes.LENGTHS | Takes.PACKED | Takes.UNDROPPED
    everything |= Takes.SMALLER_HEAD_DIM | Takes.WINDOW | Takes.SINKS
    assert kernel().takes == everything
    assert kernel().accuracy is Accuracy.INT8
    assert kernel().code == "90a-real"
    name = kernel().name
    assert [function.symbol for function in kernel().functions] == [name, f"{name}_quantize"]


def test_spaces() -> None:
    """Release has every tile of the table in both types, smoke its first one; the sweep needs no table."""
    tables = tiles.Tables(arch=Arch.SM90, tiles={128: tiles.tiles("m128n64_s3_w12", "m128n64_s2_w12")})
    release = [(found.tile.stages, found.dtype) for found in tiles.release(tables).kernels]
    assert release == [(stages, dtype) for stages in (3, 2) for dtype in DType]
    (smallest,) = tiles.smoke(tables).kernels
    assert smallest.name == kernel(s=3).name
    swept = [found for (found,) in tiles.sweep(tables).tried]
    legal = {(found.head_dim, found.tile.block_m) for found in swept if not FMHA_FWD_Q8_SM90.refusal(found)}
    assert legal == {(64, 128), (64, 192), (128, 128)}
    assert len(swept) == 4 * len(tiles.SWEEP_STAGES)


def test_the_release_serves_head_dims_up_to_128() -> None:
    found = list(tiles.release().kernels)
    assert {(each.head_dim, each.dtype) for each in found} == set(product((64, 128), DType))
    assert len({each.group for each in found}) == 2
