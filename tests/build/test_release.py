"""packaging/check_release.py: a wheel as it should be passes, and each defect is named."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
INFO = "sdpa_cutlass-0.1.0.dist-info"
LIBRARY = b"\x7fELF library"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_release", ROOT / "packaging" / "check_release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def good() -> dict[str, bytes]:
    """The files of a wheel, RECORD left out."""
    digest = hashlib.sha256(LIBRARY).hexdigest()
    part = {
        "type": "file",
        "name": "libx.so",
        "hashes": [{"alg": "SHA-256", "content": digest}],
        "licenses": [{}],
    }
    metadata = (
        "Metadata-Version: 2.4\nName: sdpa_cutlass\nVersion: 0.1.0\nRequires-Python: >=3.10\n"
        "License-Expression: BSD-3-Clause\nDescription-Content-Type: text/markdown\n\n" + "# Text\n" * 400
    )
    return {
        "sdpa_cutlass/__init__.py": b"",
        "sdpa_cutlass/py.typed": b"",
        "sdpa_cutlass/libx.so": LIBRARY,
        "sdpa_cutlass/libraries.json": json.dumps({"libx.so": digest}).encode(),
        f"{INFO}/METADATA": metadata.encode(),
        f"{INFO}/licenses/LICENSE": b"BSD 3-Clause License",
        f"{INFO}/licenses/CUTLASS.txt": b"Copyright NVIDIA",
        f"{INFO}/sboms/sdpa_cutlass.cdx.json": json.dumps({"components": [part]}).encode(),
    }


def wheel_of(
    release: ModuleType, folder: Path, files: dict[str, bytes], record: dict[str, bytes] | None = None
) -> Any:
    """A wheel of these files, with a RECORD of `record` (default: of what is there)."""
    path = folder / "sdpa_cutlass-0.1.0-py3-none-manylinux_2_27_x86_64.whl"
    lines = []
    for name, data in (record or files).items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{INFO}/RECORD": "\n".join(lines).encode()}.items():
            archive.writestr(name, data)
    return release.Wheel(path)


def test_the_version_is_the_packages(release: ModuleType) -> None:
    import sdpa_cutlass

    assert release.version_of_source() == sdpa_cutlass.__version__


def test_a_good_wheel_passes(release: ModuleType, tmp_path: Path) -> None:
    wheel = wheel_of(release, tmp_path, good())
    for name in ("size", "metadata", "licence notices", "bill of materials", "contents"):
        assert release.CHECKS[name](wheel) == []


def without(name: str) -> Callable[[dict[str, bytes]], None]:
    return lambda files: files.__delitem__(name)


def replaced(name: str, old: bytes, new: bytes) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        assert old in files[name]
        files[name] = files[name].replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "check", "text"),
    [
        (
            replaced(f"{INFO}/METADATA", b"Version: 0.1.0", b"Version: 0.2.0"),
            "metadata",
            "Version is '0.2.0'",
        ),
        (replaced(f"{INFO}/METADATA", b"BSD-3-Clause", b"MIT"), "metadata", "License-Expression is 'MIT'"),
        (replaced(f"{INFO}/METADATA", b"# Text\n" * 400, b""), "metadata", "no description"),
        (without(f"{INFO}/licenses/CUTLASS.txt"), "licence notices", "CUTLASS.txt is missing"),
        (without(f"{INFO}/licenses/LICENSE"), "licence notices", "LICENSE is missing"),
        (
            replaced("sdpa_cutlass/libx.so", b"library", b"another"),
            "bill of materials",
            "the bill of materials has",
        ),
        (without("sdpa_cutlass/libraries.json"), "bill of materials", "libraries.json has {}"),
        (without("sdpa_cutlass/libx.so"), "bill of materials", "no native library"),
        (without("sdpa_cutlass/py.typed"), "contents", "no sdpa_cutlass/py.typed"),
        (lambda files: files.update({"tests/x.py": b""}), "contents", "tests/x.py has no business"),
        (lambda files: files.update({"sdpa_cutlass/native/a.c": b""}), "contents", "has no business"),
    ],
)
def test_each_defect_is_named(
    release: ModuleType,
    tmp_path: Path,
    change: Callable[[dict[str, bytes]], None],
    check: str,
    text: str,
) -> None:
    files = good()
    change(files)
    assert text in "\n".join(release.CHECKS[check](wheel_of(release, tmp_path, files)))


def test_a_file_that_record_does_not_have_as_it_is(release: ModuleType, tmp_path: Path) -> None:
    files = good()
    wheel = wheel_of(release, tmp_path, {**files, "sdpa_cutlass/__init__.py": b"# changed"}, files)
    assert release.check_contents(wheel) == ["RECORD does not have sdpa_cutlass/__init__.py as it is"]


def test_too_large(release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "MOST_BYTES", 10)
    assert "at most 10" in release.check_size(wheel_of(release, tmp_path, good()))[0]


def test_the_changelog_needs_a_dated_section(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = wheel_of(release, tmp_path, good())
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "version_of_source", lambda: "0.1.0")
    for text, expected in (
        ("## [Unreleased]\n", ["CHANGELOG.md has no dated section [0.1.0]"]),
        ("## [0.1.0] - 2026-11-24\n", []),
    ):
        (tmp_path / "CHANGELOG.md").write_text(text)
        assert release.check_changelog(wheel) == expected


def test_what_is_no_wheel(release: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.whl").write_bytes(b"nothing")
    with pytest.raises(SystemExit) as ended:
        release.main([str(tmp_path / "x.whl")])
    assert ended.value.code == 2
    assert "x.whl" in capsys.readouterr().err
