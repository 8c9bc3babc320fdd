"""Installs a wheel into fresh environments and uses it there: with what it declares only, NumPy, torch.

    check_wheel.py dist/sdpa_cutlass-*.whl                      # every Python from 3.10 to 3.14 that is found
    check_wheel.py WHEEL --python /path/to/python3.12 --torch   # this one, and with torch as well

Each environment gets the wheel and what its metadata asks for, nothing else; use_wheel.py then runs in it, in
an empty folder and isolated from the caller's environment. It runs again once NumPy is there, and with
--torch once torch is. Exit code 1 when something fails, or no Python is found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
_USE = Path(__file__).with_name("use_wheel.py")
_TAG = re.compile(r"-py3-none-manylinux_2_\d+_\w+\.whl$")


def pythons() -> list[str]:
    """One interpreter for each version of VERSIONS, from PATH or from pyenv, that starts."""
    found = []
    for version in VERSIONS:
        roots = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*"))
        places = [shutil.which(f"python{version}"), *(str(root / "bin/python") for root in roots)]
        for place in places:
            if place and _works(place, version):
                found.append(place)
                break
        else:
            print(f"Python {version}: not found")
    return found


def _works(python: str, version: str) -> bool:
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def _run(command: list[str], cwd: Path) -> str:
    """What the command prints. Raises RuntimeError with its output when it fails."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SDPA_"))
    }
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} ...: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout.strip()


def check(wheel: Path, python: str, torch: str | None) -> list[str]:
    """What was seen in a fresh environment of `python`. Raises RuntimeError when something fails."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _run([python, "-m", "venv", str(folder / "venv")], folder)
        own = str(folder / "venv/bin/python")
        pip = [own, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
        _run([*pip, str(wheel)], folder)
        lines = [_run([own, "-I", str(_USE)], folder)]
        _run([*pip, "numpy"], folder)
        lines.append(_run([own, "-I", str(_USE), "--numpy"], folder))
        if torch is not None:
            _run([*pip, *torch.split()], folder)
            lines.append(_run([own, "-I", "-W", "ignore", str(_USE), "--torch"], folder).splitlines()[-1])
        return lines


def main(arguments: list[str] | None = None) -> int:
    """Check every Python; print one line for each step."""
    parser = argparse.ArgumentParser(
        description="Installs a wheel into fresh environments and uses it there."
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", action="append", help="an interpreter (default: 3.10 to 3.14, if found)")
    parser.add_argument(
        "--torch", nargs="?", const="torch>=2.4", metavar="REQUIREMENT", help="try with torch as well"
    )
    options = parser.parse_args(arguments)
    wheel = options.wheel.resolve()
    if not wheel.is_file() or not _TAG.search(wheel.name):
        parser.error(f"wheel is {wheel.name}; allowed is a file named ...-py3-none-manylinux_2_*.whl")
    interpreters = options.python or pythons()
    failed = not interpreters
    for python in interpreters:
        version = _run([python, "-c", "import platform; print(platform.python_version())"], Path.cwd())
        try:
            for line in check(wheel, python, options.torch):
                print(f"Python {version}: {line}", flush=True)
        except RuntimeError as error:
            failed = True
            print(f"Python {version}: FAILED: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
