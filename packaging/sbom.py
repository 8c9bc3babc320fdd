"""Writes the bill of materials of the built libraries, CycloneDX 1.6 as JSON.

Beside it go CUTLASS.txt, its licence, and libraries.json, by which the package knows its libraries again.

    sbom.py --library X.so ... [--module Y.so] --cutlass DIR --cuda-include DIR --out FILE

Versions come from the libraries themselves, through the functions that the package uses, and from the
headers they were compiled with. No time, no serial number, no path: the same build gives the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sdpa_cutlass import __version__  # noqa: E402
from sdpa_cutlass.library.abi import BuildInfo, load  # noqa: E402
from sdpa_cutlass.library.locate import HASHES, Target  # noqa: E402

_OWN_LICENSE = "BSD-3-Clause"
_CUDA_EULA = {"license": {"name": "NVIDIA CUDA Toolkit EULA", "url": "https://docs.nvidia.com/cuda/eula/"}}


def cutlass_version(number: int) -> str:
    """CUTLASS_VERSION, e.g. 420 → 4.2.0."""
    return f"{number // 100}.{number // 10 % 10}.{number % 10}"


def cuda_version(number: int) -> str:
    """CUDART_VERSION, e.g. 13000 → 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"


def defined_number(header: Path, name: str) -> int:
    """The value of `#define name` in a header. Raises ValueError when it has none."""
    found = re.search(rf"^#\s*define\s+{name}\s+(\d+)", header.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(f"{header} does not define {name} as a number")
    return int(found[1])


def _component(
    name: str, version: str, licenses: list[dict[str, Any]], what: str, **more: Any
) -> dict[str, Any]:
    return {
        "type": "library",
        "bom-ref": f"{name}@{version}",
        "name": name,
        "version": version,
        "description": what,
        "licenses": licenses,
        **more,
    }


def _file(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": path.name,
        "name": path.name,
        "version": __version__,
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        "licenses": [{"license": {"id": _OWN_LICENSE}}],
        **more,
    }


def _library(path: Path, build: BuildInfo) -> dict[str, Any]:
    facts = {"target": build.target.value, "space": build.space, "digest": build.digest, "archs": build.archs}
    return _file(
        path, properties=[{"name": f"sdpa_cutlass:{key}", "value": value} for key, value in facts.items()]
    )


def bill(libraries: list[Path], cuda_include: Path, modules: list[Path]) -> dict[str, Any]:
    """The bill of the libraries and of extension modules, which hold nothing but this package's own code.

    Raises the package's errors for a file that is not a library of this version.
    """
    builds = {}
    for path in libraries:
        target = next(target for target in Target if target.file_name == path.name)
        builds[path] = load(path.resolve(), target).build
    cutlass = {cutlass_version(build.cutlass_version) for build in builds.values()}
    runtimes = {build.cuda_runtime_version for build in builds.values()} - {0}
    headers = cuda_version(defined_number(cuda_include / "cuda_runtime_api.h", "CUDART_VERSION"))
    parts = [
        _component(
            "CUTLASS",
            version,
            [{"license": {"id": "BSD-3-Clause"}}],
            "CuTe and GEMM headers, compiled into every kernel; notice in licenses/CUTLASS.txt",
            purl=f"pkg:github/NVIDIA/cutlass@v{version}",
        )
        for version in sorted(cutlass)
    ]
    parts.append(
        _component(
            "CUDA Toolkit headers", headers, [_CUDA_EULA], "types and intrinsics, compiled into every kernel"
        )
    )
    parts += [
        _component("CUDA runtime", cuda_version(version), [_CUDA_EULA], "libcudart_static, linked statically")
        for version in sorted(runtimes)
    ]
    cccl = [cuda_include / root / "cuda/std/__cccl/version.h" for root in ("cccl", ".")]
    for header in [header for header in cccl if header.is_file()][:1]:
        number = defined_number(header, "CCCL_VERSION")
        version = f"{number // 1000000}.{number // 1000 % 1000}.{number % 1000}"
        terms = [{"expression": "Apache-2.0 WITH LLVM-exception"}]
        parts.append(_component("CCCL", version, terms, "libcu++ headers that the two above include"))
    parts.append(
        {
            "type": "data",
            "bom-ref": "minilm_qkv.safetensors",
            "name": "minilm_qkv.safetensors",
            "description": "activations of sentence-transformers/all-MiniLM-L6-v2",
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        }
    )
    files = [_library(path, build) for path, build in builds.items()] + [_file(path) for path in modules]
    apart = ("CUDA runtime", "minilm_qkv.safetensors")
    depends = [part["bom-ref"] for part in parts if part["name"] not in apart]
    runtime = [part["bom-ref"] for part in parts if part["name"] == "CUDA runtime"]
    own = {
        "type": "library",
        "bom-ref": "sdpa_cutlass",
        "name": "sdpa_cutlass",
        "version": __version__,
        "licenses": [{"license": {"id": _OWN_LICENSE}}],
        "purl": f"pkg:pypi/sdpa-cutlass@{__version__}",
    }
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": [*files, *parts],
        "dependencies": [
            {
                "ref": "sdpa_cutlass",
                "dependsOn": [*(file["bom-ref"] for file in files), "minilm_qkv.safetensors"],
            },
            *(
                {
                    "ref": path.name,
                    "dependsOn": depends + (runtime if build.target is Target.CUDA else []),
                }
                for path, build in builds.items()
            ),
        ],
    }


def cutlass_notice(cutlass: Path) -> str:
    """The licence of the CUTLASS whose headers were compiled: its own tree's, or its package's.

    Raises FileNotFoundError when there is none: a wheel without it must not be made.
    """
    places = [cutlass / "LICENSE.txt"]
    for info in sorted(cutlass.resolve().parents[1].glob("nvidia_cutlass-*.dist-info")):
        places += [info / "licenses" / "LICENSE.txt", info / "LICENSE.txt"]
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise FileNotFoundError(f"no licence of CUTLASS; looked at {', '.join(map(str, places))}")


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Write the three files; a library or a licence that is not there is an error."""
    parser = argparse.ArgumentParser(description="The bill of materials of the built libraries.")
    parser.add_argument("--library", type=Path, action="append", required=True)
    parser.add_argument("--module", type=Path, action="append", default=[], help="an extension module")
    parser.add_argument(
        "--cutlass", type=Path, required=True, help="the tree whose include/ was compiled with"
    )
    parser.add_argument("--cuda-include", type=Path, required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="the bill; CUTLASS.txt and the hashes go beside it"
    )
    options = parser.parse_args(arguments)
    text = json.dumps(bill(options.library, options.cuda_include, options.module), indent=1) + "\n"
    notice = cutlass_notice(options.cutlass)
    installed = options.library + options.module
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in installed}
    _write(options.out, text)
    _write(options.out.with_name(HASHES), json.dumps(hashes, indent=1) + "\n")
    _write(options.out.with_name("CUTLASS.txt"), notice)
    return 0


if __name__ == "__main__":
    sys.exit(main())
