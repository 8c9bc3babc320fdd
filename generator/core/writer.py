"""From text to disk: `compare` says what differs, `write` makes a folder equal to {path: text}.

Only files whose text changed are written, each through a temporary file and a rename, so a reader never meets
half a file and an unchanged unit is not compiled again. What was written is listed in the folder's manifest,
and only what is listed there is ever deleted. While files come and go, the manifest lists old and new alike:
a run that is cut off leaves no generated file that the next one does not own.

A file that is in the way and was not made here is never overwritten or deleted: `write` raises
ForeignFileError before it touches anything. Of the texts, only the manifest's list of files is understood.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from generator.core.render import MANIFEST, MARKER

_SAFE_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*/)*[A-Za-z0-9_][A-Za-z0-9_.-]*")


class ForeignFileError(Exception):
    """A file or folder that the generator did not make lies where it has to write."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How a folder differs from what it should hold. All paths are relative to it and sorted."""

    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    stale: tuple[str, ...] = ()  # ours, and no longer wanted
    notes: tuple[str, ...] = ()  # what was odd about the manifest

    def __bool__(self) -> bool:
        return bool(self.missing or self.changed or self.stale)

    def lines(self) -> list[str]:
        """One line for each path."""
        kinds = (("missing", self.missing), ("differs", self.changed), ("stale", self.stale))
        return [f"{kind}: {path}" for kind, paths in kinds for path in paths]


def compare(files: Mapping[str, str], out: Path) -> Difference:
    """How `out` differs from `files`. Reads only; `out` need not exist."""
    missing, changed = [], []
    for path, text in sorted(files.items()):
        try:
            if (out / path).read_bytes() != text.encode("utf-8"):
                changed.append(path)
        except (FileNotFoundError, NotADirectoryError):
            missing.append(path)
        except IsADirectoryError:
            changed.append(path)
    before = _read_manifest(out)
    stale = tuple(path for path in sorted(before.owned - set(files)) if _is_ours(out / path))
    return Difference(missing=tuple(missing), changed=tuple(changed), stale=stale, notes=before.notes)


def write(files: Mapping[str, str], out: Path) -> Difference:
    """Makes `out` hold `files`, which include the manifest, and returns what differed before.

    Raises ForeignFileError, before it changes anything, when a file that is not ours is in the way.
    """
    difference = compare(files, out)
    if not difference:
        return difference
    before = _read_manifest(out)
    _refuse_foreign(sorted(files), before, out)
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / MANIFEST, _journal(files[MANIFEST], before.owned))
    for path in (*difference.missing, *difference.changed):
        if path != MANIFEST:
            _replace(out / path, files[path])
    for path in difference.stale:
        (out / path).unlink(missing_ok=True)
        _remove_empty_folder((out / path).parent, out)
    _replace(out / MANIFEST, files[MANIFEST])
    return difference


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What the manifest in the folder says of earlier runs."""

    owned: frozenset[str] = frozenset()
    foreign: bool = False  # a JSON file of somebody else's
    notes: tuple[str, ...] = ()


def _read_manifest(out: Path) -> _Before:
    """Tolerant: a manifest that makes no sense owns nothing, and a note says so."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return _Before()
    except ValueError:
        return _Before(notes=(f"{MANIFEST} is unreadable, so files of earlier runs are not deleted",))
    if not isinstance(manifest, dict) or "kernels" not in manifest or "files" not in manifest:
        return _Before(foreign=True)
    listed = manifest["files"]
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed):
        return _Before(notes=(f"{MANIFEST} lists no files, so files of earlier runs are not deleted",))
    unsafe = sorted(path for path in listed if not _SAFE_PATH.fullmatch(path) or not _inside(out / path, out))
    return _Before(
        owned=frozenset(listed) - frozenset(unsafe) - {MANIFEST},
        notes=tuple(
            f"{MANIFEST} lists {path!r}, which is no path of this folder: ignored" for path in unsafe
        ),
    )


def _inside(path: Path, out: Path) -> bool:
    """Whether the path's folder, links followed, is `out` or below it."""
    return path.parent.resolve().is_relative_to(out.resolve())


def _is_ours(path: Path) -> bool:
    """Whether this is an ordinary file with the generator's mark on its first line."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        return MARKER.encode() in file.readline()


def _refuse_foreign(paths: list[str], before: _Before, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ForeignFileError(f"{out} is not a folder; choose another one with --out")
    for path in paths:
        target = out / path
        if not _inside(target, out):
            raise ForeignFileError(f"{target} leads out of {out} through a link; remove the link")
        if path == MANIFEST:
            ours = not before.foreign
        else:
            ours = not target.exists() or path in before.owned or _is_ours(target)
        if target.is_dir() or not ours:
            raise ForeignFileError(
                f"{target} was not made by the generator; move it, or choose another folder with --out"
            )


def _journal(manifest: str, owned: frozenset[str]) -> str:
    """The manifest while files change: it lists what was there before as well."""
    content = json.loads(manifest)
    content["files"] = sorted(owned | set(content["files"]))
    return json.dumps(content, indent=1) + "\n"


def _replace(path: Path, text: str) -> None:
    """Writes the text so that the path holds either the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8"))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _remove_empty_folder(folder: Path, out: Path) -> None:
    if folder != out and not any(folder.iterdir()):
        folder.rmdir()
