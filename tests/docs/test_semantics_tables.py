"""docs/edge-cases.md: its tables are made from the cases and the committed answers, and hold all of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.semantics import table
from benchmarks.semantics.cases import CASES, TOPICS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "edge-cases.md"
ANSWERS = sorted((ROOT / "benchmarks" / "results" / "semantics").glob("*.json"))


def test_the_tables_are_fresh() -> None:
    """Else: `python -m benchmarks.semantics --markdown docs/edge-cases.md`."""
    text = DOCUMENT.read_text(encoding="utf-8")
    assert table.remake(text, DOCUMENT) == text


def test_every_case_is_a_line() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [name for name in CASES if text.count(f"\n| `{name}` | ") != 1] == []
    assert [topic for topic in TOPICS if f"\n### {topic}\n" not in text] == []


def test_the_refusals_are_at_most_five() -> None:
    text = DOCUMENT.with_name("semantics.md").read_text(encoding="utf-8")
    section = text.partition("refuses and torch does not\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert 1 < len(lines) <= 1 + 5


@pytest.mark.parametrize("path", ANSWERS, ids=lambda path: path.stem)
def test_answers_are_complete_and_keep_the_promises(path: Path) -> None:
    outcomes = json.loads(path.read_text(encoding="utf-8"))["outcomes"]
    assert set(outcomes) == set(CASES)
    assert [
        name for name, case in CASES.items() if not table.keeps_promise(case, outcomes[name]["ours"]["words"])
    ] == []


def test_columns_are_the_backends_of_each_machine(tmp_path: Path) -> None:
    name = next(iter(CASES))
    answer = {"words": {"the row": "NaN", "others": "right"}, "reason": ""}
    for device, backends in (("cpu", ("ours", "math")), ("cuda", ("ours", "math", "cudnn"))):
        document = {
            "format": 1,
            "env": {"device": device, "torch": "2.11", "date": "2026-11-21T00:00:00", "gpu": None},
            "outcomes": {name: dict.fromkeys(backends, answer)},
        }
        (tmp_path / f"{device}.json").write_text(json.dumps(document))
    made = table.remake(
        "a\n<!-- semantics: . -->\nold\n<!-- end semantics -->\nb\n", tmp_path / "document.md"
    )
    assert made.startswith(
        "a\n<!-- semantics: . -->\nMeasured:\n- cpu: torch 2.11, 2026-11-21\n- cuda: torch"
    )
    assert made.endswith("<!-- end semantics -->\nb\n")
    assert "| case | what | this library | cpu: math | cuda: math | cuda: cuDNN | FA2 |" in made
    assert made.count("the row: NaN; others: right |") == 3
    assert "| ? |" in made  # not measured
    with pytest.raises(ValueError, match="has no block"):
        table.remake("nothing", tmp_path / "document.md")
