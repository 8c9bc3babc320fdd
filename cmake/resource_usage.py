"""Merge the records of all compiles into resource_usage.json, and check the fused kernels against the limits.

One entry per unit (seconds, object bytes) with one entry per kernel and architecture: registers, spills,
stack, static and dynamic shared memory, and, where cuobjdump is at hand, the bytes of machine code. With
--check, a fused kernel that spills or keeps anything in local memory and one that is missing fail the build:
a line names the function and the number.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

MAX_REGISTERS = 255
# The most that a thread of a fused kernel may have of each.
_LIMITS = {"spill_store_bytes": 0, "spill_load_bytes": 0, "stack_bytes": 0, "registers": MAX_REGISTERS}


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Return the bytes of machine code per kernel of one 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    names_offset = sections[names_index][4]
    result = {}
    for name, _, _, _, _, length in sections:
        start = names_offset + name
        text = cubin[start : cubin.index(b"\0", start)].decode()
        if text.startswith(".text."):
            result[text.removeprefix(".text.")] = length
    return result


def find_cuobjdump(nvcc: Path) -> str | None:
    """Return cuobjdump's path: beside nvcc, in the packages of this Python, or on PATH."""
    for folder in (nvcc.parent, Path(sysconfig.get_path("purelib"), "nvidia/cu13/bin")):
        if (folder / "cuobjdump").exists():
            return str(folder / "cuobjdump")
    return shutil.which("cuobjdump")


def library_code_bytes(library: Path, cuobjdump: str | None) -> dict[tuple[str, str], int]:
    """Return the bytes of machine code per (kernel, architecture); empty without cuobjdump."""
    if cuobjdump is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        command = [cuobjdump, "-xelf", "all", str(library.resolve())]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return {}
        result = {}
        for cubin in Path(folder).glob("*.cubin"):
            arch = next(part for part in cubin.name.split(".") if part.startswith("sm_"))
            result.update({(name, arch): size for name, size in code_bytes(cubin.read_bytes()).items()})
        return result


def merge(
    objects: list[Path], manifest: dict[str, Any], code: dict[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """Return one entry per unit, sorted by name."""
    rows = {symbol: row for row in manifest["kernels"] for symbol in row["symbols"] or ()}
    units = []
    for path in objects:
        usage = path.with_name(path.name + ".usage.json")
        if not usage.exists():
            continue  # compiled as C++: no GPU code in it
        record = json.loads(usage.read_text(encoding="utf-8"))
        for kernel in record["kernels"]:
            row = rows.get(kernel["name"])
            kernel["dynamic_smem_bytes"] = row["smem_bytes"] if row else None
            kernel["code_bytes"] = code.get((kernel["name"], kernel["arch"]))
        record["kernels"].sort(key=lambda kernel: (kernel["name"], kernel["arch"]))
        units.append({"unit": path.name.removesuffix(".cu.o"), **record})
    return sorted(units, key=lambda unit: str(unit["unit"]))


def find_problems(units: list[dict[str, Any]], manifest: dict[str, Any]) -> list[str]:
    """Return a line for every fused kernel that breaks a limit or was never compiled."""
    compiled = {kernel["name"]: kernel for unit in units for kernel in unit["kernels"]}
    problems = []
    for row in manifest["kernels"]:
        for symbol in row["symbols"] or ():
            if symbol in compiled:
                problems += _function_problems(symbol, compiled[symbol])
            else:
                problems.append(f"{symbol}: in the manifest, but no compiled unit holds it")
    return problems


def _function_problems(symbol: str, function: dict[str, Any]) -> list[str]:
    return [
        f"{symbol}: {key} is {function[key]}; at most {limit}"
        for key, limit in _LIMITS.items()
        if function[key] > limit
    ]


def main() -> int:
    """Write the report; return 1 when --check finds a problem."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=Path, required=True, help="file that lists the objects, one a line")
    parser.add_argument("--manifest", type=Path, required=True, help="the generator's manifest.json")
    parser.add_argument("--library", type=Path, required=True, help="the linked library")
    parser.add_argument("--nvcc", type=Path, required=True, help="the compiler; cuobjdump may lie beside it")
    parser.add_argument("--out", type=Path, required=True, help="resource_usage.json")
    parser.add_argument("--check", action="store_true", help="fail when a fused kernel breaks a limit")
    options = parser.parse_args()

    manifest = json.loads(options.manifest.read_text(encoding="utf-8"))
    objects = [Path(line) for line in options.objects.read_text(encoding="utf-8").splitlines() if line]
    code = library_code_bytes(options.library, find_cuobjdump(options.nvcc))
    units = merge(objects, manifest, code)
    report = {
        "digest": manifest["digest"],
        "space": manifest["space"],
        "library_bytes": options.library.stat().st_size,
        "seconds": round(sum(unit["seconds"] for unit in units), 1),
        "units": units,
    }
    problems = find_problems(units, manifest) if options.check else []
    for problem in problems:
        print(f"resource_usage: {problem}", file=sys.stderr)
    # A failed build must fail again: then the report goes to another name.
    out = options.out.with_suffix(".failed.json") if problems else options.out
    out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
