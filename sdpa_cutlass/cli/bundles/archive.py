"""A bundle's files ↔ its bytes. Deterministic to write, strict to read.

Entries stand in the order of ENTRIES, stored, with one date and one mode; so the same files give the same
bytes on every machine. read() takes the entries into memory and writes nothing to disk. It refuses names that
are not those of ENTRIES, entries that are too large, digests that do not hold, and in the end any archive
that write() would not have made of the same files: links, comments, extra fields, bytes around the archive.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sdpa_cutlass.cli.results import write_atomically

CONTENT = ("README.txt", "result.json", "bundle.json", "unit.cu")
MANIFEST = "manifest.json"
ENTRIES = (*CONTENT, MANIFEST)
MOST_BYTES = 16 * 2**20  # of the whole archive: a result is some kilobytes
_DATE = (1980, 1, 1, 0, 0, 0)  # the first that ZIP has
_MODE = 0o100644 << 16


class BundleError(ValueError):
    """A file that is no bundle, or no longer what was written; the message names file and entry."""


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def to_bytes(files: Mapping[str, bytes]) -> bytes:
    """The archive of `files`, which are those of CONTENT; the manifest is added."""
    manifest = json.dumps({name: digest(files[name]) for name in CONTENT}, indent=1) + "\n"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in ENTRIES:
            entry = zipfile.ZipInfo(name, _DATE)
            entry.create_system = 3  # Unix, wherever it is written
            entry.external_attr = _MODE
            archive.writestr(entry, manifest.encode() if name == MANIFEST else files[name])
    return buffer.getvalue()


def write(path: Path, files: Mapping[str, bytes]) -> None:
    """Writes the archive completely or not at all. Raises OSError."""
    write_atomically(path, to_bytes(files))


def read(path: Path) -> dict[str, bytes]:
    """The files of CONTENT. Raises BundleError for what is no bundle, OSError when it cannot be read."""
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BundleError(f"{path} is larger than {MOST_BYTES >> 20} MiB: not a bundle")
    return from_bytes(data, str(path))


def from_bytes(data: bytes, origin: str) -> dict[str, bytes]:
    """As `read`, of an archive's bytes; `origin` names it in errors."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            _check_entries(entries, origin)
            files = {entry.filename: archive.read(entry) for entry in entries}
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise BundleError(f"{origin} is no bundle, or damaged: {error}") from error
    try:
        manifest = json.loads(files.pop(MANIFEST))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{origin}: {MANIFEST} is not JSON: {str(error)[:200]}") from error
    if not isinstance(manifest, dict) or sorted(manifest) != sorted(CONTENT):
        raise BundleError(f"{origin}: {MANIFEST} must name exactly {', '.join(CONTENT)}")
    for name in CONTENT:
        if manifest[name] != digest(files[name]):
            raise BundleError(f"{origin}: {name} is not what {MANIFEST} says: it was changed")
    if to_bytes(files) != data:
        raise BundleError(f"{origin} holds more than its entries: `bundle` did not write it")
    return files


def _check_entries(entries: list[zipfile.ZipInfo], origin: str) -> None:
    """Refuses names that are not a bundle's, and sizes that are not the archive's own."""
    names = [entry.filename for entry in entries]
    for name in names:
        if name not in ENTRIES:
            raise BundleError(f"{origin}: the entry {name[:200]!r} is none of {', '.join(ENTRIES)}")
    if sorted(names) != sorted(ENTRIES):
        raise BundleError(f"{origin} must hold exactly {', '.join(ENTRIES)}; it holds {', '.join(names)}")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise BundleError(f"{origin}: the entry {entry.filename} is compressed; a bundle's are stored")
        if entry.file_size > MOST_BYTES:
            raise BundleError(f"{origin}: the entry {entry.filename} is larger than {MOST_BYTES >> 20} MiB")
