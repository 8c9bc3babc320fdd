"""The files that a build leaves behind: libraries, manifest, resource report.

Where they are missing, tests skip, unless SDPA_REQUIRE_BUILD=1 says that both libraries were built
(`make test` does): then a missing file is a failure.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sdpa_cutlass.library.abi import Library, Target, load

REPOSITORY = Path(__file__).resolve().parents[2]
FILTERED = "release_filtered"  # the space of a library that `make cuda CUDA_KERNELS=...` built
LIBRARIES = {
    "cuda": REPOSITORY / "build/lib/libsdpa_cutlass.so",
    "host": REPOSITORY / "build/lib/libsdpa_cutlass_host.so",
}


def built(path: Path, how: str) -> Path:
    """Return `path`, or skip the test (fail it under SDPA_REQUIRE_BUILD) when the build did not make it."""
    if not path.exists():
        message = f"{path.relative_to(REPOSITORY)} is not there: run `{how}`"
        if os.environ.get("SDPA_REQUIRE_BUILD") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return path


def load_script(path: str) -> ModuleType:
    """Import a script by its path in the repository; its folder is no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=sorted(LIBRARIES))
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def manifest_of(space: str) -> dict[str, Any]:
    """Return the manifest that a library of this space was built from."""
    folder = {"release": "generated", FILTERED: "cuda/generated"}.get(space, f"generated-{space}")
    return read_json(built(REPOSITORY / "build" / folder / "manifest.json", "make host"))


@pytest.fixture
def library(target: str) -> Library:
    return load(built(LIBRARIES[target], f"make {target}"), Target(target))


@pytest.fixture
def resource_usage() -> dict[str, Any]:
    return read_json(built(REPOSITORY / "build/cuda/resource_usage.json", "make cuda"))
