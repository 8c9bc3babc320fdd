"""The tests of the package under other releases of torch, each in a virtual environment: `make compat`.

    python -m tests.compat 2.4.1 2.11.0 newest     # exit status 1 when tests fail under one of them
    python -m tests.compat 2.4.1 --discard         # remove the environment afterwards
    python -m tests.compat newest -- -k decoding   # what follows -- is pytest's

It needs the host library (`make host`), and a Python that the oldest release has packages for (3.10 to 3.12
for torch 2.4). Environments lie in build/compat and stay there. Each takes up to 7 GB where the package index
has no builds of torch for CPUs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compat"
NEWEST = "newest"
TOOLS = (
    "cuda-python",
    "hypothesis",
    "jinja2",
    "matplotlib",
    "numpy",
    "pytest",
    "pytest-xdist",
    "rich",
    "safetensors",
)
TESTS = "tests/library"
COMPILED = (
    "tests/library/test_simt.py",
    "tests/library/test_arrivals.py::test_all_cases_are_run",
    "tests/library/test_arrivals.py::test_counters_of_the_cuda_library",
)
"""C++ without torch: the same under every release. The environments have only a part of CUDA's headers."""


def constraints() -> str:
    """The tools' versions as dev.lock has them, without hashes; torch says which CUDA packages it needs."""
    text = (ROOT / "requirements/dev.lock").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [re.sub(r"\s*--hash=\S+", "", line) for line in text.splitlines() if "==" in line]
    return "".join(f"{line.strip()}\n" for line in lines if not re.match(r"cuda-|nvidia-", line))


def install(version: str) -> Path:
    """The Python of an environment with this release of torch; it is made where there is none."""
    place = FOLDER / f"torch-{version}"
    python, done = place / "bin" / "python", place / ".installed"
    if not done.exists():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        (place / "constraints.txt").write_text(constraints(), encoding="utf-8")
        torch = "torch" if version == NEWEST else f"torch=={version}"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
        subprocess.run([*pip, "-c", place / "constraints.txt", torch, *TOOLS], check=True)
        done.touch()
    return python


def run_tests(python: Path, arguments: list[str]) -> str:
    """pytest's last line, after "passed" or "FAILED"."""
    command = [python, "-m", "pytest", "-q", "--device", "cpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, TESTS, *(f"--deselect={name}" for name in COMPILED), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"exit status {done.returncode}"
    return f"{'FAILED' if done.returncode else 'passed'}: {last}"


def main(arguments: list[str] | None = None) -> int:
    """Runs the tests under each release and prints one line for each; returns the exit status."""
    parser = argparse.ArgumentParser(description="The tests of the package under other releases of torch.")
    parser.add_argument("versions", nargs="+", metavar="VERSION", help=f"a release of torch, or {NEWEST!r}")
    parser.add_argument("--discard", action="store_true", help="remove each environment after its tests")
    given = sys.argv[1:] if arguments is None else arguments
    own, pytests = (
        (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    )
    options = parser.parse_args(own)
    results = {}
    for version in options.versions:
        print(f"== torch {version}", flush=True)
        try:
            results[version] = run_tests(install(version), pytests)
        except subprocess.CalledProcessError as error:
            results[version] = f"FAILED: it could not be installed: exit status {error.returncode}"
        if options.discard:
            shutil.rmtree(FOLDER / f"torch-{version}", ignore_errors=True)
    for version, result in results.items():
        print(f"torch {version:8} {result}")
    return int(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
