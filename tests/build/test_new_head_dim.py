"""A new head_dim is one line of generator/families/fmha_fwd/tiles.py: nothing else knows which ones exist.

The test adds head_dim 112 to a copy of the repository, builds its host library and runs the numerics of
tests/kernels on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.build.conftest import REPOSITORY

LINE = '    112: tiles("m64n64_s1_w4"),\n'
AFTER = "PLAIN_TILES: dict[int, tuple[FmhaTile, ...]] = {\n"


def _run(*command: str | Path, cwd: Path, **environment: str) -> None:
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, f"{command[0]}: {finished.stdout[-2000:]}{finished.stderr[-2000:]}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host library of a checkout whose tiles.py has one more line, with its two fp16 kernels."""
    checkout = tmp_path_factory.mktemp("checkout")
    for name in ("CMakeLists.txt", "cmake", "templates"):
        (checkout / name).symlink_to(REPOSITORY / name)
    (checkout / "sdpa_cutlass").mkdir()
    shutil.copy(REPOSITORY / "sdpa_cutlass/__init__.py", checkout / "sdpa_cutlass")
    (checkout / "sdpa_cutlass/native").symlink_to(REPOSITORY / "sdpa_cutlass/native")
    shutil.copytree(REPOSITORY / "generator", checkout / "generator")
    tiles = checkout / "generator/families/fmha_fwd/tiles.py"
    text = tiles.read_text(encoding="utf-8")
    assert text.count(AFTER) == 1
    tiles.write_text(text.replace(AFTER, AFTER + LINE), encoding="utf-8")

    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert cmake is not None
    build = checkout / "build/host"
    _run(
        cmake, "-S", ".", "-B", build, "-DCMAKE_BUILD_TYPE=Release", "-DSDPA_TARGET=host",
        "-DSDPA_FILTER=fmha_fwd_*_d112_*_f16*", f"-DPython_EXECUTABLE={sys.executable}", cwd=checkout,
    )  # fmt: skip
    _run(cmake, "--build", build, cwd=checkout)
    return checkout / "build/lib/libsdpa_cutlass_host.so"


def test_head_dim_112_is_one_line(library: Path) -> None:
    report = library.with_suffix(".xml")
    _run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--device", "cpu",
        f"--junit-xml={report}", "tests/kernels/test_fused.py",
        cwd=REPOSITORY,
        SDPA_CUTLASS_HOST_LIBRARY=str(library),
    )  # fmt: skip
    for kernel in ("fmha_fwd_sm89_d112_m64n64_s1_w4_f16", "fmha_fwd_sm89_d112_m64n64_s1_w4_f16_causal"):
        assert f"[{kernel}@cpu" in report.read_text(encoding="utf-8")
