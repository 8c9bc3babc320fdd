"""The interactive page of results: it holds what the files hold, loads nothing, and works in a browser."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.documents import explore
from benchmarks.documents.__main__ import main
from sdpa_cutlass.cli import results
from sdpa_cutlass.cli.results import Results, Row
from tests.browser import ask
from tests.cli import rows as made

ROOT = Path(__file__).resolve().parents[2]

# Runs in the page: filters, measures, the legend, what pointing says; the answers end up in the document.
SCRIPT = """
const answers = {};
const choose = (name, value) => {
  const select = document.getElementById(`filter-${name}`);
  select.value = value;
  select.dispatchEvent(new Event("change"));
};
const count = () => document.querySelectorAll("tbody tr").length;
const dots = (name) => document.querySelectorAll(`#plot circle[fill="${COLOURS[name]}"]`).length;
answers.opening = count();
for (const name of Object.keys(FILTERS)) choose(name, "");
answers.all = count();
const wanted = { suite: "long", dtype: "bf16", head_dim: "64", causal: "causal" };
for (const [name, value] of Object.entries(wanted)) choose(name, value);
answers.some = count();
answers.someDots = dots("fused");
choose("measure", "ratio");
answers.ratioDots = dots("fused");
document.querySelector('#legend input[name="fused"]').click();
answers.hiddenDots = dots("fused");
document.querySelector('#legend input[name="fused"]').click();
document.querySelector("tbody td:nth-child(2)").focus();
answers.tip = document.getElementById("tip").textContent;
answers.tipStyle = document.getElementById("tip").style.display;
answers.marked = document.querySelectorAll("tr.on").length;
answers.lines = document.querySelectorAll("#plot polyline").length;
answers.offered = [...document.getElementById("filter-suite").options].map((one) => one.value);
answers.width = [document.documentElement.scrollWidth, innerWidth];
answer(answers);
"""


def page_of(rows: list[Row], **env: Any) -> str:
    return explore.page({"a.json": Results(made.ENV | env, rows)})


def held(page: str) -> dict[str, Any]:
    """What the page's script reads."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert text is not None
    found: dict[str, Any] = json.loads(text[1])
    return found


def test_the_page_holds_every_row_of_the_committed_files() -> None:
    files = explore.committed(ROOT)
    assert set(files) == {path.name for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    data = held(explore.page(files))
    assert data["columns"] == list(explore.COLUMNS)
    expected = [
        (number, row)
        for number, found in enumerate(files.values())
        for row in found.rows
        if row.suite != "wall"
    ]
    assert len(data["rows"]) == len(expected) > 3000
    for values, (number, row) in zip(data["rows"], expected, strict=True):
        assert values[0] == number
        for place, name in enumerate(explore.COLUMNS[1:], start=1):
            value = data["strings"][values[place]] if data["isString"][place] else values[place]
            known = getattr(row, name)
            is_number = not isinstance(known, float) or math.isfinite(known)
            assert value == (known if is_number else None), (row, name)
    assert [one["name"] for one in data["files"]] == list(files)
    assert {one["gpu"] for one in data["files"]} == {found.env["gpu"] for found in files.values()}


def test_the_page_loads_nothing() -> None:
    page = page_of(made.mission())
    assert not re.findall(r"(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttpRequest|import\(", page)
    assert re.findall(r"https?://[^\"]*", page) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "default-src 'none'" in page


def test_texts_of_files_cannot_leave_their_element() -> None:
    evil = "error: </script><script>alert(1)</script><!-- "
    page = page_of([made.row("fused", None, status=evil)])
    assert page.count("<script") == 2
    assert evil in held(page)["strings"]


def test_what_is_no_number_is_null() -> None:
    row = dataclasses.replace(made.row("fused"), max_err_out=float("nan"), bound_out=float("inf"))
    (values,) = held(page_of([row]))["rows"]
    named = dict(zip(explore.COLUMNS, values, strict=True))
    assert named["max_err_out"] is named["bound_out"] is None
    assert named["causal"] == 0


def test_interrupted_runs_and_cpus_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / explore.RESULTS
    for name, env in (("good", {}), ("cpu", {"gpu": None}), ("half", {"interrupted": True})):
        results.save(Results(made.ENV | env, made.mission()), folder / f"{name}.json")
    assert list(explore.committed(tmp_path)) == ["good.json"]


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["--page", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == explore.page(explore.committed(ROOT))
    monkeypatch.chdir(tmp_path)
    assert main(["--page", str(tmp_path / "other.html")]) == 2
    assert "run this in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("width", [1280, 500])  # of a window; 500 is the least of headless Chromium
def test_in_a_browser(width: int, tmp_path: Path) -> None:
    files = explore.committed(ROOT)
    page = tmp_path / "page.html"
    page.write_text(explore.page(files), encoding="utf-8")
    answers = ask(page, SCRIPT, tmp_path / "profile", width=width)
    problems = {(name, row.problem) for name, one in files.items() for row in one.rows if row.suite != "wall"}
    some = [
        row
        for name, row in problems_of(files)
        if (row.suite, row.dtype, row.head_dim, row.causal, row.provider)
        == ("long", "bf16", 64, True, "fused")
    ]
    assert 0 < answers["opening"] < answers["all"] == len(problems)
    assert answers["some"] == answers["someDots"] == answers["ratioDots"] == len(some) == 3
    assert answers["hiddenDots"] == 0
    assert answers["offered"] == ["", "long", "mission", "random", "small"]  # what the other filters leave
    assert answers["tipStyle"] == "block"
    assert answers["marked"] == 1
    assert answers["lines"] > 0
    for text in (
        some[0].kernel,
        f"{some[0].max_err_out:.1e}".replace("e-0", "e-"),
        "2026-11-22-h200-bf16.json",
    ):
        assert str(text) in answers["tip"]
    wide, window = answers["width"]
    assert wide <= window


def problems_of(files: dict[str, Results]) -> list[tuple[str, Row]]:
    return [(name, row) for name, found in files.items() for row in found.rows]
