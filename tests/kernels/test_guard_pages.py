"""No general or split kernel touches memory outside its tensors, not even to throw away what it reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import devices

_ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_stay_inside_their_tensors(pytestconfig: pytest.Config) -> None:
    if "cpu" not in devices(pytestconfig):
        pytest.skip("host library only")
    command = [sys.executable, "-m", "tests.kernels.guard_pages"]
    run = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    last = lines[-1] if lines else "nothing was run"
    assert run.returncode == 0, f"exit code {run.returncode} in: {last}\n{run.stderr}"
