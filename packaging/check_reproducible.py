"""Builds twice in one folder and compares the files bit by bit.

    check_reproducible.py                                                  # the host library, space smoke
    check_reproducible.py --target cuda --filter '*_d64_m64n64_s1_w4_f16'  # one kernel for GPUs

Each build starts from an empty folder, the second with another number of jobs, time zone and locale, neither
with a compiler cache. What is compared: the library and every generated file. Objects are not: nvcc's differ
in what the stripped library does not hold. The folder is the same, because compilers may write its name into
assertions. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMPARED = (".so", ".cu", ".cpp", ".hpp")
_FIRST = {"CCACHE_DISABLE": "1"}
_SECOND = {"CCACHE_DISABLE": "1", "LC_ALL": "C", "TZ": "Pacific/Auckland", "SOURCE_DATE_EPOCH": "1"}


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file below that a build makes and a library holds, by its path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.suffix in _COMPARED and path.is_file() and "CompilerId" not in str(path)
    }


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    """What is not the same in both, one line for each file."""
    found = [f"only in the {which} build: {path}" for which, paths in (
        ("first", first.keys() - second.keys()), ("second", second.keys() - first.keys())
    ) for path in sorted(paths)]  # fmt: skip
    common = sorted(first.keys() & second.keys())
    return found + [f"differs: {path}" for path in common if first[path] != second[path]]


def build(
    folder: Path, options: argparse.Namespace, jobs: int, environment: dict[str, str]
) -> dict[str, str]:
    """Builds into the empty `folder` and returns the digests of what it made."""
    shutil.rmtree(folder, ignore_errors=True)
    cmake = _tool("cmake")
    configure = [
        cmake, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "--log-level=WARNING",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
        f"-DSDPA_TARGET={options.target}", f"-DSDPA_SPACE={options.space}", f"-DSDPA_FILTER={options.filter}",
        f"-DSDPA_LIBRARY_DIR={folder / 'lib'}",
    ]  # fmt: skip
    for command in (configure, [cmake, "--build", str(folder), "--parallel", str(jobs)]):
        subprocess.run(command, check=True, env={**os.environ, **environment})
    return digests(folder)


def _tool(name: str) -> str:
    own = Path(sys.executable).with_name(name)
    return str(own) if own.is_file() else name


def main(arguments: list[str] | None = None) -> int:
    """Build twice, compare, print what differs."""
    parser = argparse.ArgumentParser(description="Builds twice in one folder and compares the files.")
    parser.add_argument("--target", choices=("host", "cuda"), default="host")
    parser.add_argument("--space", default="smoke", choices=("smoke", "release", "sweep"))
    parser.add_argument("--filter", default="*", help="only kernels whose name matches")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "build")
        first = build(folder, options, 1, _FIRST)
        second = build(folder, options, os.cpu_count() or 2, _SECOND)
    found = differences(first, second)
    print("\n".join(found) if found else f"{len(first)} files are the same, bit by bit")
    libraries = [path for path in first if path.endswith(".so")]
    return 1 if found or not libraries else 0


if __name__ == "__main__":
    sys.exit(main())
