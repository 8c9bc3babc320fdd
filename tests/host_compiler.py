"""How tests call g++ on the host target's headers, outside CMake."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

OBSERVED_FLAGS = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", "-fno-tree-sra")
"""g++ then calls into templates/include/sdpa/arch/simt/observed.hpp at every access, once for each vector.

While compiling only.
"""


def compiler() -> str:
    """The path of g++. Raises FileNotFoundError."""
    found = shutil.which("g++")
    if found is None:
        raise FileNotFoundError("g++ is not installed, and the host target is compiled with it")
    return found


def include_flags() -> list[str]:
    """Include paths of CUTLASS, of the CUDA toolkit's wheels, and of the nvcc that is installed."""
    cutlass = importlib.util.find_spec("cutlass_library")
    nvidia = importlib.util.find_spec("nvidia")
    found = [Path(spec.origin).parent / "source" / "include" for spec in (cutlass,) if spec and spec.origin]
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        found += [Path(folder) / "cu13" / "include", Path(folder) / "cu13" / "include" / "cccl"]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        include = Path(nvcc).resolve().parents[1] / "include"
        found += [include, include / "cccl"]
    return [f"-isystem{path}" for path in found if path.is_dir()]


def vector_flags() -> tuple[str, ...]:
    """What the library's host build asks of the compiler, if this processor has it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    wanted = ("avx2", "fma", "f16c")
    return tuple(f"-m{name}" for name in wanted) if all(name in flags for name in wanted) else ()
