"""The wheel: its platform tag, its bill of materials, its notices.

On wheels made up here and the built libraries; packaging/check_wheel.py installs and uses a real one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sdpa_cutlass import __version__
from sdpa_cutlass.library.locate import HASHES, LAUNCHER, Target

from .conftest import LIBRARIES, REPOSITORY, built, load_script


@pytest.fixture(scope="module")
def backend() -> ModuleType:
    pytest.importorskip("scikit_build_core")
    return load_script("packaging/wheel_backend.py")


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    return load_script("packaging/sbom.py")


def test_the_backend_has_every_hook(backend: ModuleType) -> None:
    for hook in ("build_wheel", "build_sdist", "build_editable", "get_requires_for_build_wheel"):
        assert callable(getattr(backend, hook)), hook
    settings = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    for line in ('build-backend = "wheel_backend"', 'backend-path = ["packaging"]', 'wheel.py-api = "py3"'):
        assert f"\n{line}" in settings, line


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (b"\0GLIBC_2.2.5\0GLIBC_2.14\0", "manylinux_2_17_x86_64"),
        (b"\0GLIBC_2.17\0GLIBCXX_3.4.20\0", "manylinux_2_24_x86_64"),  # libstdc++ decides
        (b"\0GLIBC_2.34\0GLIBCXX_3.4.22\0CXXABI_1.3.11\0", "manylinux_2_34_x86_64"),
        (b"\0GLIBC_2.28\0CXXABI_1.3.13\0", "manylinux_2_34_x86_64"),
        (b"\0GLIBC_2.99\0", None),
        (b"\0GLIBC_2.17\0GLIBCXX_3.4.99\0", None),
        (b"musl", None),
    ],
)
def test_the_tag_follows_from_the_symbols(backend: ModuleType, symbols: bytes, tag: str | None) -> None:
    assert backend.manylinux([b"\0GLIBC_2.2.5\0" if tag else b"", symbols], "x86_64") == tag


def test_the_tag_of_the_built_libraries(backend: ModuleType) -> None:
    contents = [built(path, "make cuda host").read_bytes() for path in LIBRARIES.values()]
    needed = backend.needed_versions(contents)
    assert needed[0] >= 17
    assert backend.manylinux(contents, "x86_64") is not None


def row(name: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


def make_wheel(folder: Path, library: bytes, platform: str = "linux_x86_64") -> Path:
    files = {
        "sdpa_cutlass/libx.so": library,
        "sdpa_cutlass-1.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: py3-none-{platform}\n".encode(),
    }
    record = "sdpa_cutlass-1.dist-info/RECORD"
    text = "\n".join([*(row(name, content) for name, content in files.items()), f"{record},,"]) + "\n"
    path = folder / f"sdpa_cutlass-1-py3-none-{platform}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in {**files, record: text.encode()}.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o755 if name.endswith(".so") else 0o644) << 16
            wheel.writestr(info, content)
    return path


def test_a_wheel_gets_its_tag_in_name_wheel_and_record(backend: ModuleType, tmp_path: Path) -> None:
    before = make_wheel(tmp_path, b"ELF\0GLIBC_2.27\0")
    after = backend.retag(before)
    assert after.name == "sdpa_cutlass-1-py3-none-manylinux_2_27_x86_64.whl"
    assert list(tmp_path.iterdir()) == [after]
    with zipfile.ZipFile(after) as wheel:
        tag = wheel.read("sdpa_cutlass-1.dist-info/WHEEL")
        assert tag == b"Wheel-Version: 1.0\nTag: py3-none-manylinux_2_27_x86_64\n"
        record = wheel.read("sdpa_cutlass-1.dist-info/RECORD").decode().splitlines()
        for name in wheel.namelist()[:2]:
            assert row(name, wheel.read(name)) in record
        assert wheel.getinfo("sdpa_cutlass/libx.so").external_attr >> 16 == 0o755


@pytest.mark.parametrize(
    ("library", "platform"), [(b"", "linux_x86_64"), (b"\0GLIBC_2.17\0", "macosx_11_0_arm64")]
)
def test_other_wheels_stay_as_they_are(
    backend: ModuleType, tmp_path: Path, library: bytes, platform: str
) -> None:
    before = make_wheel(tmp_path, library, platform)
    content = before.read_bytes()
    assert backend.retag(before) == before
    assert before.read_bytes() == content


def test_a_wheel_that_cannot_be_rewritten_is_left_alone(
    backend: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = make_wheel(tmp_path, b"\0GLIBC_2.17\0")

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(backend, "_rewrite", fail)
    with pytest.raises(OSError, match="no space"):
        backend.retag(before)
    assert list(tmp_path.iterdir()) == [before]


def make_headers(folder: Path) -> Path:
    (folder / "cccl/cuda/std/__cccl").mkdir(parents=True)
    (folder / "cuda_runtime_api.h").write_text("#define CUDART_VERSION  13000\n")
    (folder / "cccl/cuda/std/__cccl/version.h").write_text("#define CCCL_VERSION 3000001\n")
    return folder


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stands in for the compiled launcher: it is only hashed."""
    path = tmp_path_factory.mktemp("extension") / LAUNCHER
    path.write_bytes(b"an extension module")
    return path


@pytest.fixture(scope="module")
def bill(sbom: ModuleType, extension: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    headers = make_headers(tmp_path_factory.mktemp("headers"))
    libraries = [built(path, "make cuda host") for path in LIBRARIES.values()]
    content: dict[str, Any] = sbom.bill(libraries, headers, [extension])
    return content


def test_the_bill_names_everything_with_version_and_licence(bill: dict[str, Any]) -> None:
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert bill["metadata"]["component"]["version"] == __version__
    parts = {part["name"]: part for part in bill["components"]}
    assert {name: part.get("version") for name, part in parts.items()} == {
        "libsdpa_cutlass.so": __version__,
        "libsdpa_cutlass_host.so": __version__,
        LAUNCHER: __version__,
        "CUTLASS": "4.2.0",
        "CUDA Toolkit headers": "13.0",
        "CUDA runtime": "13.0",
        "CCCL": "3.0.1",
        "minilm_qkv.safetensors": None,
    }
    assert parts["CUTLASS"]["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    assert "EULA" in parts["CUDA runtime"]["licenses"][0]["license"]["name"]
    assert all(part["licenses"] for part in parts.values())


def test_the_bill_has_the_libraries_hashes_and_what_each_holds(bill: dict[str, Any]) -> None:
    parts = {part["bom-ref"]: part for part in bill["components"]}
    for target, path in LIBRARIES.items():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert parts[path.name]["hashes"] == [{"alg": "SHA-256", "content": digest}]
        facts = {entry["name"]: entry["value"] for entry in parts[path.name]["properties"]}
        assert facts["sdpa_cutlass:target"] == target
        assert len(facts["sdpa_cutlass:digest"]) == 64
    digest = hashlib.sha256(b"an extension module").hexdigest()
    assert parts[LAUNCHER]["hashes"] == [{"alg": "SHA-256", "content": digest}]
    holds = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert LAUNCHER in holds["sdpa_cutlass"]
    assert LAUNCHER not in holds  # its own code only
    assert all(ref in parts for refs in holds.values() for ref in refs)
    assert "CUDA runtime@13.0" in holds["libsdpa_cutlass.so"]
    assert "CUDA runtime@13.0" not in holds["libsdpa_cutlass_host.so"]  # it is not linked there
    assert "CUTLASS@4.2.0" in holds["libsdpa_cutlass_host.so"]


def test_the_cuda_runtime_is_linked_statically() -> None:
    """What the bill says, the build does."""
    assert "CUDA_RUNTIME_LIBRARY Static" in (REPOSITORY / "cmake/cuda/CMakeLists.txt").read_text(
        encoding="utf-8"
    )


def test_the_script_writes_three_files(
    sbom: ModuleType, extension: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, cutlass = make_headers(tmp_path / "include"), tmp_path / "cutlass"
    cutlass.mkdir()
    library = built(LIBRARIES["host"], "make host")
    out = tmp_path / "out"
    out.mkdir()
    options = ["--library", str(library), "--cutlass", str(cutlass), "--cuda-include", str(headers)]
    with pytest.raises(FileNotFoundError, match="no licence of CUTLASS"):
        sbom.main([*options, "--out", str(out / "bill.json")])
    assert list(out.iterdir()) == []
    (cutlass / "LICENSE.txt").write_text("Redistribution and use")
    assert sbom.main([*options, "--out", str(out / "bill.json")]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["CUTLASS.txt", "bill.json", HASHES]
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    assert json.loads((out / HASHES).read_text()) == {Target.HOST.file_name: digest}
    sbom.main([*options, "--module", str(extension), "--out", str(out / "bill.json")])
    assert json.loads((out / HASHES).read_text()) == {
        Target.HOST.file_name: digest,
        LAUNCHER: hashlib.sha256(b"an extension module").hexdigest(),
    }
    sbom.main([*options, "--out", str(out / "bill.json")])
    first = (out / "bill.json").read_bytes()
    assert str(tmp_path).encode() not in first
    sbom.main([*options, "--out", str(out / "bill.json")])
    assert (out / "bill.json").read_bytes() == first  # the same build gives the same bytes


def test_the_licence_of_the_installed_cutlass(sbom: ModuleType) -> None:
    package = pytest.importorskip("importlib.util").find_spec("cutlass_library")
    if package is None:
        pytest.skip("nvidia-cutlass is not installed")
    notice = sbom.cutlass_notice(Path(package.submodule_search_locations[0]) / "source")
    assert "NVIDIA CORPORATION" in notice
    assert "Redistribution and use in source and binary forms" in notice


def test_versions_in_words(sbom: ModuleType, tmp_path: Path) -> None:
    assert (sbom.cutlass_version(420), sbom.cutlass_version(451)) == ("4.2.0", "4.5.1")
    assert (sbom.cuda_version(13000), sbom.cuda_version(12040)) == ("13.0", "12.4")
    header = tmp_path / "x.h"
    header.write_text("// nothing\n")
    with pytest.raises(ValueError, match="does not define CCCL_VERSION"):
        sbom.defined_number(header, "CCCL_VERSION")
