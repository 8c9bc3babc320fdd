"""Where the native libraries and the compiled launcher may lie, and whether a file there can be trusted.

Order: the path in the library's environment variable, alone, when it is set; otherwise the package folder,
then ``build/lib`` of the checkout that this package runs from. Nothing is ever looked up by bare name, in the
working directory or on the loader's search path.

Nobody else may be able to write the file or to put another one in its place (trust.py). In an installed
package it is the very file that the package was built with, by the SHA-256 in ``libraries.json``. Both are
looked at before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ..errors import ArgumentError, LibraryError, LibraryMismatchError, LibraryNotFoundError
from . import trust
from .target import Target as Target  # most files know it from here

HASHES = "libraries.json"
"""In the folder of an installed package: {file name: SHA-256}, written by the build of the wheel."""

LAUNCHER = "_launcher.abi3.so"
"""The extension module of the compiled call path (launcher.py), which may be missing."""

LAUNCHER_VARIABLE = "SDPA_CUTLASS_LAUNCHER"
"""The environment variable that may say "off"."""


def candidates(target: Target) -> list[Path]:
    """The places to look at, first choice first."""
    explicit = os.environ.get(target.environment_variable)
    return [Path(explicit)] if explicit else _own_places(target.file_name)


def _own_places(file_name: str) -> list[Path]:
    package = _package()
    places = [package / file_name]
    if _is_checkout(package):
        places.append(package.parent / "build" / "lib" / file_name)
    return places


def _package() -> Path:
    return Path(__file__).resolve().parents[1]


def _is_checkout(package: Path) -> bool:
    return (package.parent / "CMakeLists.txt").is_file()


def locate(target: Target) -> Path:
    """The library file to load, resolved and found safe.

    Raises LibraryNotFoundError with everything that was tried, LibraryMismatchError for a file that the
    package was not installed with, and the errors of `trust.check`.
    """
    variable = target.environment_variable
    is_named = bool(os.environ.get(variable))
    tried = []
    for place in candidates(target):
        if not place.is_absolute():
            raise LibraryNotFoundError(
                f"{variable}={str(place)!r} is not an absolute path to {target.file_name}"
            )
        absence = _absence(place)
        if absence is None:
            path = trust.check(place)
            if not is_named:
                _check_build(path, place.name, f"set {variable} to the library that is meant")
            return path
        tried.append(f"  {place}: {absence}")
    raise LibraryNotFoundError(
        f"{target.file_name} was not found. Tried:\n" + "\n".join(tried) + f"\n({variable} is "
        f"{'set' if is_named else 'not set'}.) To make it, {target.how_to_build}."
    )


def locate_launcher() -> Path | None:
    """The compiled launcher's file, resolved and found safe; None when there is none, or it is not wanted.

    Raises ArgumentError for another value of the variable, and LibraryMismatchError and the errors of
    `trust.check` as `locate`.
    """
    wanted = os.environ.get(LAUNCHER_VARIABLE, "")
    if wanted not in ("", "off"):
        raise ArgumentError(f"{LAUNCHER_VARIABLE} is {wanted!r}; allowed is 'off', or nothing")
    for place in () if wanted else _own_places(LAUNCHER):
        if _absence(place) is None:
            path = trust.check(place)
            _check_build(path, place.name, f"set {LAUNCHER_VARIABLE}=off to do without it")
            return path
    return None


def _absence(place: Path) -> str | None:
    """Why there is no file at `place`, or None when there is one."""
    try:
        if place.is_file():
            return None
        return "not a file" if place.exists() else "not there"
    except OSError as error:  # a folder that may not be searched
        return error.strerror or str(error)


def _check_build(path: Path, name: str, otherwise: str) -> None:
    """Raises LibraryMismatchError unless the file is the `name` that the package was installed with.

    A checkout need not have a list: there the handshake has to do. `otherwise`: what can be done instead of
    installing the package again.
    """
    package = _package()
    listed = package / HASHES
    try:
        hashes = json.loads(listed.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and _is_checkout(package):
            return
        raise LibraryMismatchError(
            f"{path} is not loaded: {listed}, which says what the package was built with, cannot be read: "
            f"{error}. Install the package again, or {otherwise}."
        ) from error
    expected = hashes.get(name) if isinstance(hashes, dict) else None
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise LibraryError(f"{path} cannot be read: {error}") from error
    if found != expected:
        raise LibraryMismatchError(
            f"{path} is not loaded: it is of another build than this package. Its SHA-256 is {found}; "
            f"{listed} says {expected}. Install the package again, or {otherwise}."
        )
