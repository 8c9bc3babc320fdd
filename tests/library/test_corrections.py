"""Factors of prices: whose they are and where they hold. What the choice loses: test_measured_choices.py."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from benchmarks.documents import kernel_rows
from benchmarks.tiles.corrections import is_corrected
from sdpa_cutlass import Family, KernelInfo, Problem
from sdpa_cutlass.choice.cost import estimate
from sdpa_cutlass.choice.cost.corrections import FILE, TRAITS, factors, name_of
from sdpa_cutlass.cli import predictions

KERNELS = {kernel.name: kernel for kernel in kernel_rows.release()}
TABLE: dict[str, dict[str, float]] = json.loads(FILE.read_text())["factors"]
H200, L4 = predictions.H200.device, predictions.L4.device


def problem_of(kernel: KernelInfo, heads: int, head_dim: int, seqlen_q: int = 512) -> Problem:
    """In the kernel's type, with 512 keys."""
    return Problem(
        dtype=kernel.dtype,
        batch=1,
        num_heads_q=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen_q,
        seqlen_k=512,
        head_dim=head_dim,
    )


def test_every_name_is_that_of_a_kernel_that_is_corrected() -> None:
    corrected = {
        name_of(kernel)
        for kernel in KERNELS.values()
        if kernel.family in (Family.FMHA_FWD, Family.FMHA_FWD_SM90) and is_corrected(kernel)
    }
    assert set(TABLE) <= corrected
    for known in TABLE.values():
        assert set(known) <= set(TRAITS)
        assert all(0.8 < factor < 1.25 for factor in known.values())


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_price_is_multiplied_by_what_its_traits_say(name: str) -> None:
    known = TABLE[name]
    for kernel in KERNELS.values():
        if name_of(kernel) != name:
            continue
        always, few, padded = (known.get(trait, 1.0) for trait in TRAITS)
        full, narrow = (problem_of(kernel, 132, kernel.head_dim // share) for share in (1, 2))
        assert factors(kernel, full, H200) == pytest.approx((always * few, always))
        assert factors(kernel, narrow, H200) == pytest.approx((always * padded * few, always * padded))


def test_cards_that_were_not_measured_keep_their_prices() -> None:
    for kernel in KERNELS.values():
        assert factors(kernel, problem_of(kernel, 132, kernel.head_dim), L4) == (1.0, 1.0)


@pytest.mark.parametrize("pattern", [r"sm90_d\d+_.*_f16$", r"sm89_d\d+_.*_f16_general$"])
def test_few_tiles_are_those_that_one_wave_takes(pattern: str) -> None:
    """The price of a problem with one tile more is corrected otherwise."""
    found = [
        kernel
        for name, kernel in KERNELS.items()
        if re.search(pattern, name) and "few_tiles" in TABLE.get(name_of(kernel), {})
    ]
    assert found
    for kernel in found:
        rows, at_once = kernel.block_m, H200.sms // kernel.detail("cluster", 1)
        few, more = (problem_of(kernel, heads, kernel.head_dim, rows) for heads in (at_once, at_once + 1))
        other = dataclasses.replace(H200, compute_capability=(9, 1))  # the same card without corrections
        at_most, beyond = factors(kernel, few, H200)
        for problem, factor in ((few, at_most), (more, beyond)):
            plain = estimate(kernel, problem, other).cycles
            assert estimate(kernel, problem, H200).cycles == pytest.approx(factor * plain)
