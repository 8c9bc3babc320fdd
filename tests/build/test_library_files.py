"""What the two shared libraries export and need, and that their registry is the generator's manifest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from sdpa_cutlass.library.abi import Library, Target
from sdpa_cutlass.library.registry import Takes, read_kernels

from .conftest import manifest_of

REPOSITORY = Path(__file__).resolve().parents[2]
C_API = REPOSITORY / "templates/include/sdpa/c_api.h"
FIELDS = ("arch", "code", "head_dim", "smem_bytes", "ctas_per_sm")


def declared_functions() -> set[str]:
    """The functions that c_api.h marks as exported."""
    text = re.sub(r"/\*.*?\*/", "", C_API.read_text(encoding="utf-8"), flags=re.DOTALL)
    return set(re.findall(r"^SDPA_API [^(;]*?(\w+)\(", text, flags=re.MULTILINE))


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_exactly_the_c_api_is_exported(library: Library) -> None:
    exported = {
        line.split()[-1] for line in run("nm", "-D", "--defined-only", str(library.path)).splitlines()
    }
    assert len(declared_functions()) >= 10
    assert exported == declared_functions()


def test_only_system_libraries_are_needed(library: Library) -> None:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", str(library.path)))
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux[-\w]*)\.so\.\d+"
    assert needed
    assert [name for name in needed if not re.fullmatch(allowed, name)] == []


def test_no_search_path_is_baked_in(library: Library) -> None:
    dynamic = run("readelf", "-d", str(library.path))
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_no_build_path_is_baked_in(library: Library) -> None:
    assert str(REPOSITORY).encode() not in library.path.read_bytes()


def test_registry_is_the_manifest(library: Library) -> None:
    rows = {kernel.name: kernel for kernel in read_kernels(library)}
    manifest = manifest_of(library.build.space)
    expected = {row["name"]: row for row in manifest["kernels"]}
    assert len(expected) == len(manifest["kernels"])
    assert sorted(rows) == sorted(expected)
    for name, row in expected.items():
        kernel = rows[name]
        assert kernel.family.value == row["family"], name
        assert kernel.dtype.value == row["dtype"], name
        assert kernel.op.name.lower() == row["op"], name
        assert kernel.accuracy.name.lower() == row["accuracy"], name
        assert [bit.name.lower() for bit in Takes if bit in kernel.takes] == row["takes"], name
        assert dict(kernel.details) == row["details"], name
        for field in FIELDS:
            if row[field] is None and row["family"] == "unfused":
                continue  # shared memory and occupancy of its GEMMs are CUTLASS's to know
            assert getattr(kernel, field) == row[field], (name, field)


def test_library_is_of_this_generation(library: Library) -> None:
    build = library.build
    assert build.digest == manifest_of(build.space)["digest"]
    assert build.sanitizers == ""
    assert (build.archs == "") == (build.target is Target.HOST)
    assert (build.cuda_runtime_version == 0) == (build.target is Target.HOST)
    assert build.cutlass_version >= 400
