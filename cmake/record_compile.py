"""Compiler launcher: runs one CUDA compile and writes what it cost beside the object.

    record_compile.py -- [ccache] nvcc ... -c -o X.o      →  X.o.usage.json

The record holds the seconds of the compile, the bytes of the object, and for each kernel what `ptxas -v`
said: registers, spills, stack and static shared memory. Those lines are taken out of the compiler's output,
everything else passes through. A compiler cache repeats the output of the compile it remembers, but not its
time: while the object stays the same, so do the recorded seconds.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"ptxas info\s*: Used (?P<registers>\d+) registers")
_SMEM = re.compile(r"(?P<smem>\d+) bytes smem")
_CHATTER = re.compile(r"^ptxas info|^\s+\d+ bytes stack frame")


def parse_ptxas(text: str) -> list[dict[str, Any]]:
    """Return one row per kernel and architecture of the output of `ptxas -v`."""
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            rows.append({"name": entry["name"], "arch": entry["arch"]})
        elif rows and (stack := _STACK.search(line)) and "stack_bytes" not in rows[-1]:
            rows[-1]["stack_bytes"] = int(stack["stack"])
            rows[-1]["spill_store_bytes"] = int(stack["stores"])
            rows[-1]["spill_load_bytes"] = int(stack["loads"])
        elif rows and (used := _USED.search(line)):
            smem = _SMEM.search(line)
            rows[-1]["registers"] = int(used["registers"])
            rows[-1]["static_smem_bytes"] = int(smem["smem"]) if smem else 0
    return rows


def _record(output: Path, seconds: float, text: str) -> None:
    """Write the record of the object `output`."""
    content = output.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    path = output.with_name(output.name + ".usage.json")
    if path.exists():
        earlier = json.loads(path.read_text(encoding="utf-8"))
        if earlier["object_sha256"] == digest:
            seconds = max(seconds, earlier["seconds"])
    record = {
        "object_bytes": len(content),
        "object_sha256": digest,
        "seconds": round(seconds, 1),
        "kernels": parse_ptxas(text),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Run the command after `--` and return its exit status."""
    command = arguments[arguments.index("--") + 1 :]
    start = time.monotonic()
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    seconds = time.monotonic() - start
    for line in result.stdout.splitlines():
        if result.returncode != 0 or not _CHATTER.match(line):
            print(line, file=sys.stderr)
    if result.returncode == 0 and "-o" in command:
        output = Path(command[command.index("-o") + 1])
        if output.suffix == ".o":
            _record(output, seconds, result.stdout)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
