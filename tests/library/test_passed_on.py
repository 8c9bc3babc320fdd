"""`benchmarks.passed_on` still knows calls that `enable()` leaves to torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_call_that_is_timed_is_passed_on() -> None:
    """It asserts so itself, in a process of its own: it replaces torch's function."""
    script = "from benchmarks import passed_on as p; p.RUNS = p.CALLS = 1; p.main()"
    found = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert all(line.endswith(" ns") for line in found.stdout.splitlines())
    assert "gradients" in found.stdout
