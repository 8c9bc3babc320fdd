"""The tables of docs/models.md and docs/quantised.md are made from committed files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import page

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
