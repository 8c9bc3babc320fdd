"""The line of a run of random problems, from times made up for it."""

from __future__ import annotations

import pytest

from benchmarks.documents import random_tables
from sdpa_cutlass.cli import random_report, random_suite
from sdpa_cutlass.cli.results import Results
from tests.cli.rows import ENV, row

PLAIN = "fmha_fwd_sm89_d64_m64n64_s1_w4_f16", "fmha_fwd_sm89_d64_m16n64_s1_w4_g4_f16"


def run(*ratios: float, times: dict[str, float] | None = None, first_keys: int = 1024) -> Results:
    """Ours takes 10 µs, flash as often as long; `times` are those of a sample at the first problem."""
    rows = [
        row(provider, time, suite=random_suite.SUITE, seqlen_k=keys)
        for keys, ratio in enumerate(ratios, start=first_keys)
        for provider, time in (("fused", 10.0), ("torch_flash", 10.0 * ratio))
    ]
    name = random_report.case_of(rows[0]).name.removesuffix("_f16")
    samples = [{"problem": name, "chosen": "", "times": times}] if times else []
    return Results({**ENV, "random": {"samples": samples}}, rows)


def test_a_line_says_how_often_and_by_how_much() -> None:
    head, _, line = random_tables.table({"7": run(4.0, 1.0, 0.8, 0.8)})
    cells = dict(zip(head.strip("| ").split(" | "), line.strip("| ").split(" | "), strict=True))
    assert cells["seed"] == "7"
    assert (cells["problems"], cells["ahead"]) == ("4", "50.0 %")
    assert (cells["mean"], cells["least"], cells["below 0.9"]) == ("1.26", "0.80", "2")
    assert cells["above"] == cells["cuDNN over ours"] == cells["choice loses"]  # nothing was measured


@pytest.mark.parametrize("slow", [0, 1])
def test_what_the_choice_loses_is_over_the_fastest(slow: int) -> None:
    times = {name: 15.0 if index == slow else 10.0 for index, name in enumerate(PLAIN)}
    (lost,) = random_tables.losses(run(1.0, times=times)).values()
    assert lost in (1.0, 1.5)
    (other,) = random_tables.losses(
        run(1.0, times={name: 25 - time for name, time in times.items()})
    ).values()
    assert {lost, other} == {1.0, 1.5}  # the choice does not look at times


def test_times_of_kernels_that_have_changed_since_do_not_count() -> None:
    """One of the two wrote O more slowly then, which counts where keys are few."""
    times = dict.fromkeys(PLAIN, 10.0)
    assert random_tables.losses(run(1.0, times=times, first_keys=513))
    assert not random_tables.losses(run(1.0, times=times, first_keys=512))
