"""The same sources give the same bytes: a small unit with g++ twice, and the script for whole libraries.

`python packaging/check_reproducible.py` builds whole libraries twice, for the CPU or for GPUs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from .conftest import REPOSITORY, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("packaging/check_reproducible.py")


def test_what_differs_is_named(script: ModuleType) -> None:
    first = {"a.o": "1", "b.o": "2", "lib.so": "3"}
    assert script.differences(first, dict(first)) == []
    assert script.differences(first, {"a.o": "1", "lib.so": "4", "c.o": "5"}) == [
        "only in the first build: b.o",
        "only in the second build: c.o",
        "differs: lib.so",
    ]


def played(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *contents: bytes) -> list[list[str]]:
    """Has every build write one library; returns the command lines."""
    commands: list[list[str]] = []
    left = list(contents)

    def run(command: list[str], **_: object) -> None:
        commands.append(command)
        if "--build" in command:
            folder = Path(command[2])
            assert not folder.exists()  # it starts empty
            (folder / "lib").mkdir(parents=True)
            (folder / "lib" / "libx.so").write_bytes(left.pop(0))

    monkeypatch.setattr(script.subprocess, "run", run)
    return commands


@pytest.mark.parametrize(("second", "status"), [(b"one", 0), (b"two", 1)])
def test_two_builds_are_compared(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, second: bytes, status: int
) -> None:
    commands = played(script, monkeypatch, b"one", second)
    assert script.main(["--target", "host"]) == status
    assert len(commands) == 4
    assert commands[0][:6] == commands[2][:6]  # the same path
    assert "-DSDPA_TARGET=host" in commands[0]


def test_a_build_without_a_library_is_no_success(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "build", lambda *_: {"x.o": "1"})
    assert script.main([]) == 1


def test_the_flags_that_make_objects_reproducible_are_set() -> None:
    """What g++ and nvcc would otherwise draw at random or take from the machine."""
    settings = (REPOSITORY / "cmake/common_settings.cmake").read_text(encoding="utf-8")
    assert "-frandom-seed=" in settings
    assert "-ffile-prefix-map=" in settings
    assert "--build-id=sha1" in settings  # of the content
    for path in sorted((REPOSITORY / "templates").rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert "__DATE__" not in text, path
            assert "__TIME__" not in text, path


def test_the_same_file_twice_gives_the_same_object(tmp_path: Path) -> None:
    """The C ABI's file as the host build compiles it, with other surroundings the second time."""
    source = REPOSITORY / "tests/library/fake_library.cpp"
    objects = []
    for name, zone in (("one", "UTC"), ("two", "Pacific/Auckland")):
        target = tmp_path / f"{name}.o"
        command = [
            "g++", "-std=c++17", "-O2", "-fPIC", "-c", f"-I{REPOSITORY / 'templates/include'}",
            '-DFAKE_VERSION="1"', f"-ffile-prefix-map={REPOSITORY}/=", "-frandom-seed=fake_library.cpp",
            str(source), "-o", str(target),
        ]  # fmt: skip
        subprocess.run(command, check=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin", "TZ": zone})
        objects.append(target.read_bytes())
    assert objects[0] == objects[1]
    assert str(REPOSITORY).encode() not in objects[0]
