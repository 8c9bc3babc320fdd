"""What CMake sets up for other CPUs and other Pythons: flags, and whether there is a compiled launcher."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from generator.families import FAMILIES
from tests.build.conftest import REPOSITORY

LAUNCHER = "launcher.c"


class Configured:
    """A configured build of one kernel for the host: CMake's words, and each source's options."""

    def __init__(self, folder: Path, *options: str, python: str = sys.executable) -> None:
        cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        assert cmake is not None
        command = [
            cmake, "-S", REPOSITORY, "-B", folder, "-DSDPA_TARGET=host", f"-DPython_EXECUTABLE={python}",
            "-DSDPA_FILTER=fmha_fwd_sm89_d64_m64n64_s1_w4_f16", f"-DSDPA_LIBRARY_DIR={folder}/lib", *options,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        self.said = done.stdout.splitlines()
        commands = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
        self.options = {Path(entry["file"]).name: shlex.split(entry["command"]) for entry in commands}

    def machine_options(self) -> set[str]:
        """The -m options of the host library, the same for each of its sources."""
        found = [
            frozenset(option for option in options if re.match(r"-m(?!acro)", option))
            for name, options in self.options.items()
            if not name.endswith(".c")
        ]
        assert len(found) >= 4
        assert len(set(found)) == 1
        return set(found[0])


AARCH64 = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64")
X86_64 = ("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=x86_64")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (X86_64, {"-mavx2", "-mfma", "-mf16c"}),
        ((*X86_64, "-DSDPA_HOST_MARCH="), set()),
        ((*X86_64, "-DSDPA_HOST_MARCH=native"), {"-march=native"}),
        (AARCH64, set()),
        ((*AARCH64, "-DSDPA_HOST_MARCH=armv9-a"), {"-march=armv9-a"}),
    ],
    ids=["x86-64", "x86-64 plain", "x86-64 native", "aarch64", "aarch64 armv9-a"],
)
def test_each_kind_of_cpu_has_its_options(
    options: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    configured = Configured(tmp_path / "build", *options)
    assert configured.machine_options() == expected
    assert "cpu_features.cpp" in configured.options


def test_every_unit_is_in_one_source_of_the_host_library(tmp_path: Path) -> None:
    globs = "fmha_fwd_*_f16,unfused_*_f16,combine_*"
    configured = Configured(tmp_path / "build", f"-DSDPA_FILTER={globs}")
    folder = tmp_path / "build/cmake/host/units"
    written = {source.name: source.stat().st_mtime_ns for source in folder.iterdir()}
    Configured(tmp_path / "build", f"-DSDPA_FILTER={globs}")  # must not have them compiled again
    assert written == {source.name: source.stat().st_mtime_ns for source in folder.iterdir()}
    units = {Path(config.unit).name for config in FAMILIES.build("release").filtered(globs).kernels}
    sources = [
        re.findall(r'#include "units/(.+)"', source.read_text(encoding="utf-8"))
        for source in folder.iterdir()
        if source.name in configured.options
    ]
    assert sorted(unit for included in sources for unit in included) == sorted(units)
    for included in sources:
        assert len({re.sub(r"_m\d.*", "", unit) for unit in included}) == 1
    assert len(sources) < len(units) / 2


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
def test_more_gpus_get_machine_code_from_the_same_ptx(tmp_path: Path) -> None:
    folder = tmp_path / "build"
    configured = Configured(folder, "-DSDPA_TARGET=cuda", "-DSDPA_SASS_ARCHS=90;120")
    options = configured.options["fmha_fwd_sm89_d64_m64n64_s1_w4.cu"]
    code = [option for option in options if "generate-code" in option]
    assert [option.partition("code=")[2] for option in code] == [
        "arch=compute_89,code=[compute_89,sm_89]",
        "arch=compute_89,code=[sm_90]",
        "arch=compute_89,code=[sm_120]",
    ]
    (header,) = folder.glob("cmake/cuda/build_config.hpp")
    assert '"89;90-real;120-real"' in header.read_text()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
@pytest.mark.parametrize(("archs", "said"), [("86", "newer GPUs only"), ("90a", "allowed are numbers")])
def test_ptx_of_89_is_no_code_for_older_gpus(archs: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=said):
        Configured(tmp_path / "build", "-DSDPA_TARGET=cuda", f"-DSDPA_SASS_ARCHS={archs}")


@pytest.fixture
def python(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """This Python, after the line of Python that the parameter is."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys, sysconfig\n{request.param}\n")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    return str(fake)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("", None),
        ("sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1", "free-threaded Python has no stable ABI"),
        ("sys.implementation.name = 'pypy'", "pypy has no stable ABI"),
        ("sysconfig.get_path = lambda name, *rest: '/nowhere'", "/nowhere/Python.h"),
    ],
    ids=["CPython", "free-threaded", "PyPy", "no headers"],
    indirect=["python"],
)
def test_a_python_without_a_stable_abi_gets_no_launcher(
    python: str, said: str | None, tmp_path: Path
) -> None:
    configured = Configured(tmp_path / "build", python=python)
    lines = [line for line in configured.said if "No compiled launcher" in line]
    if said is None:
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            pytest.skip("this Python has no headers")
        assert lines == []
        assert LAUNCHER in configured.options
    else:
        assert len(lines) == 1
        assert said in lines[0]
        assert LAUNCHER not in configured.options


def test_the_launcher_can_be_left_out(tmp_path: Path) -> None:
    assert LAUNCHER not in Configured(tmp_path / "build", "-DSDPA_LAUNCHER=OFF").options
