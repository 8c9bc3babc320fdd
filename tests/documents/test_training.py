"""benchmarks/training.py: a small model trains under `enable()` as under torch, and the same again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import training
from benchmarks.training import Run, Setup

ROOT = Path(__file__).resolve().parents[2]


def test_a_model_trains_as_under_torch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With dropout and checkpointing: every call is served, and a repeated run has the same bits."""
    file = tmp_path / "training.json"
    assert training.main(["--device", "cpu", "--steps", "25", "--json", str(file)]) == 0
    assert "all that is asked holds" in capsys.readouterr().out
    found = json.loads(file.read_text())
    ours, again, *torchs = found["runs"]
    assert ours | {"step_ms": 0} == again | {"step_ms": 0}
    assert ours["step_ms"] > 0
    assert ours["served"] == 100
    assert len({run["parameters"] for run in (ours, *torchs)}) == 4
    assert all(len(run["losses"]) == 25 for run in found["runs"])


def test_what_does_not_hold_is_said() -> None:
    setup = Setup(device="cpu", steps=20, layers=1)
    curve = [4 - 0.01 * i for i in range(20)]
    torchs = [Run("torch", seed, [loss + 0.01 * seed for loss in curve], "") for seed in (1, 2, 3)]

    def broken(losses: list[float], *, parameters: str = "a", served: int = 40) -> list[str]:
        first, second = (Run("sdpa_cutlass", 1, losses, name, served) for name in ("a", parameters))
        return training.verdict(setup, [first, second, *torchs])[1]

    assert broken([loss + 0.02 for loss in curve]) == []
    assert broken(curve, served=39)[0] == "39 of 40 calls served, {}"
    assert "the repeated run has other bits" in broken(curve, parameters="b")
    assert broken([loss + 0.1 for loss in curve]) == [
        "the loss curve is further from torch's than torch's from each other"
    ]
    assert "the loss does not fall" in broken([4.0] * 20)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks/results/training").glob("*.json")), ids=str)
def test_committed_runs_hold(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["env"]["cpu"]
    assert record["setup"]["steps"] == 200
    runs = [Run(**run) for run in record["runs"]]
    assert training.verdict(Setup(**record["setup"]), runs)[1] == []
