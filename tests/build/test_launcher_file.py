"""The compiled launcher's file: what it exports and needs, and that every Python from 3.10 on can load it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sdpa_cutlass import __version__
from sdpa_cutlass.library.locate import LAUNCHER

from .conftest import REPOSITORY, load_script

_LOAD = """
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("sdpa_cutlass._launcher", sys.argv[1])
spec = importlib.util.spec_from_file_location(loader.name, sys.argv[1], loader=loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
assert module.CallTable().call(*[None] * 13) is None
print(module.version)
"""


@pytest.fixture(scope="module")
def launcher() -> Path:
    path = REPOSITORY / "build/lib" / LAUNCHER
    if not path.exists():
        pytest.skip("not built: it needs Python's headers")
    return path


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_only_the_modules_entry_is_exported(launcher: Path) -> None:
    exported = run("nm", "-D", "--defined-only", str(launcher)).split()[2::3]
    assert exported == ["PyInit__launcher"]


def test_it_needs_nothing_but_c_and_python(launcher: Path) -> None:
    dynamic = run("readelf", "-d", str(launcher))
    assert re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic) in ([], ["libc.so.6"])
    assert "PATH" not in dynamic
    assert str(REPOSITORY).encode() not in launcher.read_bytes()


@pytest.mark.parametrize(
    "python", load_script("packaging/check_wheel.py").pythons(), ids=lambda path: Path(path).name
)
def test_every_python_loads_it(python: str, launcher: Path) -> None:
    assert run(python, "-I", "-c", _LOAD, str(launcher)).strip() == __version__
