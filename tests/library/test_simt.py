"""The host engine (sdpa/arch/simt, sdpa/arch/host.hpp): builds tests/library/simt and runs its cases.

The C++ cases hold the expectations; this file compiles them with g++ in three ways and runs every case in
a process of its own, so that a crash or a hang is the failure of one case:

- ``plain``: as the library is built, with the CuTe cases of the policy ``sdpa::arch::Host``;
- ``portable``: ucontext instead of the x86-64 stack switch, no vector instructions;
- ``sanitized``: AddressSanitizer (with stack-use-after-return) and UndefinedBehaviorSanitizer.

Programs are kept in build/tests/simt under a digest of everything that goes into them.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "library" / "simt"
HEADERS = ROOT / "templates" / "include"
PROGRAMS = ROOT / "build" / "tests" / "simt"
ENGINE = ["main.cpp", "collectives_test.cpp", "memory_test.cpp", "errors_test.cpp", "schedule_test.cpp"]
CUTE = ["host_policy_test.cpp"]
CASE_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to build the test program."""

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]


def _vector_flags() -> tuple[str, ...]:
    """What the library's host build asks of the compiler, if this processor has it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
    wanted = ("avx2", "fma", "f16c")
    return tuple(f"-m{name}" for name in wanted) if all(name in flags for name in wanted) else ()


VARIANTS = (
    Variant(name="plain", sources=(*ENGINE, *CUTE), flags=("-O1", *_vector_flags())),
    Variant(name="portable", sources=tuple(ENGINE), flags=("-O1", "-DSDPA_SIMT_UCONTEXT")),
    Variant(
        name="sanitized",
        sources=tuple(ENGINE),
        flags=("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", *_vector_flags()),
    ),
)


def _cases(variant: Variant) -> list[str]:
    texts = [(SOURCES / source).read_text() for source in variant.sources]
    return [name for text in texts for name in re.findall(r"^SIMT_CASE\((\w+)\)", text, re.MULTILINE)]


def _include_flags() -> list[str]:
    """Include paths of this repository, CUTLASS and the CUDA toolkit's wheels."""
    cutlass = importlib.util.find_spec("cutlass_library")
    nvidia = importlib.util.find_spec("nvidia")
    found = [Path(spec.origin).parent / "source" / "include" for spec in (cutlass,) if spec and spec.origin]
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        found += [Path(folder) / "cu13" / "include", Path(folder) / "cu13" / "include" / "cccl"]
    return [f"-I{HEADERS}", *(f"-isystem{path}" for path in found if path.is_dir())]


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{result.stderr[-6000:]}", pytrace=False)


def _digest(variant: Variant, compiler: str) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    version = subprocess.run([compiler, "-v"], capture_output=True, text=True, check=True).stderr
    digest.update("\n".join([version, *variant.flags, *variant.sources, *_include_flags()]).encode())
    for folder in (SOURCES, HEADERS / "sdpa" / "arch"):
        for path in sorted(folder.rglob("*pp")):
            digest.update(path.read_bytes())
    for name in ("c_api.h", "registry.hpp"):
        digest.update((HEADERS / "sdpa" / name).read_bytes())
    return digest.hexdigest()[:16]


def _build(variant: Variant) -> Path:
    """Compile and link the variant unless it exists; safe when several test processes ask for it at once."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed, and the host engine is compiled with it")
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    folder = PROGRAMS / f"{variant.name}-{_digest(variant, compiler)}"
    program = folder / "simt_test"
    with (PROGRAMS / f"{variant.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if program.exists():
            return program
        for outdated in PROGRAMS.glob(f"{variant.name}-*"):
            shutil.rmtree(outdated)
        folder.mkdir()
        flags = ["-std=c++17", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-pthread", *variant.flags]
        objects = []
        for source in variant.sources:
            objects.append(str(folder / f"{source}.o"))
            _compile([compiler, *flags, *_include_flags(), "-c", str(SOURCES / source), "-o", objects[-1]])
        _compile([compiler, *flags, *objects, "-o", str(folder / "linked")])
        (folder / "linked").rename(program)
    return program


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    """Programs that this process has asked for, by variant."""
    return {}


@pytest.mark.parametrize(
    ("variant", "case"),
    [
        pytest.param(variant, case, id=f"{variant.name}-{case}")
        for variant in VARIANTS
        for case in _cases(variant)
    ],
)
def test_case(variant: Variant, case: str, programs: dict[str, Path]) -> None:
    if variant.name not in programs:
        programs[variant.name] = _build(variant)
    result = subprocess.run(
        [str(programs[variant.name]), case],
        capture_output=True,
        text=True,
        check=False,
        timeout=CASE_TIMEOUT_S,
        env={**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=1"},
    )
    assert result.stdout == f"passed {case}\n", f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    assert result.returncode == 0, result.stderr[-6000:]
