"""Problems at which the cost model once chose a slow kernel: what was measured there, and its prices now.

Random problems on an H200 (2026-11-23, float16, graph replays). Each has the kernel that was chosen with its
time, and kernels that took less. Only the family that was measured takes part. Then every eighth problem of
some runs, with the times of all kernels that the model held possible, of both families; numbers of splits on
the problems of `benchmarks.splits`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.changed_kernels import has_changed
from benchmarks.documents import kernel_rows, random_tables
from benchmarks.tiles import corrections, model
from sdpa_cutlass import Causal, DType, Family, KernelInfo, Problem
from sdpa_cutlass.choice.cost import Estimate, estimate
from sdpa_cutlass.choice.legal import mismatches
from sdpa_cutlass.choice.select import families_with_plain, order, ranking
from sdpa_cutlass.cli import predictions, results, suites
from sdpa_cutlass.cli.tuning import derive, journal
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from tests.library.cards import made_card

H200 = made_card("H200", (9, 0), 132, 2580)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
JOURNALS = RESULTS / "tuning"


Sizes = tuple[int, int, int, int, int, int]
"""B, Hq, Hkv, Sq, Sk, D"""


def problem_of(sizes: Sizes, **options: Any) -> Problem:
    """In float16."""
    names = ("batch", "num_heads_q", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim")
    return Problem(dtype=DType.F16, **dict(zip(names, sizes, strict=True)), **options)


def choice_among(times: Mapping[str, float], problem: Problem) -> tuple[KernelInfo, float]:
    """What today's prices choose among the kernels that were timed and are still built, and its time over
    that of the fastest one.
    """
    kernels = [kernel for kernel in kernel_rows.release() if kernel.name in times]
    chosen = min(kernels, key=lambda kernel: estimate(kernel, problem, predictions.H200.device).cycles)
    return chosen, times[chosen.name] / min(times[kernel.name] for kernel in kernels)


@dataclasses.dataclass(frozen=True)
class Measured:
    """µs of the kernel that was chosen and of better ones, by the tile in the name."""

    sizes: Sizes
    slow: tuple[str, float]
    better: dict[str, float]

    @property
    def ranked(self) -> list[tuple[KernelInfo, Estimate]]:
        found = ranking(library(Target.HOST), problem_of(self.sizes), Family.FMHA_FWD, H200)
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
]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: "x".join(map(str, case.sizes)))
def test_what_was_slow_is_not_chosen_and_costs_more_than_what_was_faster(case: Measured) -> None:
    assert f"_{case.slow[0]}_" not in case.ranked[0][0].name
    for tile in case.better:
        assert case.price(tile) < case.price(case.slow[0])


def test_prices_of_small_problems_are_near_their_times() -> None:
    """Of one H200, with today's kernels."""
    found = json.loads((RESULTS / "compare_builds" / "2026-11-28-h200-staged-rows.json").read_text())
    cases = {case.name: case for suite in ("mission", "small") for case in suites.SUITES[suite]()}
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    ratios = {}
    for row in found["rows"]:
        if row["problem"] in cases and row["kernel"]:
            problem = predictions.problem_with_masks(dataclasses.replace(cases[row["problem"]], dtype="f16"))
            price = estimate(kernels[row["kernel"]], problem, predictions.H200.device)
            ratios[row["problem"]] = price.microseconds / row["after"]
    assert len(ratios) == 20
    assert statistics.geometric_mean(ratios.values()) == pytest.approx(1, abs=0.1)
    assert all(ratio == pytest.approx(1, abs=0.2) for ratio in ratios.values()), ratios


@pytest.mark.parametrize(("day", "regret", "worst"), [("21", 1.008, 1.31), ("22", 1.003, 1.11)])
def test_the_journals_of_tune_are_ranked_as_well_as_ever(day: str, regret: float, worst: float) -> None:
    """257 and 145 buckets of every kind on the same card: what helped above must not be paid for there.

    Without the kernels that have changed since.
    """
    date = f"2026-11-{day}"
    journals = [journal.read(JOURNALS / f"{date}-h200-tune-f16.jsonl")]
    for item in journals:
        for name, entry in item.entries.items():
            kept = [
                one
                for one in entry.measured
                if not has_changed(item.kernels[one.kernel], entry.problem, date)
            ]
            item.entries[name] = dataclasses.replace(entry, measured=tuple(kept))
    kernels = {name: kernel for item in journals for name, kernel in item.kernels.items()}
    found = model.quality("all", derive.choices(journals), kernels, journals[0].device)
    assert found.mean_regret < regret
    assert found.worst_regret < worst
    assert found.mean_rho is not None
    assert found.mean_rho > 0.9


@pytest.mark.parametrize(
    ("run", "samples", "mean", "worst"),
    [
        ("2026-11-26-h100-f16-random-third", 42, 1.016, 1.21),
        ("2026-11-27-h200-f16-random", 175, 1.005, 1.11),
        ("2026-11-27-h200-f16-random-second", 98, 1.005, 1.08),
        ("2026-11-27-h200-f16-random-sixth", 139, 1.005, 1.08),
        ("2026-11-27-h200-f16-random-seventh", 141, 1.006, 1.14),
        ("2026-11-27-h200-f16-random-eighth", 132, 1.010, 1.18),
        ("2026-11-28-h200-f16-random", 135, 1.007, 1.19),
        ("2026-11-28-h200-f16-random-second", 120, 1.004, 1.16),
        ("2026-11-28-h200-f16-random-third", 132, 1.007, 1.08),
        ("2026-11-28-h200-f16-random-fourth", 120, 1.005, 1.19),
        ("2026-11-28-h200-f16-random-fifth", 136, 1.008, 1.20),
        ("2026-11-28-h200-f16-random-sixth", 138, 1.006, 1.15),
        ("2026-11-28-h200-f16-random-seventh", 74, 1.008, 1.20),
        ("2026-11-29-h200-f16-random", 133, 1.008, 1.32),
        ("2026-11-29-h200-f16-random-second", 129, 1.008, 1.09),
        ("2026-11-29-h200-bf16-random", 68, 1.014, 1.18),
        ("2026-11-29-h200-f16-random-third", 117, 1.006, 1.17),
        ("2026-11-29-h200-f16-random-fourth", 144, 1.009, 1.14),
        ("2026-11-29-h200-bf16-random-second", 149, 1.010, 1.14),
        ("2026-11-29-h200-f16-random-fifth", 136, 1.006, 1.12),
        ("2026-11-29-h200-f16-random-sixth", 125, 1.009, 1.18),
        ("2026-11-29-h200-f16-random-seventh", 130, 1.004, 1.09),
        ("2026-11-29-h200-f16-random-eighth", 134, 1.008, 1.32),
        ("2026-11-29-h200-f16-random-ninth", 137, 1.006, 1.09),
        ("2026-11-29-h200-f16-random-tenth", 118, 1.007, 1.22),
        ("tuning/2026-11-28-h200-random-samples-version-11", 459, 1.007, 1.37),
        ("tuning/2026-11-28-h200-random-samples-fifth", 617, 1.006, 1.26),
        ("tuning/2026-11-28-h200-random-samples-sixth", 512, 1.007, 1.28),
        ("tuning/2026-11-29-h200-random-samples", 555, 1.007, 1.22),
        ("tuning/2026-11-29-h200-random-samples-second", 453, 1.007, 1.30),
    ],
)
def test_little_is_lost_at_random_problems(run: str, samples: int, mean: float, worst: float) -> None:
    """Among the kernels that were timed."""
    regrets = random_tables.losses(results.load(RESULTS / f"{run}.json"))
    assert len(regrets) >= samples
    assert statistics.geometric_mean(regrets.values()) < mean
    assert max(regrets.values()) < worst, max(regrets, key=regrets.__getitem__)


def test_little_is_lost_where_kernels_for_sm_89_compete_alone() -> None:
    """As on an Ada GPU: 3200 problems of the runs above and of samples, timed on H200s."""
    regrets, with_masks = [], []
    for one in corrections.read(RESULTS):
        pairs = zip(one.kernels, one.times, strict=True)
        times = {kernel: time for kernel, time in pairs if kernel.family is Family.FMHA_FWD}
        if one.is_judged and len(times) > 1:
            prices = corrections.prices_of(list(times), one.problem)
            chosen = min(zip(prices, times.values(), strict=True))[1]
            regrets.append(chosen / min(times.values()))
            if one.problem.mask is not None:
                with_masks.append(regrets[-1])
    assert len(regrets) >= 3200
    assert statistics.geometric_mean(regrets) < 1.017
    assert len(with_masks) >= 400
    assert statistics.geometric_mean(with_masks) < 1.022


@pytest.mark.parametrize(
    ("run", "count", "mean", "worst"),
    [
        ("2026-11-27-h200-f16", 52, 1.005, 1.08),
        ("2026-11-28-h200-f16-decode", 85, 1.008, 1.13),
        ("2026-11-29-h200-f16-decode-uneven", 36, 1.02, 1.12),
    ],
)
def test_little_is_lost_at_problems_with_few_tiles(run: str, count: int, mean: float, worst: float) -> None:
    """And at decoding from large caches, among all numbers of splits, tiles and kernels that
    benchmarks.splits timed on an H200.
    """
    rows = json.loads((RESULTS / "splits" / f"{run}.json").read_text())["rows"]
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    regrets = []
    for row in rows:
        problem = corrections.problem_of_splits(row["sizes"])
        times = corrections.times_of_splits(row)
        costs = {name: estimate(kernels[name], problem, predictions.H200.device) for name, _ in times}
        chosen = min(costs, key=lambda name: costs[name].cycles)
        near = min(
            (abs(number - costs[chosen].num_splits), us)
            for (name, number), us in times.items()
            if name == chosen
        )
        regrets.append(near[1] / min(times.values()))
    assert len(regrets) == count
    assert statistics.geometric_mean(regrets) < mean
    assert max(regrets) < worst


@pytest.mark.parametrize(
    ("run", "count", "mean", "most"),
    [
        ("2026-11-26-h200-random-kernels", 1165, 1.014, 0.03),
        ("2026-11-26-h100-masked-kernels", 230, 1.023, 0.05),
    ],
)
def test_little_is_lost_at_many_random_problems(run: str, count: int, mean: float, most: float) -> None:
    """With all kernels worth trying that have not changed since. Most problems of the first file last a few
    microseconds; those of the second have masks, lengths or dropout. `most`: the share at which more than
    15 % are lost.
    """
    found = json.loads((JOURNALS / f"{run}.json").read_text())
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    regrets = []
    for row in found["rows"]:
        asked = row["problem"] | {"alignment": Causal(row["problem"]["alignment"])}
        case = suites.Case(suite="random", dtype="f16", **asked)
        problem = predictions.problem_with_masks(case)
        named = {found["kernels"][int(number)]: time for number, time in row["times"].items()}
        times = {
            name: time
            for name, time in named.items()
            if name in kernels and not has_changed(kernels[name], problem, run)
        }
        if len(times) > 1:
            regrets.append(choice_among(times, problem)[1])
    assert len(regrets) == count
    assert statistics.geometric_mean(regrets) < mean
    assert sum(regret > 1.15 for regret in regrets) < most * count


PAIRS = json.loads((JOURNALS / "2026-11-26-h100-pairs.json").read_text())["rows"]


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row["problem"])
def test_little_is_lost_by_pairs_and_without(row: dict[str, Any]) -> None:
    """Most have rows that do not begin at the L2 cache's sectors, of which each CTA of a pair loads half."""
    sizes = re.fullmatch(r"hopper/b(\d+)_h(\d+)(?:x(\d+))?_s(\d+)_d(\d+)(_causal)?", row["problem"])
    assert sizes is not None
    batch, heads, seqlen, head_dim = map(int, sizes.group(1, 2, 4, 5))
    asked = problem_of(
        (batch, heads, int(sizes[3] or heads), seqlen, seqlen, head_dim),
        causal=Causal.TOP_LEFT if sizes[6] else None,
    )
    _, regret = choice_among(row["times"], asked)
    assert regret < 1.16


@pytest.mark.parametrize(
    ("problem", "is_pair"),
    [
        ((32, 16, 16, 512, 512, 128), True),
        ((16, 16, 16, 1024, 1024, 128), True),
        ((8, 16, 16, 2048, 2048, 128), False),
        ((3, 16, 16, 257, 257, 128), False),
        ((32, 8, 8, 512, 512, 256), True),
        ((16, 8, 8, 1024, 1024, 256), False),
        ((8, 8, 8, 2048, 2048, 256), False),
        ((32, 20, 20, 512, 512, 96), True),
        ((16, 20, 20, 1024, 1024, 96), True),
        ((8, 20, 20, 2048, 2048, 96), False),
        ((32, 12, 12, 512, 512, 160), True),
        ((16, 12, 12, 1024, 1024, 160), True),
        ((32, 10, 10, 512, 512, 192), True),
        ((16, 10, 10, 1024, 1024, 192), False),
        ((32, 16, 2, 512, 512, 128), False),
        ((32, 32, 32, 512, 512, 64), False),
    ],
)
def test_pairs_are_chosen_where_they_were_faster(problem: Sizes, *, is_pair: bool) -> None:
    """Two CTAs that load K and V together, causal; and nothing is lost by more than they take."""
    batch, heads, heads_kv, keys, _, head_dim = problem
    found = json.loads((JOURNALS / "2026-11-26-h100-clusters.json").read_text())
    grouped = f"x{heads_kv}" if heads_kv < heads else ""
    named = f"hopper/b{batch}_h{heads}{grouped}_s{keys}_d{head_dim}_causal"
    row = next(row for row in found["rows"] + found["later_rows"] if row["problem"] == named)
    chosen, regret = choice_among(row["times"], problem_of(problem, causal=Causal.TOP_LEFT))
    assert (chosen.detail("cluster", 1) == 2) == is_pair
    assert regret < 1.07


def test_little_is_lost_on_masks_of_hopper() -> None:
    """General kernels, dropout too. Masks of documents hide most blocks whole, which no price knows."""
    found = json.loads((JOURNALS / "2026-11-26-h200-hopper-masks.json").read_text())
    cases = {case.name: case for case in suites.SUITES["masks"]()}
    regrets = {}
    for row in found["rows"]:
        case = cases.get(row["problem"])
        if case is not None:
            problem = predictions.problem_with_masks(dataclasses.replace(case, dtype="f16"))
            regrets[case.name] = choice_among(row["times"], problem)[1]
    others = [regret for name, regret in regrets.items() if "document" not in name]
    assert len(others) == 72
    assert statistics.geometric_mean(others) < 1.016
    assert max(others) < 1.14
    assert max(regrets.values()) < 1.17


@pytest.mark.parametrize(
    ("sizes", "plain", "split"),
    [
        ((16, 16, 16, 1, 954, 80), 24.66, 22.49),
        ((32, 6, 6, 1, 14012, 80), 257.9, 211.8),
        ((4, 35, 35, 11, 16384, 80), 282.7, 182.3),
    ],
)
def test_few_queries_of_head_dim_80_take_split_kernels(sizes: Sizes, plain: float, split: float) -> None:
    """µs on an H200, of 2026-11-26-h200-random-kernels.json."""
    times = {
        "fmha_fwd_sm89_d80_m32n64_s1_w4_g2_f16": plain,
        "fmha_fwd_sm89_d128_m16n32_s1_w4_g4_f16_general_split": split,
    }
    kernels = [kernel for kernel in kernel_rows.release() if kernel.name in times]
    families, problem, device = families_with_plain(kernels), problem_of(sizes), predictions.H200.device
    chosen = min(kernels, key=lambda one: order(one, estimate(one, problem, device), problem, families))
    assert times[chosen.name] == min(times.values())


def test_little_is_lost_where_queries_or_keys_are_few() -> None:
    """Problems on which random runs had lost most or that are near them, every kernel with several splits.

    Causal masks are numbered: 1 is top left, 2 bottom right. Without problems whose choice has changed since.
    """
    date = "2026-11-25"
    found = json.loads((JOURNALS / f"{date}-h100-few-queries.json").read_text())
    kernels = {kernel.name: kernel for kernel in kernel_rows.release()}
    device = predictions.H200.device
    regrets = {}
    for row in found["rows"]:
        b, hq, hkv, sq, sk, d, causal = row["problem"]
        problem = problem_of(
            (b, hq, hkv, sq, sk, d), causal=(None, Causal.TOP_LEFT, Causal.BOTTOM_RIGHT)[causal]
        )
        times: dict[str, dict[int, float]] = {}
        for run, time in row["times"].items():
            kernel, _, splits = run.replace("#", "/").partition("/")
            if kernel in kernels and not mismatches(kernels[kernel], problem):
                times.setdefault(kernel, {})[int(splits)] = time
        plain = families_with_plain(map(kernels.__getitem__, times))
        priced = [(kernels[name], estimate(kernels[name], problem, device)) for name in times]
        chosen, cost = min(priced, key=lambda pair: order(pair[0], pair[1], problem, plain))
        if has_changed(chosen, problem, date):
            continue
        times = {one: time for one, time in times.items() if not has_changed(kernels[one], problem, date)}
        nearest = min(times[chosen.name], key=lambda count: abs(count - cost.num_splits))
        best = min(min(by_splits.values()) for by_splits in times.values())
        regrets[str(row["problem"])] = times[chosen.name][nearest] / best
    assert len(regrets) == 7
    assert statistics.geometric_mean(regrets.values()) < 1.045
    assert max(regrets.values()) < 1.32, max(regrets, key=regrets.__getitem__)


@pytest.mark.parametrize("causal", [None, Causal.TOP_LEFT], ids=str)
def test_head_dim_80_has_the_kernel_made_for_it(causal: Causal | None) -> None:
    """At 7 random problems of 1024 keys and more it took 0.95 to 1.04 times as long as the one for 96."""
    problem = problem_of((2, 24, 24, 8192, 8192, 80), causal=causal)
    (first, _), *_ = ranking(library(Target.HOST), problem, Family.FMHA_FWD, H200)
    assert first.name.startswith("fmha_fwd_sm90_d80_m192n112_s3_w16_f16")
