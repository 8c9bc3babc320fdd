"""Where the native libraries and the compiled launcher may lie, and whether a file there can be trusted.

Order: the path in the library's environment variable, alone, when it is set; otherwise the package folder,
then ``build/lib`` of the checkout that this package runs from. Nothing is ever looked up by bare name, in the
working directory or on the loader's search path.

Nobody else may be able to write the file, its folder, or the folder of a link to it; and in an installed
package it is the very file that the package was built with, by the SHA-256 in ``libraries.json``. Both are
looked at before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from enum import Enum
from pathlib import Path

from .errors import LibraryMismatchError, LibraryNotFoundError, UntrustedLibraryError

HASHES = "libraries.json"
"""Beside an installed library: {file name: SHA-256}, written by the build of the wheel."""

LAUNCHER = "_launcher.abi3.so"
"""The extension module of the compiled call path (launcher.py), which may be missing."""

LAUNCHER_VARIABLE = "SDPA_CUTLASS_LAUNCHER"
"""The environment variable that may say "off"."""


class Target(Enum):
    """Which of the two libraries: ``CUDA`` runs on a GPU, ``HOST`` runs the same kernels on the CPU."""

    CUDA = "cuda"
    HOST = "host"

    @property
    def file_name(self) -> str:
        return "libsdpa_cutlass.so" if self is Target.CUDA else "libsdpa_cutlass_host.so"

    @property
    def environment_variable(self) -> str:
        return "SDPA_CUTLASS_LIBRARY" if self is Target.CUDA else "SDPA_CUTLASS_HOST_LIBRARY"

    @property
    def how_to_build(self) -> str:
        return f"run `make {self.value}` in a checkout, or `pip install .`"


def candidates(target: Target) -> list[Path]:
    """The places to look at, first choice first."""
    explicit = os.environ.get(target.environment_variable)
    return [Path(explicit)] if explicit else _own_places(target.file_name)


def _own_places(file_name: str) -> list[Path]:
    package = Path(__file__).resolve().parent
    places = [package / file_name]
    checkout = package.parent
    if (checkout / "CMakeLists.txt").is_file():
        places.append(checkout / "build" / "lib" / file_name)
    return places


def locate(target: Target) -> Path:
    """The library file to load, resolved and found safe.

    Raises LibraryNotFoundError with everything that was tried, UntrustedLibraryError, or LibraryMismatchError
    for a file that the package was not installed with.
    """
    tried = []
    for place in candidates(target):
        if not place.is_absolute():
            raise LibraryNotFoundError(
                f"{target.environment_variable}={str(place)!r} is not an absolute path to {target.file_name}"
            )
        if place.is_file():
            path = place.resolve()
            _check_trusted(path, place.parent)
            if not os.environ.get(target.environment_variable):
                _check_build(path, f"set {target.environment_variable} to the library that is meant")
            return path
        tried.append(f"  {place}: {'not a file' if place.exists() else 'not there'}")
    variable = target.environment_variable
    state = "set" if os.environ.get(variable) else "not set"
    raise LibraryNotFoundError(
        f"{target.file_name} was not found. Tried:\n" + "\n".join(tried) + f"\n({variable} is {state}.) "
        f"To make it, {target.how_to_build}."
    )


def locate_launcher() -> Path | None:
    """The compiled launcher's file, resolved and found safe; None when there is none, or it is not wanted.

    Raises ValueError for another value of the variable, UntrustedLibraryError and LibraryMismatchError as
    `locate`.
    """
    wanted = os.environ.get(LAUNCHER_VARIABLE, "")
    if wanted not in ("", "off"):
        raise ValueError(f"{LAUNCHER_VARIABLE} is {wanted!r}; allowed is 'off', or nothing")
    for place in () if wanted else _own_places(LAUNCHER):
        if place.is_file():
            path = place.resolve()
            _check_trusted(path, place.parent)
            _check_build(path, f"set {LAUNCHER_VARIABLE}=off to do without it")
            return path
    return None


def _check_trusted(path: Path, named_in: Path) -> None:
    """Raises UntrustedLibraryError when somebody else could have written the file or replaced it.

    `named_in` is the folder of the link, if it is one, that leads to the file. Folders further up are not
    looked at: in containers they are often open to all.
    """
    if os.name != "posix":
        return
    for place in dict.fromkeys((path, path.parent, named_in)):
        status = place.stat()
        problem = None
        if status.st_mode & stat.S_IWOTH:
            problem = "anyone can write to it"
        elif status.st_mode & stat.S_IWGRP and status.st_uid != os.geteuid():
            problem = f"it belongs to user {status.st_uid} and its group can write to it"
        if problem:
            raise UntrustedLibraryError(
                f"{path} is not loaded: {place} has mode {stat.S_IMODE(status.st_mode):04o}, so {problem}. "
                f"Run `chmod go-w {place}`, or install the library where only its owner can write."
            )


def _check_build(path: Path, otherwise: str) -> None:
    """Raises LibraryMismatchError when the package was installed with another file of this name.

    `otherwise`: what can be done instead of installing the package again.
    """
    listed = path.with_name(HASHES)
    try:
        hashes = json.loads(listed.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return  # a checkout: the handshake has to do
    except ValueError as error:
        raise LibraryMismatchError(f"{listed} cannot be read: {error}. Install the package again.") from error
    expected = hashes.get(path.name) if isinstance(hashes, dict) else None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise LibraryMismatchError(
            f"{path} is not loaded: it is of another build than this package. Its SHA-256 is {found}; "
            f"{listed.name} beside it says {expected}. Install the package again, or {otherwise}."
        )
