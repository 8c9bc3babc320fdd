"""What mkdocs.yml asks beyond mkdocs itself: links into the repository, and a complete reference.

The documents link to each other as they lie in the repository. README, CONTRIBUTING and CHANGELOG become
pages of the site; any other file outside docs/ that a page links to is put next to them, under `repository/`.
The interactive page of results is made from the committed result files as the site is built. A picture
scrolls in its own size and opens by itself; assets/site.css has the rest of how pages look.
A build fails when a public name of the package has no docstring, or does not stand in docs/api.md.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
MARKER = re.compile(r"^<!-- (?:results:|end results).*-->$", re.MULTILINE)
IMAGE = re.compile(r'<img [^>]*src="([^"]+)"[^>]*>')
SHORT_CODE = re.compile(r"(?<=<td><code)(?=>[^<]{1,24}</code></td>)")  # a name of a tile, not of a test
EXPLORER = "explore.html"
PACKAGE, REFERENCE = "sdpa_cutlass", "api.md"


def on_pre_build(config: Any) -> None:
    """Fails for what the reference lacks."""
    root = Path(config["config_file_path"]).parent
    missing = undocumented(root) + unlisted(root, Path(config["docs_dir"], REFERENCE))
    if missing:
        raise PluginError("The reference is not complete:\n  " + "\n  ".join(missing))


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and files outside docs/ that the pages link to, and those that these link to."""
    root = Path(config["config_file_path"]).parent
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md"))]
    seen = set(waiting)
    for source in waiting:
        if not source.startswith("docs/"):
            content = (root / source).read_bytes()
            files.append(File.generated(config, site_uri(source), content=content))
        if not source.endswith(".md"):
            continue
        for link in LINK.findall((root / source).read_text(encoding="utf-8")):
            target = _target(link, source)
            if target and target not in seen and (root / target).is_file():
                seen.add(target)
                waiting.append(target)
    files.append(File.generated(config, EXPLORER, content=_explorer(root, config)))
    return files


def _explorer(root: Path, config: Any) -> str:
    """The interactive page; its module and what it reads belong to the checkout, not to this environment.

    Only here it has a way back: as a file that somebody was sent it stands alone.
    """
    sys.path.insert(0, str(root))
    try:
        from benchmarks.documents import explore
    finally:
        sys.path.remove(str(root))
    title = "<h1>Results</h1>"
    page = explore.page(explore.committed(root))
    if page.count(title) != 1:
        raise PluginError(f"{EXPLORER} must have {title} once")
    return page.replace(title, f'<p><a href="index.html">{config["site_name"]}</a></p>\n{title}')


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links between the repository's files → links between the site's; the markers of result blocks go."""
    here = page.file.src_uri
    source = next((path for path in _sources(here) if site_uri(path) == here), here)

    def moved(found: re.Match[str]) -> str:
        target = _target(found[0], source)
        if target is None:
            return found[0]
        anchor = found[0].partition("#")[2]
        path = os.path.relpath(site_uri(target), PurePosixPath(here).parent)
        return f"{path}#{anchor}" if anchor else path

    return LINK.sub(moved, MARKER.sub("", markdown))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Pictures become links to themselves; a short name that is all of a table's cell stays in one line."""
    html = IMAGE.sub(lambda found: f'<a class="picture" href="{found[1]}">{found[0]}</a>', html)
    return SHORT_CODE.sub(' class="short"', html)


def site_uri(source: str) -> str:
    """A path in the repository → the path among the site's sources."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return PAGES.get(source, f"repository/{source}")


def undocumented(root: Path) -> list[str]:
    """Public names without a docstring, and public functions and properties of public classes."""
    package: Any = griffe.load(PACKAGE, search_paths=[str(root)], allow_inspection=False)
    found = []
    for name in public_names(package):
        thing = package[name].final_target if package[name].is_alias else package[name]
        if not thing.docstring:
            found.append(f"{PACKAGE}.{name} has no docstring")
        for member in thing.members.values() if thing.is_class else ():
            is_code = not member.is_alias and (member.is_function or "property" in member.labels)
            if is_code and not member.name.startswith("_") and not member.docstring:
                found.append(f"{PACKAGE}.{name}.{member.name} has no docstring")
    return found


def unlisted(root: Path, reference: Path) -> list[str]:
    """Public names that the reference does not show."""
    package: Any = griffe.load(PACKAGE, search_paths=[str(root)], allow_inspection=False)
    shown = set(re.findall(rf"^::: {PACKAGE}\.(\w+)$", reference.read_text(encoding="utf-8"), re.MULTILINE))
    return [
        f"{PACKAGE}.{name} is not in {reference.name}" for name in public_names(package) if name not in shown
    ]


def public_names(package: Any) -> list[str]:
    """The names in `__all__` that are documented one by one."""
    return [str(name) for name in package.exports if not str(name).startswith("__")]


def _sources(here: str) -> list[str]:
    """The paths in the repository that may have become the site's path `here`."""
    return [*PAGES, here.removeprefix("repository/"), f"docs/{here}"]


def _target(link: str, source: str) -> str | None:
    """The path in the repository that a link of `source` leads to; None for an address or an anchor."""
    path = link.partition("#")[0]
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    return os.path.normpath(os.path.join(PurePosixPath(source).parent, path))
