"""Factors of prices: whose they are and where they hold. What the choice loses: test_measured_choices.py."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

from benchmarks.documents import kernel_rows
from benchmarks.tiles import constants, corrections
from benchmarks.tiles.corrections import is_corrected
from sdpa_cutlass import Family, KernelInfo, Problem
from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.choice.cost.corrections import (
    FEW_KEYS,
    FEWEST_KEYS,
    FILE,
    HARDLY_ANY_KEYS,
    OF_SIZES,
    TRAITS,
    factors,
    name_of,
)
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ
from sdpa_cutlass.cli import predictions

KERNELS = {kernel.name: kernel for kernel in kernel_rows.release()}
TABLE: dict[str, dict[str, float]] = json.loads(FILE.read_text())["factors"]
H200, L4 = predictions.H200.device, predictions.L4.device


def problem_of(
    kernel: KernelInfo, heads: int, head_dim: int, seqlen_q: int = 512, seqlen_k: int = 512
) -> Problem:
    """In the kernel's type."""
    return Problem(
        dtype=kernel.dtype,
        batch=1,
        num_heads_q=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
    )


def test_every_name_is_that_of_a_kernel_that_is_corrected() -> None:
    priced = [
        kernel for kernel in KERNELS.values() if kernel.family in (Family.FMHA_FWD, Family.FMHA_FWD_SM90)
    ]
    corrected = {name_of(kernel) for kernel in priced if is_corrected(kernel)}
    assert set(TABLE) <= {name_of(kernel) for kernel in priced}
    for name, known in TABLE.items():
        assert name in corrected or set(known) == {OF_SIZES[-1]}
        assert set(known) <= set(TRAITS)
        assert all(0.8 < factor < 1.25 for factor in known.values())


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_price_is_multiplied_by_what_its_traits_say(name: str) -> None:
    known = TABLE[name]
    for kernel in KERNELS.values():
        if name_of(kernel) != name:
            continue
        full, narrow = (problem_of(kernel, 132, kernel.head_dim // share) for share in (1, 2))
        for number, (whole, padded) in enumerate(
            zip(factors(kernel, full, H200), factors(kernel, narrow, H200), strict=True)
        ):
            traits = ["always", *(trait for bit, trait in enumerate(OF_SIZES) if number >> bit & 1)]
            expected = math.prod(known.get(trait, 1.0) for trait in traits)
            assert whole == pytest.approx(expected)
            assert padded == pytest.approx(expected * known.get("padded", 1.0))


def test_cards_that_were_not_measured_keep_their_prices() -> None:
    for kernel in KERNELS.values():
        assert factors(kernel, problem_of(kernel, 132, kernel.head_dim), L4) == (1.0,) * 32


def corrected_by(trait: str, pattern: str) -> list[KernelInfo]:
    """Those whose name matches that have a factor of this trait."""
    return [
        kernel
        for name, kernel in KERNELS.items()
        if re.search(pattern, name) and trait in TABLE.get(name_of(kernel), {})
    ]


def check_factor(kernel: KernelInfo, problem: Problem, number: int) -> None:
    """The price is that of the same card without corrections, times the factor of this number."""
    other = dataclasses.replace(H200, compute_capability=(9, 1))
    plain = estimate(kernel, problem, other).cycles
    factor = factors(kernel, problem, H200)[number]
    assert estimate(kernel, problem, H200).cycles == pytest.approx(factor * plain)


PATTERNS = [r"sm90_d\d+_.*_f16$", r"sm89_d\d+_.*_f16_general$"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_few_tiles_are_those_that_one_wave_takes(pattern: str) -> None:
    """The price of a problem with one tile more is corrected otherwise."""
    found = corrected_by("few_tiles", pattern)
    assert found
    for kernel in found:
        rows, at_once = kernel.block_m, H200.sms // kernel.detail("cluster", 1)
        for heads, number in ((at_once, 0b001), (at_once + 1, 0b000)):
            check_factor(kernel, problem_of(kernel, heads, kernel.head_dim, rows), number)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_few_keys_and_few_rows_end_where_they_are_said_to(pattern: str) -> None:
    found = corrected_by("few_keys", pattern) + corrected_by("few_rows", pattern)
    assert found
    for kernel in found:
        half = kernel.block_m // 2
        for rows, keys, number in (
            (half, HARDLY_ANY_KEYS, 0b11110),
            (half, HARDLY_ANY_KEYS + 1, 0b1110),
            (half, FEWEST_KEYS, 0b1110),
            (half, FEWEST_KEYS + 1, 0b0110),
            (half, FEW_KEYS, 0b0110),
            (half, FEW_KEYS + 1, 0b0100),
            (half + 1, FEWEST_KEYS, 0b1010),
            (half + 1, FEW_KEYS, 0b0010),
            (half + 1, FEW_KEYS + 1, 0b0000),
        ):
            problem = problem_of(kernel, 1000, kernel.head_dim, rows, keys)
            check_factor(kernel, problem, number)
            assert corrections.number_of(kernel, problem) == number


CONSTANTS = {found.name: found for found in constants.constants() if found.key is None}


def test_slopes_are_those_of_the_constant_that_a_price_knows() -> None:
    """And the constant is what it was."""
    plain = KERNELS["fmha_fwd_sm89_d64_m64n64_s1_w4_f16"]
    general = KERNELS["fmha_fwd_sm89_d64_m64n64_s1_w4_f16_general"]
    slowdown = CONSTANTS["_GENERAL_SLOWDOWN"]
    before = slowdown.value
    [(of_plain, of_general)] = constants.slopes([timed(plain, general, heads=1024)], slowdown)
    assert of_plain == 0
    assert of_general == pytest.approx(1, abs=0.05)  # all but the launch
    assert slowdown.value == before


def test_every_constant_may_be_a_little_larger() -> None:
    """Numbers of registers, and of keys up to which factors hold, are no constants of a fit."""
    split = KERNELS["fmha_fwd_sm89_d64_m16n32_s1_w2_g2_f16_general_split"]  # whose registers are listed
    hopper = KERNELS["fmha_fwd_sm90_d64_m128n128_s3_w12_f16"]
    for constant in constants.constants():
        constants.slopes([timed(split, hopper, heads=40)], constant)
    assert not {"REGISTERS", "FEW_KEYS"} & {constant.name for constant in constants.constants()}


def test_constants_step_to_where_less_is_lost() -> None:
    """Where KV groups are ahead by less, the kernel that seemed dearer, and is faster, is the cheaper one."""
    cheap = KERNELS["fmha_fwd_sm89_d64_m32n32_s1_w4_g2_f16"]
    dear = KERNELS["fmha_fwd_sm89_d64_m64n64_s1_w4_f16"]
    problems = 40 * [timed(cheap, dear, heads=40)]
    head_start = CONSTANTS["_RING_HEAD_START"]
    fit = constants.ConstantsFit(problems, [head_start])
    every = torch.ones(len(problems), dtype=torch.bool)
    logs = fit.logarithms(every)
    assert max(fit.lost(torch.zeros_like(logs), every)) == pytest.approx(1.25)
    assert max(fit.lost(logs, every)) == 1
    before = head_start.value
    try:
        head_start.set(before * math.exp(fit.steps(logs).item()))
        of_cheap, of_dear = corrections.prices_of(problems[0].kernels, problems[0].problem)
    finally:
        head_start.set(before)
    assert of_cheap > of_dear


def test_times_count_with_the_number_of_splits_that_kernels_have_today(tmp_path: Path) -> None:
    chunks, plain = (
        KERNELS[f"fmha_fwd_sm89_d64_{tile}_f16{kind}"]
        for tile, kind in (("m16n64_s1_w4_g4", "_general_split"), ("m32n32_s1_w4_g2", ""))
    )
    sizes = [1, 8, 8, 1, 65536, 64, False]
    problem = corrections.problem_of_splits(sizes)
    number = estimate(chunks, problem, corrections.DEVICE).num_splits
    assert number > 1
    row = {
        "sizes": sizes,
        "times_us": {
            "whole": 90.0,
            f"{chunks.name} {number}": 40.0,
            f"{chunks.name} 1": 80.0,
            "torch_flash": 50.0,
        },
        "kernels": {"whole": plain.name},
        "num_splits": {"whole": 0},
    }
    folder = tmp_path / "splits"
    folder.mkdir()
    (folder / "2026-11-29-h200-f16-decode.json").write_text(json.dumps({"rows": [row]}))
    [one] = corrections.read(tmp_path)
    assert one.problem == problem
    assert dict(zip(one.kernels, one.times, strict=True)) == {chunks: 40.0, plain: 90.0}


def timed(slow: KernelInfo, fast: KernelInfo, heads: int) -> corrections.Timed:
    """At head_dim 64: the first takes 1.25 times as long as the second, which takes as long as it costs."""
    problem = problem_of(fast, heads, head_dim=64)
    prices = corrections.prices_of([slow, fast], problem)
    time = math.exp(prices[1]) / (CLOCK_GHZ * 1e3)
    return corrections.Timed("run", True, 1.0, problem, (slow, fast), (1.25 * time, time), prices)
