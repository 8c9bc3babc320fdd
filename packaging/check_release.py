"""Says whether a wheel could be published: metadata, size, licence notices, bill of materials, hashes.

    check_release.py dist/sdpa_cutlass-*.whl

Looks at the file alone; check_wheel.py installs and runs it, check_reproducible.py builds twice. With twine
in this environment, its `check --strict` runs too. Prints a line for each question, and what is wrong. Exit
code 1 when anything is.
"""

from __future__ import annotations

import argparse
import base64
import csv
import email
import hashlib
import importlib.util
import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_BYTES = 100 * 10**6  # of a file, on the public index
PACKAGE = "sdpa_cutlass"
NOT_SHIPPED = re.compile(
    r"(^|/)(tests|benchmarks|generator|templates|native|__pycache__)/|\.(cu|cuh|cpp|o|a)$"
)
LIBRARY = re.compile(r"\.so$")


class Wheel:
    """A wheel's files, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with zipfile.ZipFile(path) as archive:
            self.files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}

    def info(self, name: str) -> bytes | None:
        """A file of the folder `*.dist-info`."""
        found = [
            data for path, data in self.files.items() if path.split("/", 1)[-1] == name and _is_info(path)
        ]
        return found[0] if len(found) == 1 else None

    @property
    def libraries(self) -> dict[str, bytes]:
        """Native files by their last name."""
        return {path.rpartition("/")[2]: data for path, data in self.files.items() if LIBRARY.search(path)}


def _is_info(path: str) -> bool:
    return path.split("/", 1)[0].endswith(".dist-info")


def version_of_source(root: Path = ROOT) -> str:
    """What the package in the checkout says."""
    text = (root / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__\s*(?::[^=]+)?=\s*["\']([^"\']+)["\']', text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{PACKAGE}/__init__.py has no __version__")
    return found[1]


def check_size(wheel: Wheel) -> list[str]:
    """Whether the index takes a file of this size."""
    size = wheel.path.stat().st_size
    return [] if size <= MOST_BYTES else [f"{size} bytes; at most {MOST_BYTES} are taken"]


def check_metadata(wheel: Wheel) -> list[str]:
    """Name, version, Python, licence and description."""
    data = wheel.info("METADATA")
    if data is None:
        return ["no METADATA"]
    fields = email.message_from_bytes(data)
    version = version_of_source()
    wanted = {
        "Name": PACKAGE,
        "Version": version,
        "Requires-Python": ">=3.10",
        "License-Expression": "BSD-3-Clause",
    }
    wrong = [
        f"{name} is {fields[name]!r}, not {value!r}"
        for name, value in wanted.items()
        if (fields[name] or "").replace("-", "_") != value.replace("-", "_")
    ]
    if wheel.path.name.split("-")[1] != version:
        wrong.append(f"the file's name has version {wheel.path.name.split('-')[1]}, not {version}")
    if "text/markdown" not in (fields["Description-Content-Type"] or "") or len(data) < 2000:
        wrong.append("no description in Markdown")
    return wrong


def check_notices(wheel: Wheel) -> list[str]:
    """This package's licence and those of what is compiled in."""
    wrong = []
    for name, words in (("licenses/LICENSE", b"BSD 3-Clause"), ("licenses/CUTLASS.txt", b"NVIDIA")):
        data = wheel.info(name)
        if data is None or words not in data:
            wrong.append(f"{name} is missing, or does not say {words.decode()!r}")
    return wrong


def check_bill(wheel: Wheel) -> list[str]:
    """The bill of materials and libraries.json name every native file by its hash."""
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in wheel.libraries.items()}
    if not digests:
        return ["no native library"]
    bill = json.loads(wheel.info("sboms/sdpa_cutlass.cdx.json") or b"{}")
    billed = {
        part["name"]: part["hashes"][0]["content"]
        for part in bill.get("components", [])
        if part.get("type") == "file"
    }
    hashes = json.loads(wheel.files.get(f"{PACKAGE}/libraries.json", b"{}"))
    wrong = [f"the bill of materials has {billed}, the wheel {digests}"] if billed != digests else []
    known = {name: digest for name, digest in hashes.items() if name in digests}
    if known != digests:
        wrong.append(f"libraries.json has {known}, the wheel {digests}")
    unlicensed = [part["name"] for part in bill.get("components", []) if not part.get("licenses")]
    return wrong + [f"{name} has no licence in the bill of materials" for name in unlicensed]


def check_contents(wheel: Wheel) -> list[str]:
    """What has to be there, what must not, and RECORD's hashes."""
    wrong = [f"{name} has no business in a wheel" for name in wheel.files if NOT_SHIPPED.search(name)]
    wrong += [
        f"no {name}" for name in (f"{PACKAGE}/py.typed", f"{PACKAGE}/__init__.py") if name not in wheel.files
    ]
    recorded = {
        row[0]: row[1] for row in csv.reader(io.StringIO((wheel.info("RECORD") or b"").decode())) if row
    }
    for name, data in wheel.files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if not name.endswith(".dist-info/RECORD") and recorded.get(name) != f"sha256={digest}":
            wrong.append(f"RECORD does not have {name} as it is")
    return wrong


def check_changelog(wheel: Wheel) -> list[str]:
    """The version has a section with a date."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(version_of_source())
    has = re.search(rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$", text, re.MULTILINE)
    return [] if has else [f"CHANGELOG.md has no dated section [{version_of_source()}]"]


def check_twine(wheel: Wheel) -> list[str]:
    """twine's opinion, where it is installed."""
    if importlib.util.find_spec("twine") is None:
        print("  twine is not installed here: not asked")
        return []
    command = [sys.executable, "-m", "twine", "check", "--strict", str(wheel.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [done.stdout.strip() or done.stderr.strip()]


CHECKS: dict[str, Callable[[Wheel], list[str]]] = {
    "size": check_size,
    "metadata": check_metadata,
    "licence notices": check_notices,
    "bill of materials": check_bill,
    "contents": check_contents,
    "changelog": check_changelog,
    "twine": check_twine,
}


def main(arguments: list[str] | None = None) -> int:
    """Check one wheel; a line for each question."""
    parser = argparse.ArgumentParser(description="Says whether a wheel could be published.")
    parser.add_argument("wheel", type=Path)
    options = parser.parse_args(arguments)
    try:
        wheel = Wheel(options.wheel)
    except (OSError, zipfile.BadZipFile) as error:
        parser.error(f"wheel is {options.wheel}: {error}")
    failed = False
    for name, check in CHECKS.items():
        wrong = check(wheel)
        failed = failed or bool(wrong)
        print(f"{name}: {'ok' if not wrong else 'NOT ok'}")
        for line in wrong:
            print(f"  {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
