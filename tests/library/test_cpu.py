"""A host library that was compiled for another CPU is refused by name, before any of its code runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sdpa_cutlass import LibraryError
from sdpa_cutlass.library import abi, cpu_features
from sdpa_cutlass.library.locate import Target

ROOT = Path(__file__).parents[2]
FEATURES = ROOT / "cmake" / "host" / "cpu_features.cpp"
X86 = pytest.mark.skipif(
    "flags" not in cpu_features.CPU_INFO.read_text(), reason="flags and -m options of x86-64"
)

DIES = """
__attribute__((constructor)) static void die() { __builtin_trap(); }
"""
"""As a library does whose first instruction the CPU does not know."""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library for CPUs with AVX2, FMA and F16C, whose loading ends the process."""
    source, path = tmp_path / "dies.cpp", tmp_path / "libdies.so"
    source.write_text(DIES)
    flags = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-mavx2", "-mfma", "-mf16c"]
    subprocess.run(["g++", *flags, source, FEATURES, "-Wl,--strip-all", "-o", path], check=True)
    return path


def cpu_with(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    monkeypatch.setattr(cpu_features, "CPU_INFO", folder / "cpuinfo")
    (folder / "cpuinfo").write_text(text)


@X86
def test_a_cpu_that_lacks_what_the_library_needs(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    has = "pni ssse3 sse4_1 sse4_2 popcnt avx"
    cpu_with(monkeypatch, tmp_path, f"processor\t: 0\nflags\t\t: fpu {has}\nbugs\t\t: avx2\n")
    with pytest.raises(LibraryError, match=r"libdies\.so is .*with avx2, f16c, fma, which") as caught:
        abi.load(library, Target.HOST)
    assert "-DSDPA_HOST_MARCH=native" in str(caught.value)


@X86
@pytest.mark.parametrize(
    "text", ["flags : fpu pni ssse3 sse4_1 sse4_2 popcnt avx avx2 fma f16c\n", "Features : fp asimd\n", ""]
)
def test_a_cpu_that_has_it_all_or_does_not_say(
    text: str, library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpu_with(monkeypatch, tmp_path, text)
    assert cpu_features.needed_features(library) >= {"avx2", "fma", "f16c"}
    cpu_features.check(library)
    cpu_features.CPU_INFO.unlink()
    cpu_features.check(library)


@X86
def test_the_compilers_flags_are_what_is_asked_for(tmp_path: Path) -> None:
    def needed(*flags: str) -> frozenset[str]:
        subprocess.run(["g++", "-c", *flags, FEATURES, "-o", tmp_path / "it.o"], check=True)
        return cpu_features.needed_features(tmp_path / "it.o")

    assert needed() == frozenset()
    assert needed("-mavx2") < needed("-mavx2", "-mfma", "-mf16c") < needed("-march=skylake-avx512")
    assert needed("-march=native") <= cpu_features._known_features()


def test_a_library_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LibraryError, match=r"absent\.so cannot be loaded: .*No such file"):
        abi.load(tmp_path / "absent.so", Target.HOST)
