"""Builds a small host library from a copy of the headers, with or without a defect in it.

The units are the generator's own, for the few kernels of one `Kernels`; what does not depend on kernels is
compiled once, CuTe's headers too. No CMake: a mutant costs one or two calls of g++.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from generator.core.render import Sources, render
from generator.core.space import Space
from generator.families import FAMILIES
from sdpa_cutlass import __version__
from sdpa_cutlass.library.locate import Target
from tests.host_compiler import OBSERVED_FLAGS, compiler, include_flags, vector_flags
from tests.mutation.model import INCLUDE, ROOT, SIMT_TESTS, Kernels, Mutant
from tests.mutation.switches import DEFINITION, Edit, edit_of, switched
from tests.source_lines import FLAGS as LINES_FLAGS

_FLAGS = ("-std=c++17", "-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-w", "-DSDPA_TARGET_HOST")
# Templates fill g++'s memory, and collecting its garbage takes a tenth of its time.
_RARE_COLLECTION = ("--param=ggc-min-expand=1000", "--param=ggc-min-heapsize=1000000")

_SOURCES = ROOT / "templates" / "src"

# In a workshop's folder: what units include first, and mutants do not change. CuTe's assertions are
# left out, which take a tenth of a unit's time: defects are for the tests to find.
_CUTE = "cute.hpp"
_BEFORE_CUTE = (  # the first two as the headers of Hopper's kernels have it
    "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
    '#include "sdpa/arch/simt/shared_address.hpp"',
    "#include <cute/config.hpp>",
    "#undef CUTE_STATIC_ASSERT_V",
    "#define CUTE_STATIC_ASSERT_V(...) static_assert(true)",
)
_CUTE_HEADERS = (
    "cute/tensor.hpp", "cute/arch/cluster_sm90.hpp", "cute/arch/copy_sm90_tma.hpp",
    "cute/atom/copy_traits_sm90.hpp", "cute/atom/mma_traits_sm90_gmma.hpp",
    "cutlass/bfloat16.h", "cutlass/half.h", "cutlass/fast_math.h",
)  # fmt: skip
# What the engine and the launchers include besides: half a second of each unit.
_SYSTEM_HEADERS = (
    "algorithm", "array", "atomic", "climits", "cstdarg", "cstdio", "exception", "map", "memory", "mutex",
    "new", "numeric", "system_error", "thread", "vector", "sys/mman.h", "ucontext.h",
)  # fmt: skip


_SWITCH = "mutant_switch.hpp"  # in the headers of a library of several mutants


class BuildError(RuntimeError):
    """The compiler or the linker refused; the message is what it printed."""


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A folder with the generated units of every `Kernels` and the objects that all libraries share."""

    folder: Path
    common: dict[tuple[bool, bool], tuple[Path, ...]]  # observed or not, with lines or not

    @staticmethod
    def open(folder: Path) -> Workshop:
        """Raises BuildError."""
        generated = folder / "generated"
        sources = Sources.load()
        for kernels in (kernels for kernels in Kernels if kernels.names):
            space = Space(name="mutation", kernels=tuple(FAMILIES.parse(name) for name in kernels.names))
            for path, text in render(space, sources).items():
                target = generated / kernels.name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
        (folder / "build_config.hpp").write_text(
            f'#define SDPA_BUILD_VERSION "{__version__}"\n'
            '#define SDPA_BUILD_ARCHS ""\n'
            '#define SDPA_BUILD_SANITIZERS ""\n',
            encoding="utf-8",
        )
        cute = folder / _CUTE
        includes = (f"#include <{header}>" for header in (*_CUTE_HEADERS, *_SYSTEM_HEADERS))
        cute.write_text("\n".join((*_BEFORE_CUTE, *includes, "")), encoding="utf-8")
        steps: list[Callable[[], None]] = []
        for observed in (False, True):
            compiled = folder / f"{_CUTE}.gch" / ("observed" if observed else "plain")
            compiled.parent.mkdir(exist_ok=True)
            steps.append(
                partial(_compile, cute, compiled, INCLUDE, folder, observed=observed, language="c++-header")
            )
        common: dict[tuple[bool, bool], tuple[Path, ...]] = {}
        for observed, lines in product((False, True), repeat=2):
            place = folder / f"common{'-observed' * observed}{'-lines' * lines}"
            place.mkdir(exist_ok=True)
            targets = tuple(place / f"{name}.o" for name in ("c_api.cpp", "checks.cpp", "backend_host.cpp"))
            common[observed, lines] = targets
            for target in targets:
                source = _SOURCES / target.stem
                steps.append(
                    partial(_compile, source, target, INCLUDE, folder, observed=observed, lines=lines)
                )
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda step: step(), steps))
        return Workshop(folder=folder, common=common)

    def library(
        self, kernels: Kernels, mutants: Sequence[Mutant], *, observed: bool, lines: bool = False
    ) -> Path:
        """Builds the library, or the engine's test program, in a folder of its own. Raises BuildError.

        Several mutants are each behind a switch of its number, from 1 on: tests/mutation/switches.py. With
        `lines`, messages about races name source lines: tests/source_lines.py. Costs a third more.
        """
        kind = f"{kernels.name}{'-observed' * observed}"
        names = {0: f"baseline-{kind}", 1: mutants[0].name if mutants else ""}
        place = self.folder / names.get(len(mutants), f"switched-{kind}")
        shutil.rmtree(place, ignore_errors=True)
        include = place / "include"
        shutil.copytree(INCLUDE, include)
        if len(mutants) == 1:
            _rewrite(include, mutants[0].header, lambda text: text.replace(mutants[0].old, mutants[0].new))
        elif mutants:
            (include / "sdpa" / _SWITCH).write_text(DEFINITION, encoding="utf-8")
            edits: dict[str, list[tuple[int, Edit]]] = {}
            for number, mutant in enumerate(mutants, start=1):
                edit = edit_of(mutant)
                if edit is None:
                    raise BuildError(f"{mutant.name} cannot be behind a switch")
                edits.setdefault(mutant.header, []).append((number, edit))
            for header, of_header in edits.items():
                _rewrite(include, header, partial(switched, edits=of_header))
        if kernels is Kernels.ENGINE:
            return _engine_program(place, self.folder / _CUTE, observed=observed)
        generated = self.folder / "generated" / kernels.name
        objects = list(self.common[observed, lines])
        for unit in (*sorted((generated / "units").glob("*.cu")), generated / "registry.cpp"):
            objects.append(place / f"{unit.name}.o")
            _compile(
                unit,
                objects[-1],
                place / "include",
                self.folder,
                observed=observed,
                lines=lines,
                precompiled=self.folder / _CUTE if unit.suffix == ".cu" else None,
            )
        library = place / Target.HOST.file_name
        exports = f"-Wl,--version-script={ROOT / 'cmake' / 'exports.map'}"
        _run([compiler(), "-shared", "-pthread", exports, *map(str, objects), "-o", str(library)])
        return library

    def discard(self, library: Path) -> None:
        """Deletes what `library` made."""
        shutil.rmtree(library.parent, ignore_errors=True)


def _rewrite(include: Path, header: str, change: Callable[[str], str]) -> None:
    path = include / "sdpa" / header
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def _compile(
    source: Path,
    target: Path,
    include: Path,
    folder: Path,
    *,
    observed: bool,
    lines: bool = False,
    language: str = "c++",
    precompiled: Path | None = None,
) -> None:
    flags = [
        *_FLAGS,
        *_RARE_COLLECTION,
        *(OBSERVED_FLAGS if observed else ()),
        *(LINES_FLAGS if lines else ()),
        *vector_flags(),
        f"-I{include}",
        f"-fmacro-prefix-map={include}={INCLUDE}",  # the folder of a mutant is not in its library
        f"-I{folder}",
        *include_flags(),
        *(("-include", str(precompiled)) if precompiled else ()),
    ]
    switch = include / "sdpa" / _SWITCH
    if switch.exists():  # behind what is precompiled, which has to be first
        flags += ["-include", str(switch)]
    _run([compiler(), *flags, "-x", language, "-c", str(source), "-o", str(target)])


# The cases that need CuTe are left out. So are, in observed builds, those that race on purpose, and TMA:
# what mbarriers order is not known there.
_NOT_OF_THE_ENGINE = {"host_policy_test.cpp"}
_NOT_OBSERVED = {
    *("memory_test.cpp", "errors_test.cpp", "schedule_test.cpp"),
    *("sm90_test.cpp", "sm90_rules_test.cpp", "sm90_cluster_test.cpp"),
}


def _engine_program(place: Path, precompiled: Path, *, observed: bool) -> Path:
    left_out = _NOT_OF_THE_ENGINE | (_NOT_OBSERVED if observed else set())
    sources = [path for path in sorted(SIMT_TESTS.glob("*_test.cpp")) if path.name not in left_out]
    unit, program = place / "simt_test.cpp", place / "simt_test"
    unit.write_text(_one_unit(SIMT_TESTS / "main.cpp", sources), encoding="utf-8")
    include = place / "include"
    _compile(unit, unit.with_suffix(".o"), include, SIMT_TESTS, observed=observed, precompiled=precompiled)
    _run([compiler(), "-pthread", str(unit.with_suffix(".o")), "-o", str(program)])
    return program


def _one_unit(main: Path, sources: list[Path]) -> str:
    """All files in one, each in a namespace of its own, so that the engine's headers are compiled once."""
    headers = {
        line
        for path in (main, *sources)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("#include")
    }
    spaces = (f'namespace of_{path.stem} {{\n#include "{path}"\n}}' for path in sources)
    return "\n".join((*sorted(headers), *spaces, f'#include "{main}"', ""))


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(result.stderr.strip() or f"{command[0]}: exit status {result.returncode}")
