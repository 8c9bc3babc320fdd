"""docs/edge-cases.md: the table of mappings is the one that the tests run, row by row."""

from __future__ import annotations

from pathlib import Path

from tests.library import mappings

DOCUMENT = Path(__file__).parents[2] / "docs" / "edge-cases.md"


def test_the_table_is_the_one_that_is_tested() -> None:
    """Else: `python -m tests.library.mappings` prints it."""
    text = DOCUMENT.read_text(encoding="utf-8")
    section = text.partition("\n## What stands for PyTorch's meanings\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    assert lines == mappings.table().splitlines()
