"""Problems at which the cost model once chose a slow kernel: what was measured there, and its prices now.

Random problems on an H200 (2026-11-23, float16, graph replays). Each has the kernel that was chosen with its
time, and kernels that took less. Only the family that was measured takes part. Then every eighth problem of a
run of 800 (2026-11-24), with the times of all kernels that the model held possible, of both families; and the
general kernels of both on the problems of `benchmarks.compare_kernels`.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import pytest

from benchmarks.documents import kernel_rows
from benchmarks.tiles import model
from sdpa_cutlass import Causal, DType, Family, KernelInfo, Problem
from sdpa_cutlass.choice.cost import Estimate, estimate
from sdpa_cutlass.choice.select import ranking
from sdpa_cutlass.cli import predictions, random_report, results
from sdpa_cutlass.cli.tuning import derive, journal
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from tests.library.cards import made_card

H200 = made_card("H200", (9, 0), 132, 2580)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
JOURNALS = RESULTS / "tuning"


@dataclasses.dataclass(frozen=True)
class Measured:
    """B, Hq, Hkv, Sq, Sk, D; µs of the kernel that was chosen and of better ones, by the tile in the name."""

    sizes: tuple[int, int, int, int, int, int]
    slow: tuple[str, float]
    better: dict[str, float]

    @property
    def ranked(self) -> list[tuple[KernelInfo, Estimate]]:
        batch, heads, heads_kv, rows, keys, head_dim = self.sizes
        problem = Problem(
            dtype=DType.F16,
            batch=batch,
            num_heads_q=heads,
            num_heads_kv=heads_kv,
            seqlen_q=rows,
            seqlen_k=keys,
            head_dim=head_dim,
        )
        found = ranking(library(Target.HOST), problem, Family.FMHA_FWD, H200)
        return [pair for pair in found if pair[0].family is Family.FMHA_FWD]

    def price(self, tile: str) -> float:
        return next(cost.cycles for kernel, cost in self.ranked if f"_{tile}_" in kernel.name)


MEASURED = [
    Measured(
        (4, 8, 2, 292, 8186, 72),
        ("d80_m32n64_s1_w4_g2", 342),
        {"d80_m128n64_s1_w4": 183, "d96_m128n64_s1_w4": 183},
    ),
    Measured((4, 1, 1, 2308, 2308, 80), ("d80_m32n64_s1_w4_g2", 76), {"d80_m128n64_s1_w4_qreg": 49}),
    Measured((2, 1, 1, 3277, 3277, 72), ("d80_m32n64_s1_w4_g2", 87), {"d128_m32n64_s1_w4_g2": 54}),
    Measured((16, 12, 12, 45, 7188, 40), ("d64_m16n64_s1_w4_g4", 155), {"d64_m32n64_s1_w8_g4": 115}),
    Measured((4, 20, 20, 54, 2639, 48), ("d64_m16n64_s1_w4_g4", 35), {"d64_m32n128_s1_w4_g2": 27}),
    Measured((64, 16, 8, 8428, 123, 64), ("d64_m128n64_s2_w4_qreg", 1789), {"d64_m64n64_s1_w4": 1531}),
    Measured((64, 8, 8, 3003, 42, 80), ("d80_m128n64_s1_w4_qreg", 329), {"d80_m64n64_s1_w4": 263}),
    Measured((64, 64, 32, 55, 21, 128), ("d128_m128n32_s1_w4", 81), {"d128_m64n64_s1_w4": 70}),
]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "x".join(map(str, case.sizes)))
def test_what_was_slow_is_not_chosen_and_costs_more_than_what_was_faster(case: Measured) -> None:
    assert f"_{case.slow[0]}_" not in case.ranked[0][0].name
    for tile in case.better:
        assert case.price(tile) < case.price(case.slow[0])


@pytest.mark.parametrize(("day", "regret", "worst"), [("21", 1.0055, 1.31), ("22", 1.0026, 1.09)])
def test_the_journals_of_tune_are_ranked_as_well_as_ever(day: str, regret: float, worst: float) -> None:
    """257 and 145 buckets of every kind on the same card: what helped above must not be paid for there."""
    journals = [journal.read(JOURNALS / f"2026-11-{day}-h200-tune-f16.jsonl")]
    kernels = {name: kernel for item in journals for name, kernel in item.kernels.items()}
    found = model.quality("all", derive.choices(journals), kernels, journals[0].device)
    assert found.mean_regret < regret
    assert found.worst_regret < worst
    assert found.mean_rho is not None
    assert found.mean_rho > 0.9


def test_little_is_lost_at_random_problems() -> None:
    """Among the kernels that were timed. Dense masks lay in unaligned rows then, which a call copies now."""
    found = results.load(RESULTS / "2026-11-24-h200-f16-random.json")
    rows = {
        dataclasses.replace(random_report.case_of(row), dtype=None).name: row
        for row in found.rows
        if row.provider == "fused" and row.dtype == "f16"
    }
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    regrets = {}
    for sample in found.env["random"]["samples"]:
        name, times = sample["problem"], sample["times"]
        if rows[name].mask == "dense" and rows[name].seqlen_k % 8:
            continue
        chosen = predictions.predict(map(kernels.__getitem__, times), rows[name], predictions.H200)
        assert chosen is not None
        regrets[name] = times[chosen.kernel.name] / min(times.values())
    assert len(regrets) >= 55
    assert statistics.geometric_mean(regrets.values()) < 1.01
    assert max(regrets.values()) < 1.2, max(regrets, key=regrets.__getitem__)


# What is asked, batch, heads, seqlen, head_dim: µs of the fastest general kernels, by family, arch and tile.
GENERAL: dict[tuple[str, int, int, int, int], dict[str, int]] = {
    ("causal", 32, 32, 512, 64): {
        "sm90_d64_m192n128_s3_w16": 184,
        "sm89_d64_m128n64_s2_w4_qreg": 186,
        "sm89_d64_m64n64_s1_w4": 195,
        "sm90_d64_m128n128_s3_w12": 211,
    },
    ("lengths", 32, 32, 512, 64): {
        "sm90_d64_m192n128_s3_w16": 209,
        "sm89_d64_m128n64_s2_w4_qreg": 210,
        "sm90_d64_m128n128_s3_w12": 244,
        "sm89_d64_m64n64_s1_w4": 252,
    },
    ("packed", 32, 32, 512, 64): {
        "sm90_d64_m192n128_s3_w16": 182,
        "sm89_d64_m128n64_s2_w4_qreg": 194,
        "sm90_d64_m128n128_s3_w12": 212,
        "sm89_d64_m64n64_s1_w4": 226,
    },
    ("packed_causal", 32, 32, 512, 64): {
        "sm89_d64_m64n64_s1_w4": 152,
        "sm89_d64_m128n64_s2_w4_qreg": 156,
        "sm90_d64_m192n128_s3_w16": 158,
        "sm90_d64_m128n128_s3_w12": 186,
    },
    ("window", 32, 32, 512, 64): {
        "sm89_d64_m64n64_s1_w4": 140,
        "sm89_d64_m128n64_s2_w4_qreg": 157,
        "sm90_d64_m192n128_s3_w16": 181,
        "sm90_d64_m128n128_s3_w12": 200,
    },
    ("sinks", 32, 32, 512, 64): {
        "sm90_d64_m192n128_s3_w16": 189,
        "sm89_d64_m128n64_s2_w4_qreg": 190,
        "sm89_d64_m64n64_s1_w4": 197,
        "sm90_d64_m128n128_s3_w12": 215,
    },
    ("causal", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 353,
        "sm90_d64_m128n128_s3_w12": 425,
        "sm89_d64_m128n64_s2_w4_qreg": 483,
        "sm89_d64_m64n64_s1_w4": 541,
    },
    ("lengths", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 459,
        "sm90_d64_m128n128_s3_w12": 555,
        "sm89_d64_m128n64_s2_w4_qreg": 646,
        "sm89_d64_m64n64_s1_w4": 778,
    },
    ("packed", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 377,
        "sm90_d64_m128n128_s3_w12": 450,
        "sm89_d64_m128n64_s2_w4_qreg": 524,
        "sm89_d64_m64n64_s1_w4": 648,
    },
    ("packed_causal", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 239,
        "sm90_d64_m128n128_s3_w12": 293,
        "sm89_d64_m128n64_s2_w4_qreg": 328,
        "sm89_d64_m64n64_s1_w4": 357,
    },
    ("window", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 244,
        "sm89_d64_m128n64_s2_w4_qreg": 277,
        "sm89_d64_m64n64_s1_w4": 283,
        "sm90_d64_m128n128_s3_w12": 291,
    },
    ("sinks", 8, 32, 2048, 64): {
        "sm90_d64_m192n128_s3_w16": 356,
        "sm90_d64_m128n128_s3_w12": 427,
        "sm89_d64_m128n64_s2_w4_qreg": 485,
        "sm89_d64_m64n64_s1_w4": 543,
    },
    ("causal", 32, 16, 512, 128): {
        "sm90_d128_m192n80_s3_w16": 128,
        "sm90_d128_m128n128_s2_w12": 135,
        "sm89_d128_m128n32_s2_w4": 168,
        "sm89_d128_m64n64_s1_w4": 180,
    },
    ("lengths", 32, 16, 512, 128): {
        "sm90_d128_m192n80_s3_w16": 129,
        "sm90_d128_m128n128_s2_w12": 150,
        "sm89_d128_m128n32_s2_w4": 182,
        "sm89_d128_m64n64_s1_w4": 228,
    },
    ("packed", 32, 16, 512, 128): {
        "sm90_d128_m192n80_s3_w16": 109,
        "sm90_d128_m128n128_s2_w12": 129,
        "sm89_d128_m128n32_s2_w4": 161,
        "sm89_d128_m64n64_s1_w4": 194,
    },
}


@pytest.mark.parametrize("setting", GENERAL, ids=lambda setting: "-".join(map(str, setting)))
def test_general_kernels_of_both_families_are_ranked(setting: tuple[str, int, int, int, int]) -> None:
    kind, batch, heads, seqlen, head_dim = setting
    problem = Problem(
        dtype=DType.F16,
        batch=batch,
        num_heads_q=heads,
        num_heads_kv=heads,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        head_dim=head_dim,
        causal=Causal.TOP_LEFT if kind in ("causal", "packed_causal", "sinks") else None,
        has_lengths=kind in ("lengths", "packed", "packed_causal"),
        window=(seqlen // 4 - 1, 0) if kind == "window" else None,
        has_sinks=kind == "sinks",
    )
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    times = GENERAL[setting]
    prices = {
        name: estimate(kernels[f"fmha_fwd_{name}_f16_general"], problem, predictions.H200.device).cycles
        for name in times
    }
    assert times[min(prices, key=prices.__getitem__)] <= 1.04 * min(times.values())
