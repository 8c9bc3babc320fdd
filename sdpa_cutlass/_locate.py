"""Where the native libraries may lie, and whether a file there can be trusted.

Order: the path in the environment variable, alone, when it is set; otherwise the package folder, then
``build/lib`` of the checkout that this package runs from. Nothing is ever looked up by bare name, in the
working directory or on the loader's search path.
"""

from __future__ import annotations

import os
import stat
from enum import Enum
from pathlib import Path

from .errors import LibraryNotFoundError, UntrustedLibraryError


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
    if explicit:
        return [Path(explicit)]
    package = Path(__file__).resolve().parent
    places = [package / target.file_name]
    checkout = package.parent
    if (checkout / "CMakeLists.txt").is_file():
        places.append(checkout / "build" / "lib" / target.file_name)
    return places


def locate(target: Target) -> Path:
    """The library file to load, resolved and found safe.

    Raises LibraryNotFoundError with everything that was tried, or UntrustedLibraryError.
    """
    tried = []
    for place in candidates(target):
        if not place.is_absolute():
            raise LibraryNotFoundError(
                f"{target.environment_variable}={str(place)!r} is not an absolute path to {target.file_name}"
            )
        if place.is_file():
            path = place.resolve()
            _check_trusted(path)
            return path
        tried.append(f"  {place}: {'not a file' if place.exists() else 'not there'}")
    variable = target.environment_variable
    state = "set" if os.environ.get(variable) else "not set"
    raise LibraryNotFoundError(
        f"{target.file_name} was not found. Tried:\n" + "\n".join(tried) + f"\n({variable} is {state}.) "
        f"To make it, {target.how_to_build}."
    )


def _check_trusted(path: Path) -> None:
    """Raises UntrustedLibraryError when somebody else could have written the file or replaced it."""
    if os.name != "posix":
        return
    for place in (path, path.parent):
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
