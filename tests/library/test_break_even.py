"""From which length on quantising should pay, and who says so: predictions of the cost models."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sdpa_cutlass import DType, Family, KernelInfo, Precision, Problem, explain
from sdpa_cutlass.choice import break_even as rule
from sdpa_cutlass.choice.cost import Estimate, estimate
from sdpa_cutlass.choice.cost.model import CLOCK_GHZ
from sdpa_cutlass.choice.cost.quantised import INT8_PASS_BYTES, pass_cycles
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.device import L4, RTX_4090, DeviceInfo
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Asked, read_kernels
from tests.kernel_rows import kernel_row
from tests.library.cards import made_card
from tests.library.reference import rand

H200 = made_card("NVIDIA H200", (9, 0), 132, 2580)
PROBLEM = Problem(
    dtype=DType.F16, batch=4, num_heads_q=16, num_heads_kv=16, seqlen_q=1, seqlen_k=1, head_dim=128
)
ROW = kernel_row("fmha_fwd_sm89_d128_m64n64_s1_w4_f16")


def test_the_least_length_from_which_on_it_stays_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first one at which it is: at 512 it is faster, at 1024 slower, from 2048 on faster."""

    def ranking(
        _: Library, problem: Problem, asked: Asked, __: DeviceInfo
    ) -> list[tuple[KernelInfo, Estimate]]:
        assert problem.seqlen_q == problem.seqlen_k
        slower = asked is Precision.INT8 and problem.seqlen_q in (256, 1024)
        us = 2.0 if slower else 1.0 if asked is Precision.INT8 else 1.5
        return [(ROW, Estimate(ctas=1, waves=1, useful=1, cycles=1, microseconds=us))]

    monkeypatch.setattr(rule, "ranking", ranking)
    found = rule.break_even(library(Target.HOST), PROBLEM, Precision.INT8, L4)
    assert found == 2048


def test_no_length_where_exact_kernels_stay_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    same = [(ROW, Estimate(ctas=1, waves=1, useful=1, cycles=1, microseconds=1.0))]
    monkeypatch.setattr(rule, "ranking", lambda *_: same)
    assert rule.break_even(library(Target.HOST), PROBLEM, Precision.INT8, L4) is None
    monkeypatch.setattr(rule, "ranking", lambda *_: [])
    assert rule.break_even(library(Target.HOST), PROBLEM, Precision.INT8, L4) is None


@pytest.mark.parametrize("precision", Precision)
def test_explain_says_it_of_this_card_and_two_others(device: str, precision: Precision) -> None:
    q, k, v = (rand(1, 8, 100, 64, device=device, seed=seed) for seed in range(3))
    found = explain(q, k, v, precision=precision)
    assert set(found.pays_from) == {found.device.name, L4.name, RTX_4090.name}
    assert found.exact_us == pytest.approx(explain(q, k, v).predicted_us)
    assert f"exact    {found.exact_us:.4g} us without a precision, a prediction" in str(found)
    assert f"with as many queries as keys, on {RTX_4090.name}: a prediction" in str(found)
    asked = [length for length in found.pays_from.values() if length is not None]
    assert set(asked) <= set(rule.SEQLENS)


def test_exact_calls_say_nothing_of_it(device: str) -> None:
    found = explain(*(rand(1, 2, 40, 64, device=device, seed=seed) for seed in range(3)))
    assert (found.pays_from, "without a precision" in str(found)) == ({}, False)
    assert math.isnan(found.exact_us)


def cost(accuracy: str, device: DeviceInfo, seqlen: int, head_dim: int) -> float:
    """Of the cheapest kernel without splits: microseconds."""
    problem = dataclasses.replace(
        PROBLEM,
        batch=16384 // seqlen,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        head_dim_v=head_dim,
    )
    family = Family.FMHA_FWD if accuracy == "EXACT" else Family.FMHA_FWD_Q8
    rows = [
        row
        for row in read_kernels(library(Target.HOST))
        if row.family is family and row.accuracy.name == accuracy and row.dtype is DType.F16
        if row.head_dim == head_dim
        and not row.is_split
        and not (family is Family.FMHA_FWD and row.is_general)
    ]
    return min(estimate(row, problem, device).microseconds for row in rows)


@pytest.mark.parametrize(
    ("accuracy", "head_dim", "least"), [("INT8", 64, 2.4), ("INT8", 128, 2.6), ("INT8_QK", 64, 1.4)]
)
def test_bytes_gain_on_ada_what_its_machine_code_says(accuracy: str, head_dim: int, least: float) -> None:
    """Within a tenth of `benchmarks.quantised_on_ada` at 8192 keys: 2.52, 2.78 and 1.48 on an RTX 4090."""
    gain = cost("EXACT", RTX_4090, 8192, head_dim) / cost(accuracy, RTX_4090, 8192, head_dim)
    assert least < gain < 1.15 * least
    assert gain > cost("EXACT", L4, 8192, head_dim) / cost(accuracy, L4, 8192, head_dim) > 1.1


def test_bytes_by_mma_sync_gain_little_on_hopper() -> None:
    assert cost("EXACT", H200, 8192, 64) / cost("INT8", H200, 8192, 64) < 1.1


def test_a_pass_is_no_faster_than_dram() -> None:
    row = next(row for row in read_kernels(library(Target.HOST)) if row.accuracy is Accuracy.INT8)
    problem = dataclasses.replace(PROBLEM, seqlen_q=4096, seqlen_k=4096)
    moved = 4 * 16 * 4096 * row.head_dim * INT8_PASS_BYTES
    slow = dataclasses.replace(L4, dram_gbps=50.0)
    assert moved > slow.l2_bytes
    made = pass_cycles(row, slow, problem, INT8_PASS_BYTES)
    assert made == pytest.approx(slow.dram_us(moved) * CLOCK_GHZ * 1e3)
    fast = dataclasses.replace(L4, dram_gbps=5000.0)
    assert pass_cycles(row, fast, problem, INT8_PASS_BYTES) == pytest.approx(moved / (10 * L4.sms))
