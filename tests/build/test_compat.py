"""`make compat` itself: every release is tried, and one that fails or cannot be installed is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import compat


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, list[str]]]:
    """What ran: 2.0 has failing tests, 9.9 does not exist."""
    found: list[tuple[str, list[str]]] = []

    def install(version: str) -> Path:
        if version == "9.9":
            raise subprocess.CalledProcessError(1, "pip")
        (tmp_path / f"torch-{version}").mkdir(exist_ok=True)
        return Path(version)

    def run_tests(python: Path, arguments: list[str]) -> str:
        found.append((python.name, arguments))
        return "FAILED: 1 failed" if python.name == "2.0" else "passed: 3 passed"

    monkeypatch.setattr(compat, "FOLDER", tmp_path)
    monkeypatch.setattr(compat, "install", install)
    monkeypatch.setattr(compat, "run_tests", run_tests)
    return found


def test_every_release_is_tried(
    tried: list[tuple[str, list[str]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compat.main(["2.0", "9.9", "newest", "--", "-k", "decoding"]) == 1
    assert tried == [("2.0", ["-k", "decoding"]), ("newest", ["-k", "decoding"])]
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "torch 2.0      FAILED: 1 failed",
        "torch 9.9      FAILED: it could not be installed: exit status 1",
        "torch newest   passed: 3 passed",
    ]
    assert (tmp_path / "torch-newest").exists()
    assert compat.main(["newest", "--discard"]) == 0
    assert not (tmp_path / "torch-newest").exists()


def test_what_is_left_out_is_there() -> None:
    for name in compat.COMPILED:
        path, _, function = name.partition("::")
        assert f"def {function}" in (compat.ROOT / path).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "result"), [("", "passed: 1 passed"), ("assert False", "FAILED: 1 failed")]
)
def test_the_result_is_pytests(
    source: str, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text(f"def test_one():\n    {source or 'pass'}\n")
    (tmp_path / "conftest.py").write_text("def pytest_addoption(parser): parser.addoption('--device')\n")
    monkeypatch.setattr(compat, "ROOT", tmp_path)
    monkeypatch.setattr(compat, "TESTS", ".")
    assert compat.run_tests(Path(sys.executable), ["-p", "no:xdist"]).startswith(result)
