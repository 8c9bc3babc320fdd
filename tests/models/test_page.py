"""The tables of docs/models.md and docs/quantised.md are made from committed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.documents import kernel_rows
from benchmarks.models import page
from sdpa_cutlass.cli.predictions import L4, predict
from sdpa_cutlass.cli.results import Row

ENV = {
    "gpu": None,
    "driver": None,
    "cpu": "Some CPU",
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-02T03",
}
ROW: dict[str, Any] = {
    "model": "M",
    "task": "t",
    "dtype": "f16",
    "mode": "eager",
    "calls": 3,
    "served": 2,
    "torch_ms": None,
    "ms": None,
    "providers": {
        "torch": {"l2": 1e-3, "status": "ok", "attention_share": None},
        "sdpa_cutlass": {"l2": 2e-3, "status": "ok"},
        "interface": {"l2": None, "status": "refused: why", "fallbacks": {"head_dim": 1}},
    },
}


def made(folder: Path, kind: str, *rows: dict[str, Any], **env: Any) -> list[str]:
    (folder / "f.json").write_text(json.dumps({"env": ENV | env, "rows": rows}))
    text = f"before\n<!-- models: {kind} f.json -->\nold\n<!-- end models -->\nafter\n"
    found = page.remade(text, folder)
    assert page.remade(found, folder) == found
    assert "old" not in found
    lines = found.splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    return lines[4:-2]  # without head and rule


def test_committed_pages_are_fresh() -> None:
    assert page.main(["--check"]) == 0
    for name in page.PAGES:
        text = (page.ROOT / name).read_text(encoding="utf-8")
        assert text.count("Made by `python -m benchmarks.models.page`") == text.count("<!-- models: ") > 0


def test_errors_and_what_was_passed_on(tmp_path: Path) -> None:
    others = [ROW | {"dtype": "bf16"}, ROW | {"mode": "graph"}]
    row, _, origin = made(tmp_path, "errors", ROW, *others)
    assert row == "| M | t | 1.0e-03 | 2.0e-03 | refused: why | 2 of 3 | 1 × head_dim |"
    assert "f.json](f.json): Some CPU, the host library, torch 2, transformers 5, 2026-01-02." in origin


def test_a_file_of_a_cpu_has_no_times(tmp_path: Path) -> None:
    assert not made(tmp_path, "times", ROW)[0].startswith("|")
    timed = ROW | {"torch_ms": 3.0, "ms": 2.0, "providers": {"torch": {"attention_share": 0.25}}}
    row, _, origin = made(tmp_path, "times", timed, gpu="A card", driver="5")
    assert row == "| M | t | eager | 3.00 | 2.00 | 1.500 | 25% |"
    assert "A card, driver 5" in origin


def test_slower_rows_are_named_and_odd_graphs_left_out(tmp_path: Path) -> None:
    timed = ROW | {"by": "sdpa_cutlass", "torch_ms": 4.0, "ms": 2.0}
    slower = timed | {"task": "u", "ms": 5.0}
    odd = timed | {"mode": "graph", "torch_ms": 32.0, "ms": 4.0}
    unfused = timed | {"model": "N", "by": "interface", "ms": 1.0}
    untimed = timed | {"model": "O", "mode": "graph", "torch_ms": None, "ms": None}
    lines = made(tmp_path, "speedups", timed, slower, odd, unfused, untimed, ROW)
    eager, graph, every, usual, fused = lines[:5]
    assert eager == "| eager | 3 | 1.857 | M, u, eager: 0.800 |"  # the cube root of 2 × 0.8 × 4
    assert graph == "| graph | 1 | 8.000 | none |"
    assert every.startswith("| all | 4 | 2.675 | M, u")
    assert usual.startswith("| without M, t, graph: ")
    assert usual.split(" | ")[1:3] == ["3", "1.857"]
    assert fused.split(" | ")[1:3] == ["2", "1.265"]


def test_a_broken_contract_shows(tmp_path: Path) -> None:
    row = dict.fromkeys(("exact_l2", "l2", "allowed_l2", "one_minus_cosine"), 0.001)
    row |= {"model": "M", "task": "t", "dtype": "f16", "precision": "int8", "quantised": 1, "calls": 2}
    row |= {"heads_hold": False, "contract_l2": 0.034, "head_l2": 0.05}
    line, _, _ = made(tmp_path, "quantised", row, row | {"quantised": 0})
    assert line.endswith("| 5.0e-02 (the contract says 3.4e-02) |")


def test_attention_is_predicted_for_an_l4(tmp_path: Path) -> None:
    """Each call as often as it is made, masks at the price of kernels that take them; eager rows alone."""
    shape = {"query": [2, 8, 512, 64], "key": [2, 4, 512, 64], "value": [2, 4, 512, 64]}
    plain = shape | {"mask": "", "is_causal": True, "calls": 2}
    masked = shape | {"mask": "bool [2, 1, 512, 512]", "is_causal": False, "calls": 3}
    biased = shape | {"mask": "float32 [1, 8, 512, 512]", "is_causal": False, "calls": 1}

    def cells(*problems: dict[str, Any], **more: Any) -> list[str]:
        lines = made(tmp_path, "predicted", ROW | {"problems": list(problems), **more})
        return lines[0].strip("| ").split(" | ") if lines[0].startswith("|") else []

    one = {call["mask"]: float(cells(call)[3]) / call["calls"] for call in (plain, masked, biased)}
    row = Row(
        suite="", batch=2, num_heads_q=8, num_heads_kv=4, seqlen_q=512, seqlen_k=512, head_dim=64,
        dtype="f16", causal=True, mask="none", p_dropout=0.0, visible=1.0, provider="fused",
    )  # fmt: skip
    found = predict(kernel_rows.release(), row, L4)
    assert found is not None
    assert one[""] == pytest.approx(found.microseconds, rel=5e-3)
    full = float(cells(plain | {"is_causal": False})[3]) / 2
    assert one[""] < full < one[masked["mask"]] <= 1.005 * one[biased["mask"]]  # all are rounded
    every = cells(plain, masked, biased, ms=2.5)
    assert every[:3] == ["M", "t", "3"]
    assert float(every[3]) == pytest.approx(
        2 * one[""] + 3 * one[masked["mask"]] + one[biased["mask"]], rel=0.01
    )
    assert float(every[4]) < float(every[3])
    assert every[5].count("`") % 2 == 0
    assert every[6] == "2500"
    assert not cells()
    assert not cells(plain, mode="graph")
    with pytest.raises(ValueError, match="no kernel for"):
        cells(plain | {"query": [2, 8, 512, 264]})


def test_every_prediction_says_that_it_is_one() -> None:
    text = (page.ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if "L4 at" in line)
    assert head.count("predicted for an L4") == head.count("L4") == 2
    assert "No L4 was at hand" in text


def test_stale_pages_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "f.json").write_text(json.dumps({"env": ENV, "rows": [ROW]}))
    (tmp_path / "a.md").write_text("<!-- models: errors f.json -->\n<!-- end models -->\n")
    monkeypatch.setattr(page, "ROOT", tmp_path)
    monkeypatch.setattr(page, "PAGES", ("a.md",))
    assert page.main(["--check"]) == 1
    assert page.main([]) == 0
    assert page.main(["--check"]) == 0
    assert capsys.readouterr().out == "a.md: stale\na.md: written\n"
