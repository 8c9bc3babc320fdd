"""Turns the call chains in the host engine's messages into source lines.

A build with call chains and debug information (simt/build_kind.hpp, FLAGS here) names an access by offsets
into its library, innermost call first: ``@1a2b<3c4d``. Here they become the lines of the kernel, such as
``tile_copy.cuh:62 < mainloop.cuh:112``. Lines of the engine, CuTe and the standard library are left out.

    python -m tests.source_lines build/host-asan/lib/libsdpa_cutlass_host.so < messages.txt
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

FLAGS = (
    *("-DSDPA_SIMT_CALL_CHAINS", "-fno-omit-frame-pointer"),
    *("-g1", "-gdwarf-4", "-gno-statement-frontiers"),
)
"""What the compiler needs to be given for them. addr2line 2.40 mistakes some files of DWARF 5."""

MOST_LINES = 5
_CHAIN = re.compile(r"@([0-9a-f]+(?:<[0-9a-f]+)*)")
_NOT_OF_KERNELS = re.compile(r"/sdpa/arch/|/cute/|/cutlass/|/cuda/|/usr/|/generated/|^\?")


def with_lines(message: str, binary: Path) -> str:
    """`message` with lines for the chains of `binary`, as far as addr2line knows them."""
    chains = [found.group(1).split("<") for found in _CHAIN.finditer(message)]
    lines = _lines_of({offset for chain in chains for offset in chain}, binary)

    def replaced(found: re.Match[str]) -> str:
        frames = [line for offset in found.group(1).split("<") for line in lines.get(offset, [])]
        return " < ".join(frames[:MOST_LINES]) or found.group()

    return _CHAIN.sub(replaced, message)


def _lines_of(offsets: set[str], binary: Path) -> dict[str, list[str]]:
    """file:line of the kernel at each offset, the innermost of inlined calls first."""
    addr2line = shutil.which("addr2line")
    if addr2line is None or not offsets:
        return {}
    calls = {f"0x{int(offset, 16) - 1:016x}": offset for offset in offsets}  # not where they return to
    command = [addr2line, "--inlines", "--addresses", f"--exe={binary}", *calls]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines: dict[str, list[str]] = {}
    for text in output.splitlines():
        if text in calls:
            current = lines.setdefault(calls[text], [])
        elif not _NOT_OF_KERNELS.search(text):
            current.append(text.partition(" ")[0].rpartition("/")[2])
    return lines


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.source_lines LIBRARY < MESSAGES")
    for message in sys.stdin:
        print(with_lines(message, Path(sys.argv[1])), end="")
