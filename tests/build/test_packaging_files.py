"""Lock files and settings: pinned, hashed, and free of addresses; what CI builds in turns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from generator.core.kernel import Kernel
from generator.families import FAMILIES
from sdpa_cutlass.cli.inventory import CUDA_PYTHON
from tests import compat

REPOSITORY = Path(__file__).resolve().parents[2]
LOCKS = sorted((REPOSITORY / "requirements").glob("*.lock"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_every_locked_package_has_a_version_and_hashes(lock: Path) -> None:
    text = lock.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(lines) > 10
    for line in lines:
        assert re.match(r"[a-z0-9][a-z0-9-]*==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line
    assert "://" not in text


def test_locks_agree() -> None:
    """A package that several locks name has the same versions in each: all go into one environment."""
    demo, dev, docs = (
        set(re.findall(r"^[a-z0-9-]+==\S+", lock.read_text(), flags=re.MULTILINE))
        for lock in (REPOSITORY / "requirements" / f"{name}.lock" for name in ("demo", "dev", "docs"))
    )
    assert demo <= dev
    names = {line.partition("==")[0] for line in dev}
    shared = {line for line in docs if line.partition("==")[0] in names}
    assert shared
    assert shared <= dev


def test_torch_is_pinned() -> None:
    assert re.search(
        r"^torch==\d+\.\d+\.\d+$", (REPOSITORY / "requirements/torch.txt").read_text(), re.MULTILINE
    )


def test_version_is_written_once() -> None:
    for name in ("pyproject.toml", "CMakeLists.txt"):
        text = (REPOSITORY / name).read_text(encoding="utf-8")
        assert "sdpa_cutlass/__init__.py" in text
        assert not re.search(r"^version *=|VERSION \d", text.replace("VERSION 3.25", ""), re.MULTILINE)


def test_the_folder_packaging_does_not_hide_the_module_of_that_name() -> None:
    """A folder without __init__.py gives way to an installed package, whatever comes first in sys.path."""
    assert list((REPOSITORY / "packaging").rglob("__init__.py")) == []
    first = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r})"
    code = f"{first}; import packaging.version; print(packaging.__file__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert REPOSITORY / "packaging" not in Path(found.strip()).parents


def test_every_kernel_has_its_turn_in_ci() -> None:
    text = (REPOSITORY / ".ci/run").read_text(encoding="utf-8")
    turns = re.search(r"^turns=\((.+?)\)$", text, re.MULTILINE | re.DOTALL)
    assert turns
    release = FAMILIES.build("release")
    built = [
        config.name for glob in re.findall(r"'(.+?)'", turns[1]) for config in release.filtered(glob).kernels
    ]
    assert sorted(built) == [config.name for config in release.kernels]


def test_the_demo_builds_what_it_compares() -> None:
    """Without a GPU: every head_dim, every feature and the baseline in fp16, in a dozen units at most."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (globs,) = re.findall(r"^demo: HOST_KERNELS := (\S+)$", makefile, re.MULTILINE)
    release = FAMILIES.build("release")
    built = release.filtered(globs).kernels
    compared = release.filtered("fmha_fwd_sm89_*_f16,fmha_fwd_sm89_*_f16_causal,unfused_*_f16*").kernels

    def without_tiles(kernels: Iterable[Kernel]) -> set[str]:  # such as unfused_sm89_d64_f16_causal
        return {re.sub(r"_m\d.*(?=_f16)", "", kernel.name) for kernel in kernels}

    assert without_tiles(compared) <= without_tiles(built)
    features = {kernel.name.partition("_f16")[2] for kernel in built}
    assert {"_general", "_general_dropout", "_general_split"} <= features
    assert len({kernel.unit for kernel in built}) <= 12


def test_the_oldest_torch_that_is_declared_is_tested() -> None:
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    (declared,) = set(re.findall(r'"torch>=([\d.]+)"', pyproject))
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    versions = re.findall(r"^TORCH \?= (.+)$", makefile, re.MULTILINE)[0].split()
    assert versions[0].startswith(f"{declared}.")
    assert versions[-1] == compat.NEWEST


def test_other_releases_of_torch_are_tested_with_the_locked_tools() -> None:
    lines = compat.constraints().splitlines()
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( ; .+)?", line) for line in lines)
    locked = {line.partition("==")[0] for line in lines}
    assert set(compat.TOOLS) - locked == {"cuda-python"}


def test_the_package_asks_for_a_cuda_python_that_it_can_use() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{CUDA_PYTHON}; implementation_name == ' in text
    locked = re.search(r"^cuda-python==(\d+)\.(\d+)", LOCKS[0].read_text(encoding="utf-8"), re.MULTILINE)
    assert locked
    assert (int(locked[1]), int(locked[2])) >= (12, 8)
