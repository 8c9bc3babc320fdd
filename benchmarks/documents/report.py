"""Writes the documents' result tables and pictures from committed result files.

A document holds blocks between markers, each on a line of its own:

    <!-- results: SECTION FILE ... -->
    (made text)
    <!-- end results -->

SECTION is one of SECTIONS. The FILEs, relative to the document, are the result files that the block was made
from and, in the sections of pictures, the picture. Given result files, the command puts each into every block
that shows problems of its suites (those of masks, `decode` and `wall` have sections of their own); all other
blocks are made again from the files that they name. So `--check` needs no arguments, and no number in a
document is typed by hand. A block without files says that there are no results yet.

    front  front_picture                               the README's
    summary  masks_summary  naive_line                 short, for the page of performance
    tables  masks  decode  wall  naive                 every problem of every file
    random                                             a line for each run of random problems
    goals                                              what the project wants, next to what files say
    agreement                                          files of the same problems, against each other
    predictions  prediction_goal  model_quality        what the cost models say, and how well they did
    plot  plot_speedup  plot_roofline                  pictures, of the first file; front_picture is of all
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import importlib.util
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.documents import family_results
from benchmarks.documents.sections import PICTURE_SUFFIX, SECTIONS, Section, Source
from sdpa_cutlass.cli import FAILED, OK, CommandError, results
from sdpa_cutlass.cli.results import ResultFormatError, Results

BEGIN = re.compile(r"<!-- results: (?P<section>\S+)(?P<files>(?: \S+)*) -->")
END = "<!-- end results -->"
NO_RESULTS = "_No results yet: `python -m benchmarks.documents FILE.json` writes them here._"
DOCUMENTS = tuple(Path("docs", f"{name}.md") for name in ("performance", "predictions", "results"))
IMAGES = Path("docs", "img")  # there too: pictures that no marker names yet
PICTURE_KEY = "Source"  # of the picture's metadata: what it was drawn from


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture that a block shows: what it is drawn from, and how."""

    sources: Sequence[Source]
    draw: Callable[[Sequence[Results]], Any]

    @property
    def tag(self) -> str:
        """What the picture says of its origin."""
        return " ".join(source.tag for source in self.sources)


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    if options.plot is not None and options.plot.suffix != PICTURE_SUFFIX:
        raise CommandError(f"--plot {options.plot}: the name must end in {PICTURE_SUFFIX}")
    folder = options.readme.parent
    documents = [options.readme, *(path for name in DOCUMENTS if (path := folder / name).is_file())]
    old = {path: _read(path) for path in documents}
    maker = Maker(options.files, options.plot, folder / IMAGES)
    new = {path: maker.remake(text, path) for path, text in old.items()}
    pictures = {path: picture for path, picture in maker.pictures.items() if not _shows(path, picture)}
    if options.check:
        stale = [*(path for path in documents if new[path] != old[path]), *pictures]
        for path in stale:
            print(f"{path}: stale; `python -m benchmarks.documents` makes it again")
        return FAILED if stale else OK
    drawn = {path: _drawn(path, picture) for path, picture in pictures.items()}  # all, before one is replaced
    for path, data in drawn.items():
        _write(path, data)
        print(f"{path}: drawn")
    for path, text in new.items():
        if text == old[path]:
            print(f"{path}: up to date")
        else:
            _write(path, text)
            print(f"{path}: written")
    return OK


class Maker:
    """Makes blocks from `files`, or where there are none from those that each block names.

    `pictures` collects the pictures that the blocks show. One that no marker names yet goes to `picture` in
    section `plot`, and into the folder `images` in the others.
    """

    def __init__(self, files: Sequence[Path], picture: Path | None, images: Path) -> None:
        self._files = files
        self._picture = picture
        self._images = images
        self._load = functools.cache(_load)
        self.pictures: dict[Path, Picture] = {}

    def remake(self, text: str, document: Path) -> str:
        """The document's text with every block made again."""
        out: list[str] = []
        blocks = 0
        lines = iter(enumerate(text.splitlines(), start=1))
        for number, line in lines:
            begin = BEGIN.fullmatch(line)
            if begin is not None:
                where = f"{document}:{number}"
                _skip_block(lines, where)
                out += self._block(begin["section"], begin["files"].split(), document, where)
                blocks += 1
            elif line == END:
                raise CommandError(f"{document}:{number}: {END} without a beginning")
            else:
                out.append(line)
        if blocks == 0:
            raise CommandError(
                f"{document} has no block: a line `<!-- results: summary -->`, then a line `{END}`"
            )
        return "\n".join(out) + "\n"

    def _sources(self, section: Section, paths: Sequence[Path]) -> list[Source]:
        """The files among `paths` that have something to show in `section`."""
        sources = [self._load(Path(os.path.normpath(path))).showing(section) for path in paths]
        return [
            source
            for source in sources
            if any(section.needs in (None, row.provider) for row in source.results.rows)
        ]

    def _block(self, section: str, names: Sequence[str], document: Path, where: str) -> list[str]:
        if section not in SECTIONS:
            raise CommandError(f"{where}: section {section!r} is none of {', '.join(SECTIONS)}")
        kind = SECTIONS[section]
        named = [document.parent / name for name in names]
        sources = self._sources(kind, self._files)
        if len(sources) < kind.least:
            sources = self._sources(kind, [path for path in named if path.suffix != PICTURE_SUFFIX])
        if len(sources) < kind.least:
            return [f"<!-- results: {section} -->", NO_RESULTS, END]
        files = [_relative(source.path, document) for source in sources]
        if kind.draw is not None:
            drawn = [path for path in named if path.suffix == PICTURE_SUFFIX]
            for picture in self._picture_of(section, drawn, sources[0]):
                self.pictures[Path(os.path.normpath(picture))] = Picture(
                    sources if kind.draws_all else sources[:1], kind.draw
                )
                files.append(_relative(picture, document))
        body = kind.make(sources, files)
        return [f"<!-- results: {' '.join([section, *files])} -->", *body.splitlines(), END]

    def _picture_of(self, section: str, drawn: Sequence[Path], source: Source) -> list[Path]:
        """Where a block's picture lies: what was asked for, else where it was; perhaps nowhere."""
        if section == "plot":
            return [self._picture] if self._picture else list(drawn[:1])
        suffix = section.removeprefix("plot_") + PICTURE_SUFFIX
        return [drawn[0] if drawn else self._images / f"{source.path.stem}-{suffix}"]


def _skip_block(lines: Iterator[tuple[int, str]], where: str) -> None:
    """Consumes the lines of a block, its end included."""
    for _, line in lines:
        if line == END:
            return
        if BEGIN.fullmatch(line):
            break
    raise CommandError(f"{where}: the block is not closed by {END}")


def _load(path: Path) -> Source:
    """Reads a result file that may be published: taken on a GPU, by a run that came to its end."""
    if re.search(r"[\s>]", str(path)):
        raise CommandError(f"{str(path)!r}: a name with spaces or > cannot stand in a marker")
    try:
        data = path.read_bytes()
        found = family_results.from_json(data.decode("utf-8"), origin=str(path))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
    except (ResultFormatError, UnicodeDecodeError) as error:
        raise CommandError(str(error)) from error
    if not found.rows:
        raise CommandError(f"{path} has no rows")
    if found.env.get("gpu") is None:
        raise CommandError(f"{path} was measured on a CPU, where times mean nothing")
    if found.env.get("interrupted"):
        raise CommandError(f"{path} is of a run that was interrupted")
    return Source(path, found, hashlib.sha256(data).hexdigest())


def _relative(path: Path, document: Path) -> str:
    return Path(os.path.relpath(path, document.parent)).as_posix()


def _shows(path: Path, picture: Picture) -> bool:
    """Whether the picture says that it was drawn from this very result file (PNG text is plain bytes)."""
    return path.is_file() and picture.tag.encode() in path.read_bytes()


def _drawn(path: Path, picture: Picture) -> bytes:
    """The file of a picture that says what it was drawn from, for `path`."""
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("a picture needs matplotlib: pip install 'sdpa_cutlass[cli]'")
    drawing = picture.draw([source.results for source in picture.sources])
    if drawing is None:
        raise CommandError(f"{picture.sources[0].path}: nothing in it can be drawn as {path.name}")
    data = io.BytesIO()
    drawing.savefig(data, format="png", dpi=80, metadata={PICTURE_KEY: picture.tag})
    return data.getvalue()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {error}; run this in a checkout, or say --readme") from error


def _write(path: Path, content: str | bytes) -> None:
    try:
        results.write_atomically(path, content)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
