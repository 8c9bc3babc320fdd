"""Whether this machine's CPU has the instructions that the host library was compiled for.

Without them the first such instruction would end the process. So they are asked for before the library is
loaded: the file holds their names (cmake/host/cpu_features.cpp), as Linux spells them in /proc/cpuinfo.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import LibraryError

CPU_INFO = Path("/proc/cpuinfo")
_MARK = b"sdpa_cutlass needs of the CPU:"


def check(path: Path) -> None:
    """Raises LibraryError when the CPU lacks what the library at `path` needs, or the file cannot be read.

    Nothing is asked of a library that names nothing, nor on systems that do not list the CPU's features.
    """
    try:
        needed = needed_features(path)
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from error
    known = _known_features()
    missing = sorted(needed - known) if known else []
    if missing:
        raise LibraryError(
            f"{path} is not loaded: it was compiled for CPUs with {', '.join(missing)}, which this one has "
            f"not. Build it with -DSDPA_HOST_MARCH=native on this machine."
        )


def needed_features(path: Path) -> frozenset[str]:
    """The features that the file names."""
    _, found, rest = path.read_bytes().partition(_MARK)
    return frozenset(rest.partition(b"\0")[0].decode().split()) if found else frozenset()


def _known_features() -> frozenset[str]:
    """The features of this machine's CPU, as far as the system lists them."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())
