"""The host engine (sdpa/arch/simt, sdpa/arch/host.hpp): builds tests/library/simt and runs its cases.

The C++ cases hold the expectations; this file compiles them with g++ in four ways and runs every case in
a process of its own, so that a crash or a hang is the failure of one case:

- ``plain``: as the library is built, with the cases of the policy ``sdpa::arch::Host`` and of the scheduler;
- ``portable``: ucontext instead of the x86-64 stack switch, no vector instructions;
- ``sanitized``: AddressSanitizer (with stack-use-after-return) and UndefinedBehaviorSanitizer;
- ``observed``: plain loads and stores of shared memory are seen as well (simt/observed.hpp).

In the last two, messages about races hold call chains, which tests/source_lines.py turns into source lines.

Programs are kept in build/tests/simt under a digest of everything that goes into them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.host_compiler import OBSERVED_FLAGS, compiler, include_flags, vector_flags
from tests.source_lines import FLAGS as LINES_FLAGS
from tests.source_lines import with_lines

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "library" / "simt"
HEADERS = ROOT / "templates" / "include"
PROGRAMS = ROOT / "build" / "tests" / "simt"
RACES = ["races_test.cpp", "bank_conflicts_test.cpp"]
ENGINE = [
    *("main.cpp", "collectives_test.cpp", "memory_test.cpp", "errors_test.cpp", "schedule_test.cpp"),
    *("arrivals_test.cpp", "sm90_test.cpp", "sm90_rules_test.cpp", "sm90_cluster_test.cpp", *RACES),
]
CUTE = ["host_policy_test.cpp", "tile_scheduler_test.cpp", "sm90_grid_test.cpp"]
ORDERS = ("attention/tile_scheduler.cuh", "fmha_fwd_sm90/grid.hpp")  # headers outside of arch
PLACES = "places_test.cpp"
CASE_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to build the test program."""

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...]


VARIANTS = (
    Variant(name="plain", sources=(*ENGINE, *CUTE), flags=("-O1", *vector_flags())),
    Variant(name="portable", sources=tuple(ENGINE), flags=("-O1", "-DSDPA_SIMT_UCONTEXT")),
    Variant(
        name="sanitized",
        sources=(*ENGINE, PLACES),
        flags=(
            *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
            *LINES_FLAGS,
            *vector_flags(),
        ),
    ),
    Variant(
        name="observed",
        sources=("main.cpp", "collectives_test.cpp", *RACES, PLACES),
        flags=("-O1", *OBSERVED_FLAGS, *LINES_FLAGS, *vector_flags()),
    ),
)


# Cases that an ordinary build does not have.
ONLY_OBSERVED = ("observed_", "lines_of_a_", "lines_of_loads_", "lines_of_vectors")


def _cases(variant: Variant) -> list[str]:
    texts = [(SOURCES / source).read_text() for source in variant.sources]
    names = [name for text in texts for name in re.findall(r"^SIMT_CASE\((\w+)\)", text, re.MULTILINE)]
    return [name for name in names if variant.name == "observed" or not name.startswith(ONLY_OBSERVED)]


def _includes() -> list[str]:
    return [f"-I{HEADERS}", *include_flags()]


def _compile(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        pytest.fail(f"{' '.join(command)}\n{result.stderr[-6000:]}", pytrace=False)


def _digest(variant: Variant, gxx: str) -> str:
    digest = hashlib.sha256(platform.machine().encode())
    version = subprocess.run([gxx, "-v"], capture_output=True, text=True, check=True).stderr
    digest.update("\n".join([version, *variant.flags, *variant.sources, *_includes()]).encode())
    for folder in (SOURCES, HEADERS / "sdpa" / "arch"):
        for path in sorted(folder.rglob("*pp")):
            digest.update(path.read_bytes())
    for name in ("c_api.h", "registry.hpp", *ORDERS):
        digest.update((HEADERS / "sdpa" / name).read_bytes())
    return digest.hexdigest()[:16]


def _build(variant: Variant) -> Path:
    """Compile and link the variant unless it exists; safe when several test processes ask for it at once."""
    try:
        gxx = compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    folder = PROGRAMS / f"{variant.name}-{_digest(variant, gxx)}"
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
            _compile([gxx, *flags, *_includes(), "-c", str(SOURCES / source), "-o", objects[-1]])
        link_flags = [flag for flag in flags if flag not in OBSERVED_FLAGS]  # without ThreadSanitizer itself
        _compile([gxx, *link_flags, *objects, "-o", str(folder / "linked")])
        (folder / "linked").rename(program)
    return program


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    """Programs that this process has asked for, by variant."""
    return {}


def _run(variant: Variant, case: str, programs: dict[str, Path]) -> str:
    """What a case that passes prints before it says so."""
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
    printed, passed, rest = result.stdout.partition(f"passed {case}\n")
    assert passed, f"{result.stdout[-3000:]}\n{result.stderr[-6000:]}"
    assert not rest
    assert result.returncode == 0, result.stderr[-6000:]
    return printed


def _parameters(*, lines: bool) -> list:
    return [
        pytest.param(variant, case, id=f"{variant.name}-{case}")
        for variant in VARIANTS
        for case in _cases(variant)
        if case.startswith("lines_") == lines
    ]


@pytest.mark.parametrize(("variant", "case"), _parameters(lines=False))
def test_case(variant: Variant, case: str, programs: dict[str, Path]) -> None:
    assert _run(variant, case, programs) == ""


@pytest.mark.skipif(shutil.which("addr2line") is None, reason="needs addr2line, of binutils")
@pytest.mark.parametrize(("variant", "case"), _parameters(lines=True))
def test_races_name_the_lines_of_both_accesses(
    variant: Variant, case: str, programs: dict[str, Path]
) -> None:
    message = with_lines(_run(variant, case, programs), programs[variant.name])
    named = re.findall(r" at (\S+(?: < \S+)*), in thread \d+ behind", message)
    # What called the case is left out.
    assert [lines.partition(" < harness.hpp")[0] for lines in named] == _marked_lines(case), message


def _marked_lines(case: str) -> list[str]:
    """Of the later access and, if it is marked, of the earlier one, innermost call first."""
    marked: dict[tuple[str, bool], list[str]] = {}
    for number, line in enumerate((SOURCES / PLACES).read_text().splitlines(), start=1):
        words = line.rpartition(f"// {case}: ")[2].split(", ") if f"// {case}: " in line else []
        for role in words:
            marked.setdefault((role, "called" in words), []).append(f"{PLACES}:{number}")
    return [
        " < ".join([*marked[role, False], *marked.get((role, True), [])])
        for role in ("later", "earlier")
        if (role, False) in marked
    ]
