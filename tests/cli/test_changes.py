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
    fields = {"provider": provider, "gpu_us": 100.0, "gpu_us_spread": 1.0} | changes
    return Results({"gpu": "A"}, [dataclasses.replace(row, **fields)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("after_us", "spread_us", "verdict"),
    [
        (101.0, 0.0, Verdict.SAME),
        (103.0, 0.0, Verdict.SLOWER),
        (97.0, 0.0, Verdict.FASTER),
        (110.0, 10.0, Verdict.SAME),
        (112.0, 10.0, Verdict.SLOWER),
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


def test_committed_files_share_rows_and_the_status_follows_regressions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status = main(["changes", str(FIRST), str(SECOND), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["rows"]
    assert status == bool(found["regressions"])


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
