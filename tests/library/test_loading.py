"""Finding, trusting and loading the native library; every way in which it can be the wrong one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import sdpa_cutlass
from sdpa_cutlass.errors import (
    ArgumentError,
    HostCheckError,
    LibraryError,
    LibraryMismatchError,
    LibraryNotFoundError,
    UnsupportedError,
)
from sdpa_cutlass.library import abi, locate, structs
from sdpa_cutlass.library.locate import Target

ROOT = Path(__file__).parents[2]
Build = Callable[..., Path]


@pytest.fixture
def build_fake(tmp_path: Path) -> Build:
    """Compiles the fake library with the given macros."""

    def build(**macros: str) -> Path:
        path = tmp_path / "libfake.so"
        macros = {"FAKE_VERSION": f'"{sdpa_cutlass.__version__}"', **macros}
        flags = [f"-D{name}={value}" for name, value in macros.items()]
        source = Path(__file__).with_name("fake_library.cpp")
        include = ROOT / "templates" / "include"
        subprocess.run(["g++", "-shared", "-fPIC", f"-I{include}", *flags, source, "-o", path], check=True)
        path.chmod(0o755)
        return path

    return build


def test_a_fitting_library_loads(build_fake: Build) -> None:
    library = abi.load(build_fake(), Target.HOST)
    assert library.build.version == sdpa_cutlass.__version__
    assert library.build.target is Target.HOST
    assert library.build.cutlass_version == 420
    assert library.kernel_count() == 0


def test_statuses_become_errors(build_fake: Build) -> None:
    library = abi.load(build_fake(), Target.HOST)
    with pytest.raises(ArgumentError, match="the fake's reason"):
        library.kernel_info(0)
    with pytest.raises(UnsupportedError, match="the fake's reason"):
        library.occupancy(0, 0)
    with pytest.raises(HostCheckError, match="the fake's reason"):
        library.host_configure()
    assert library.refusal(0, structs.Params()) == "the fake's reason"


@pytest.mark.parametrize(
    ("macros", "message"),
    [
        ({"FAKE_ABI_VERSION": "999"}, "ABI version 999"),
        ({"FAKE_PARAMS_SIZE": "8"}, "sdpa_params has 8 bytes"),
        ({"FAKE_TARGET": "SDPA_BUILT_FOR_CUDA"}, "built for cuda, not for host"),
        ({"FAKE_VERSION": '"0.0.7"'}, "version '0.0.7'"),
        ({"FAKE_REFUSES": "1"}, "refused the handshake: the fake's reason"),
        ({"FAKE_LACKS_LAUNCH": "1"}, "no function sdpa_launch"),
    ],
)
def test_a_library_that_does_not_fit_is_refused(
    build_fake: Build, macros: dict[str, str], message: str
) -> None:
    path = build_fake(**macros)
    with pytest.raises(LibraryMismatchError, match=message) as caught:
        abi.load(path, Target.HOST)
    assert str(path) in str(caught.value)
    assert "make host" in str(caught.value)


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libfake.so"
    path.write_text("not a library")
    with pytest.raises(LibraryError, match="cannot be loaded"):
        abi.load(path, Target.HOST)


def test_a_missing_library_lists_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SDPA_CUTLASS_LIBRARY", raising=False)
    package = tmp_path / "checkout" / "sdpa_cutlass"
    package.mkdir(parents=True)
    (package.parent / "CMakeLists.txt").touch()
    monkeypatch.setattr(locate, "__file__", str(package / "library" / "locate.py"))
    with pytest.raises(LibraryNotFoundError) as caught:
        locate.locate(Target.CUDA)
    message = str(caught.value)
    assert str(package / "libsdpa_cutlass.so") in message
    assert str(package.parent / "build" / "lib" / "libsdpa_cutlass.so") in message
    assert "SDPA_CUTLASS_LIBRARY is not set" in message
    assert "make cuda" in message


def test_an_installed_package_looks_only_into_its_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SDPA_CUTLASS_LIBRARY", raising=False)
    monkeypatch.setattr(locate, "__file__", str(tmp_path / "sdpa_cutlass" / "library" / "locate.py"))
    assert locate.candidates(Target.CUDA) == [tmp_path / "sdpa_cutlass" / "libsdpa_cutlass.so"]


def test_the_package_folder_comes_before_the_build_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SDPA_CUTLASS_HOST_LIBRARY", raising=False)
    (tmp_path / "CMakeLists.txt").touch()
    monkeypatch.setattr(locate, "__file__", str(tmp_path / "sdpa_cutlass" / "library" / "locate.py"))
    for folder in (tmp_path / "sdpa_cutlass", tmp_path / "build" / "lib"):
        folder.mkdir(parents=True, mode=0o755)
        (folder / Target.HOST.file_name).touch(mode=0o644)
    assert locate.locate(Target.HOST).parent == tmp_path / "sdpa_cutlass"


def test_the_environment_variable_stands_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong path is an error, not a reason to take another library."""
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(tmp_path / "absent.so"))
    with pytest.raises(LibraryNotFoundError, match=r"absent\.so: not there"):
        locate.locate(Target.HOST)
    present = tmp_path / "present.so"
    present.touch(mode=0o644)
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(present))
    assert locate.locate(Target.HOST) == present.resolve()


def test_a_relative_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libx.so").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", "libx.so")
    with pytest.raises(LibraryNotFoundError, match="absolute path"):
        locate.locate(Target.HOST)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The library of an installed package, listed in libraries.json."""
    monkeypatch.delenv("SDPA_CUTLASS_HOST_LIBRARY", raising=False)
    package = tmp_path / "sdpa_cutlass"
    package.mkdir(mode=0o755)
    monkeypatch.setattr(locate, "__file__", str(package / "library" / "locate.py"))
    library = package / Target.HOST.file_name
    library.write_bytes(b"the library")
    library.chmod(0o644)
    digest = hashlib.sha256(b"the library").hexdigest()
    (package / locate.HASHES).write_text(json.dumps({library.name: digest}))
    return library


def test_an_installed_library_is_the_one_that_was_built(installed: Path) -> None:
    assert locate.locate(Target.HOST) == installed


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (None, "of another build"),  # another file under the same list
        ("{}", "says None"),
        ("[]", "says None"),
        ("half a fi", "cannot be read"),
        ("absent", "No such file"),
    ],
)
def test_a_library_of_another_build_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, installed: Path, listed: str | None, message: str
) -> None:
    if listed is None:
        installed.write_bytes(b"another one")
    elif listed == "absent":
        installed.with_name(locate.HASHES).unlink()
    else:
        installed.with_name(locate.HASHES).write_text(listed)
    with pytest.raises(LibraryMismatchError, match=message):
        locate.locate(Target.HOST)
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(installed))  # asked for by name
    assert locate.locate(Target.HOST) == installed


def test_a_link_in_an_installed_package_leads_to_the_library_that_was_built(
    installed: Path, tmp_path: Path
) -> None:
    """Package managers link files of a cache, under names of its own."""
    cached = tmp_path / "cached"
    installed.rename(cached)
    installed.symlink_to(cached)
    assert locate.locate(Target.HOST) == cached
    cached.write_bytes(b"another one")
    with pytest.raises(LibraryMismatchError, match="of another build"):
        locate.locate(Target.HOST)


def test_a_checkout_needs_no_list_and_obeys_one(installed: Path) -> None:
    (installed.parents[1] / "CMakeLists.txt").touch()
    installed.write_bytes(b"built again")
    with pytest.raises(LibraryMismatchError, match="of another build"):
        locate.locate(Target.HOST)
    installed.with_name(locate.HASHES).unlink()
    assert locate.locate(Target.HOST) == installed


def test_threads_share_one_library(monkeypatch: pytest.MonkeyPatch, build_fake: Build) -> None:
    monkeypatch.setenv("SDPA_CUTLASS_HOST_LIBRARY", str(build_fake()))
    monkeypatch.setattr(abi, "_loaded", {})
    found = []
    threads = [threading.Thread(target=lambda: found.append(abi.library(Target.HOST))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_import_needs_neither_torch_nor_a_library() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import sdpa_cutlass; from sdpa_cutlass.library import abi\n"
        "assert not abi._loaded and 'cuda' not in sys.modules and 'numpy' not in sys.modules\n"
        "try: sdpa_cutlass.attention(1, 2, 3)\n"
        "except TypeError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("query is a int; allowed is a torch.Tensor")
