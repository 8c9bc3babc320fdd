"""The documents point at things that exist, and the Python that they print runs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sdpa_cutlass
from generator.families import FAMILIES
from sdpa_cutlass import flash_api

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("benchmarks/*.md"),
        *ROOT.glob("tests/data/*.md"),
    ]
)
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


@every_document
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if "://" not in link]
    assert [link for link in local if not (document.parent / link).exists()] == []


@every_document
def test_named_tests_exist(document: Path) -> None:
    named = re.findall(r"`(tests/[\w/.]+\.py)(?:::(\w+))?`", document.read_text(encoding="utf-8"))
    wrong = []
    for file, function in named:
        path = ROOT / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if not path.is_file() or (function and not re.search(rf"^def {function}\(", text, re.MULTILINE)):
            wrong.append(f"{file}::{function}")
    assert wrong == []
    if document.name == "semantics.md":
        assert len(named) > 30


@every_document
def test_named_kernels_are_legal(document: Path) -> None:
    """Names in full; results.md and the tuning log name tiles only."""
    names = re.findall(r"\b(?:fmha_fwd|unfused)_sm\d+_d\d+_\w+", document.read_text(encoding="utf-8"))
    assert [name for name in names if FAMILIES.refusal(FAMILIES.parse(name))] == []
    if document.name == "README.md" and document.parent == ROOT:
        assert set(names) <= {config.name for config in FAMILIES.build("release").kernels}


@every_document
def test_no_path_of_somebodys_machine(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.$}/])/(?:home|root|work|tmp|Users)/\S*", text) == []


MADE = re.compile(r"<!-- (results|semantics|output|models):.*?<!-- end \1 -->", re.DOTALL)
LONGEST_PAGE = 300  # lines that a person wrote


@every_document
def test_no_page_is_too_long(document: Path) -> None:
    """Data between markers does not count, nor does the list of all changes."""
    if document.name != "CHANGELOG.md":
        text = MADE.sub("", document.read_text(encoding="utf-8"))
        assert len(text.splitlines()) <= LONGEST_PAGE


@every_document
def test_every_table_has_a_head(document: Path) -> None:
    """A first row with words in each cell, but for a last one of remarks; a rule of as many cells below."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    for table in tables:
        head, rule = [line.strip().strip("|").split("|") for line in table.splitlines()[:2]]
        assert all(cell.strip() for cell in head[:-1]), table[:200]
        assert all(re.fullmatch(r"\s*:?-{2,}:?\s*", cell) for cell in rule), table[:200]
        assert len(head) == len(rule), table[:200]


RUN = {
    "README.md": 1,
    "docs/tour.md": 0,
    "docs/tasks.md": 1,
    "docs/migration.md": 0,
}  # calls of torch's function that are served
MOST_LINES = 160  # of the README


def run_smaller(code: str, names: dict[str, object]) -> None:
    exec(code.replace('device="cuda"', 'device="cpu"').replace("512", "80"), names)  # noqa: S102


@pytest.mark.parametrize("name", RUN)
def test_printed_python_runs(name: str) -> None:
    """On the host library, at a smaller size."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}  # one session: later blocks use what earlier ones made
    for code in blocks:
        run_smaller(code, names)
    assert getattr(names.get("usage"), "served", 0) == RUN[name]


FUNCTIONS = [name for name in sdpa_cutlass.__all__ if inspect.isfunction(getattr(sdpa_cutlass, name))]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "disable"])  # which follows enable
def test_the_example_of_a_docstring_runs(name: str) -> None:
    """Each public function has one, which needs nothing but the two imports."""
    blocks = re.findall(r"```python\n(.*?)```", inspect.getdoc(getattr(sdpa_cutlass, name)) or "", re.DOTALL)
    assert len(blocks) == 1
    assert f"sdpa_cutlass.{name}(" in blocks[0]
    run_smaller(blocks[0], {"torch": torch, "sdpa_cutlass": sdpa_cutlass})


APART = ("docs/transformers.md", "docs/testing.md")  # their code changes the process


def test_the_way_from_flash_attn_is_complete() -> None:
    """The page of migration has every function of flash_api and every argument of them."""
    text = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
    table = text.partition("| argument of flash_attn |")[2].partition("\n\n")[0]
    for name in flash_api.__all__:
        assert f"`from sdpa_cutlass.flash_api import {name}`" in text, name
        for argument in inspect.signature(getattr(flash_api, name)).parameters:
            pattern = rf"^\|.*(?<!\w){argument}(?![\w\]])[^|]*\|"
            assert re.search(pattern, table, re.MULTILINE), (name, argument)


def test_every_page_with_python_is_run() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    printed = {
        str(page.relative_to(ROOT)) for page in pages if "```python" in page.read_text(encoding="utf-8")
    }
    assert printed == {*RUN, *APART}


@pytest.mark.parametrize("name", APART)
def test_printed_python_runs_in_a_process_of_its_own(name: str) -> None:
    if "transformers" in name:
        pytest.importorskip("transformers")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_is_a_first_screen() -> None:
    """Short, one picture, eight lines of numbers, one in a cell; more is on the page of performance."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES
    assert text.count("![") == 1
    made = "".join(found[0] for found in MADE.finditer(text)).splitlines()
    assert 0 < len([line for line in made if re.match(r"\| [\d.]+ \|", line)]) <= 8
    assert [line for line in lines if line.startswith("|") and "·" in line] == []
