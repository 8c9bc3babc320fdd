"""benchmarks/models.py runs, writes what it found, and says so when models disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import models
from sdpa_cutlass.public import api

SMALL = ("--device", "cpu", "--small", "--dtype", "f16", "--encoder", "none")


def test_the_small_models_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.json"
    assert models.main([*SMALL, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert {"gpu", "driver", "torch", "transformers", "library", "date"} <= found["env"].keys()
    rows = found["rows"]
    assert [row["agrees"] for row in rows] == [True] * 11
    assert {row["model"].split()[0] for row in rows} == {"llama", "gpt2", "vit"}
    assert all(row["served"] > 0 and not row["fallbacks"] for row in rows)
    assert "11 of 11 agree" in capsys.readouterr().out


def test_a_wrong_result_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "scaled_dot_product_attention", lambda query, *_, **__: torch.zeros_like(query))
    assert models.main(SMALL) == 1
    assert "0 of 11 agree" in capsys.readouterr().out
