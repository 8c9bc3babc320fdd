"""Every file with tests is one that a plain `pytest` looks into: no folder is passed over by its name.

pytest is asked, with this repository's settings, which modules it would collect. They are not imported, so
this needs no library. What a marker or `--device` leaves out afterwards is not looked at here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST_MODULES = """
import pytest

class Nothing(pytest.Module):
    def collect(self):
        return []

class ListModules:
    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path, parent):
        print("module", module_path)
        return Nothing.from_parent(parent, path=module_path)

pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"], plugins=[ListModules()])
"""


def defines_tests(path: Path) -> bool:
    return bool(re.search(r"^(    )?def test_\w+\(", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_file_with_tests_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    collected = {line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("module ")}
    written = {str(path) for path in ROOT.glob("tests/**/*.py") if defines_tests(path)}
    assert str(Path(__file__)) in collected
    assert written - collected == set()
