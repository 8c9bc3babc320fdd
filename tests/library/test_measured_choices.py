"""Problems at which the cost model once chose a slow kernel: what was measured there, and its prices now.

Random problems on an H200 (2026-11-23, float16, graph replays). Each has the kernel that was chosen with its
time, and kernels that took less. Only the family that was measured takes part.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks.tiles import model
from sdpa_cutlass import DType, Family, KernelInfo, Problem
from sdpa_cutlass.choice.cost import Estimate
from sdpa_cutlass.choice.select import ranking
from sdpa_cutlass.cli.tuning import derive, journal
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from tests.library.cards import made_card

H200 = made_card("H200", (9, 0), 132, 2580)
JOURNALS = Path(__file__).parents[2] / "benchmarks" / "results" / "tuning"


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
