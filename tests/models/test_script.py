"""benchmarks/models runs, writes what it found, and says so when models disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import models
from benchmarks.models.families import ENCODER, NAMES
from sdpa_cutlass.public import api

SMALL = ("--device", "cpu", "--small", "--dtype", "f16", "--encoder", "none")
OURS = ("--provider", "sdpa_cutlass", "interface")


def rows_of(file: Path) -> list[dict]:
    found = json.loads(file.read_text())
    assert found["format"] == 2
    assert {"gpu", "driver", "torch", "transformers", "library", "date", "cpu"} <= found["env"].keys()
    return found["rows"]


@pytest.mark.parametrize("family", [name for name in NAMES if name != ENCODER])
def test_the_small_models_agree(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every call is served: by `enable`, and by the attention interface but for what its page names."""
    file = tmp_path / "models.json"
    assert models.main([*SMALL, *OURS, "--family", family, "--json", str(file)]) == 0
    rows = rows_of(file)
    assert rows
    assert f"{len(rows)} of {len(rows)} agree" in capsys.readouterr().out
    for row in rows:
        assert row["agrees"]
        assert row["family"] == family
        assert row["served"] == row["calls"] or (row["calls"] == 0 and family == "gpt_oss")
        assert row["served"] > 0
        assert (row["torch_ms"], row["ms"]) == (None, None)  # a CPU claims no speed
        assert sum(problem["calls"] for problem in row["problems"]) == row["calls"]
        interface = row["providers"].get("interface")
        left = {"position_bias": row["calls"]} if family == "t5" else {}
        assert interface is None or interface["fallbacks"] == left


def test_a_wrong_result_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api, "scaled_dot_product_attention", lambda query, *_, **__: torch.zeros_like(query))
    assert models.main([*SMALL, *OURS, "--family", "vit"]) == 1
    assert "0 of 1 agree" in capsys.readouterr().out


def test_a_call_that_is_passed_on_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sdpa_cutlass.integrations.torch_refusals._has_kernel", lambda *_, **__: False)
    assert models.main([*SMALL, *OURS, "--family", "vit"]) == 1
    assert "{'head_dim': 2}" in capsys.readouterr().out


def test_a_wrong_interface_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = api.attention
    monkeypatch.setattr(api, "attention", lambda *inputs, **options: right(*inputs, **options) * 1.1)
    assert models.main([*SMALL, *OURS, "--family", "vit"]) == 1
    assert "0 of 1 agree" in capsys.readouterr().out


def test_quantised_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Calls of at least `min_seqlen` keys are quantised, with a mask or without, the others exact."""
    file = tmp_path / "models.json"
    arguments = [*SMALL, "--family", "bert", "--precision", "int8", "--json", str(file)]
    assert models.main(arguments) == 0
    rows = rows_of(file)
    assert len(rows) == 2  # masked, plain
    for row in rows:
        assert (row["quantised"], row["served"], row["calls"]) == (2, 2, 2)
        assert row["exact_l2"] < 1.5 * row["torch_l2"] < row["l2"] / 2
        assert row["allowed_l2"] > row["l2"]
        assert row["contract_l2"] == 0.034
        assert row["min_seqlen"] == 64
    assert models.main([*arguments, "--min-seqlen", "76"]) == 0
    assert [row["quantised"] for row in rows_of(file)] == [0, 0]
    assert "2 of 2 hold the contract" in capsys.readouterr().out


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(SystemExit, match="a CPU has no graphs"):
        models.main([*SMALL, "--mode", "graph"])
