"""Two result files compared: ratios, noise, regressions and the machines."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from sdpa_cutlass.cli import main, results
from sdpa_cutlass.cli.changes import Verdict, find
from sdpa_cutlass.cli.results import Results

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FIRST = RESULTS / "2026-11-22-h200-f16-all.json"
SECOND = RESULTS / "2026-11-22-h200-f16-second.json"


def one(provider: str = "fused", **changes: object) -> Results:
    row = next(row for row in results.load(FIRST).rows if row.provider == "fused" and row.gpu_us)
    fields = {"suite": "mission", "provider": provider, "gpu_us": 100.0, "gpu_us_spread": 1.0} | changes
    return Results({"gpu": "A"}, [dataclasses.replace(row, **fields)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after_us", "spread_us", "verdict"),
    [
        (101.0, 0.0, Verdict.SAME),
        (103.0, 0.0, Verdict.SLOWER),
        (97.0, 0.0, Verdict.FASTER),
        (110.0, 10.0, Verdict.SAME),
        (113.0, 10.0, Verdict.SLOWER),
    ],
)
def test_a_change_counts_beyond_the_noise_of_both(
    after_us: float, spread_us: float, verdict: Verdict
) -> None:
    found = find(one(), one(gpu_us=after_us, gpu_us_spread=spread_us))
    assert [change.verdict for change in found.rows] == [verdict]
    assert bool(found.regressions) == (verdict is Verdict.SLOWER)


def test_what_others_lost_is_no_regression() -> None:
    found = find(one("torch_flash"), one("torch_flash", gpu_us=200.0))
    assert found.rows[0].verdict is Verdict.SLOWER
    assert not found.regressions


def test_a_row_that_became_wrong_is_a_regression() -> None:
    assert find(one(), one(status="wrong: max error")).regressions[0].verdict is Verdict.BROKEN


def test_machines_that_differ_are_named() -> None:
    other = Results({"gpu": "B"}, one().rows)
    assert find(one(), other).machine == {"gpu": ("A", "B")}


def test_a_committed_file_has_not_changed_against_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["changes", str(FIRST), str(FIRST), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["regressions"] == 0
    assert found["machine"] == {}
    assert all(mean["ratio"] == 1 for mean in found["means"])


@pytest.mark.parametrize(("before", "after"), [(FIRST, SECOND), (SECOND, FIRST)])
def test_the_same_library_on_two_gpus_is_no_regression(
    before: Path, after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert results.load(FIRST).env["library"] == results.load(SECOND).env["library"]
    assert main(["changes", str(before), str(after), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    timed = [row for row in found["rows"] if row["provider"] == "fused" and row["ratio"]]
    assert len(timed) > 200
    assert found["regressions"] == 0


@pytest.mark.parametrize("suite", ["mission", "small", "long", "masks", "decode"])
def test_a_kernel_that_lost_a_tenth_is_found_in_most_rows(suite: str) -> None:
    """The noise rule is not so wide that it hides what matters: of the second run's rows, 10 % slower."""
    before, after = results.load(FIRST), results.load(SECOND)
    slower = [
        dataclasses.replace(row, gpu_us=1.1 * row.gpu_us)
        for row in after.rows
        if row.suite == suite and row.provider == "fused" and row.gpu_us
    ]
    found = find(before, Results(after.env, slower))
    share = sum(change.verdict is Verdict.SLOWER for change in found.rows) / len(slower)
    assert share > 0.8, share  # some long problems have wide spreads within a run


def test_the_limit_follows_the_suite() -> None:
    masks = one(suite="masks"), one(suite="masks", gpu_us=104.0)
    assert [change.verdict for change in find(*masks).rows] == [Verdict.SAME]
    assert [change.verdict for change in find(one(), one(gpu_us=104.0)).rows] == [Verdict.SLOWER]


def test_a_slower_file_is_named_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    results.save(one(), before)
    results.save(one(gpu_us=200.0), after)
    assert main(["changes", str(before), str(after)]) == 1
    assert "2.000  slower" in capsys.readouterr().out


def test_what_is_no_result_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert main(["changes", str(path), str(FIRST)]) == 2
    assert str(path) in capsys.readouterr().err
