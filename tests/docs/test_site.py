"""The documentation site: it builds strictly, and what must not be published stops it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.browser import ask

pytest.importorskip("mkdocs", reason="the site's tools are not installed: make docs")
pytest.importorskip("mkdocstrings", reason="the site's tools are not installed: make docs")

ROOT = Path(__file__).parents[2]
PARTS = ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "packaging", "sdpa_cutlass")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a build reads, to be broken."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(ROOT / name, root / name)
    for name in ("LICENSE", "benchmarks", "tests"):  # linked to, never changed
        (root / name).symlink_to(ROOT / name)
    return root


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")


def part(name: str) -> ModuleType:
    """A file of packaging/ that only the site uses."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "packaging" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Every page is there and loads nothing from elsewhere; files that it links to are files of the site."""
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    docs = ROOT / "docs"
    pages = sorted(str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md"))
    for name in (*pages, "index", "changelog", "contributing"):
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert 'src="http' not in page, name
        assert "<!-- results" not in page, name
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="testing.html#the-numerics-rule"' in home
    assert 'src="img/front.png"' in home
    assert 'href="explore.html"' in home
    assert "Every measured row" in (tmp_path / "explore.html").read_text(encoding="utf-8")
    raw = "repository/benchmarks/results/2026-11-24-h200-f16-hopper.json"
    assert f'href="{raw}"' in home
    assert (tmp_path / raw).is_file()


SEARCH = """
let left = 100;
const look = () => {
  const query = document.querySelector('[data-md-component="search-query"]');
  query.focus();
  query.value = "sinks";
  query.dispatchEvent(new Event("keyup", { bubbles: true }));
  const found = [...document.querySelectorAll(".md-search-result__link")];
  const links = found.map((one) => one.getAttribute("href"));
  if (links.length || !left--) answer(links);
  else setTimeout(look, 100);
};
addEventListener("load", () => setTimeout(look, 200));
"""
WIDTHS = """
const frames = [...document.querySelectorAll("iframe")];
addEventListener("load", () => answer(frames.map((one) => {
  const page = one.contentDocument.documentElement;
  return [one.getAttribute("src"), page.scrollWidth, one.width, page.textContent.length];
})));
"""


def test_pages_in_a_browser(tmp_path: Path) -> None:
    """As files: no page is wider than a desktop's window or a phone's, and search finds something."""
    site = tmp_path / "site"
    assert build(ROOT, site).returncode == 0
    names = sorted(
        str(path.relative_to(site)) for path in site.rglob("*.html") if "repository" not in path.parts
    )
    assert len(names) > 40
    frames = [
        f'<iframe src="{name}" width="{width}" height="800"></iframe>'
        for name in names
        for width in (1280, 390)
    ]
    (site / "all.html").write_text(f"<html><body>{''.join(frames)}</body></html>", encoding="utf-8")
    found = ask(site / "all.html", WIDTHS, tmp_path / "first", "--allow-file-access-from-files")
    assert [one for one in found if one[1] > int(one[2]) or one[3] < 100] == []
    assert len(found) == 2 * len(names)
    for name in ("index.html", "tuning-log/lost.html"):
        links = ask(site / name, SEARCH, tmp_path / name.replace("/", "-"), "--virtual-time-budget=20000")
        assert any("tasks.html" in link for link in links), links


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    docs = ROOT / "docs"
    pages = [str(path.relative_to(docs)) for path in docs.rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in menu] == []
    assert ": explore.html\n" in menu


def test_broken_links_stop_the_site(checkout: Path, tmp_path: Path) -> None:
    links = ("missing.md", "testing.md#no-such-rule", "../benchmarks/missing.json")
    with (checkout / "docs" / "install.md").open("a", encoding="utf-8") as file:
        file.writelines(f"\n[here]({link})\n" for link in links)
    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert [link for link in links if link.removeprefix("../") not in said] == []


def test_an_undocumented_name_stops_the_site(checkout: Path, tmp_path: Path) -> None:
    replace(checkout / "sdpa_cutlass/public/attention_plan.py", '        """The kernel that runs."""\n', "")
    replace(checkout / "docs/api.md", "::: sdpa_cutlass.explain\n", "")
    done = build(checkout, tmp_path / "site")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "sdpa_cutlass.AttentionPlan.kernel has no docstring" in said
    assert "sdpa_cutlass.explain is not in api.md" in said


def test_options_become_a_list() -> None:
    as_markdown = part("site_docstrings").as_markdown
    source = (
        "First, with __dlpack__.\n\nmask: any shape\n    of any kind.\nseqlens_q, seqlens_k: int32."
        "\n\nraises: no\nrest"
    )
    assert as_markdown(source) == (
        "First, with `__dlpack__`.\n\n- **mask**: any shape\n    of any kind.\n"
        "- **seqlens_q, seqlens_k**: int32.\n\nraises: no\nrest"
    )
