"""A pytest plugin that writes what happened to each test as one JSON line, as soon as it is over.

    pytest -p tests.mutation.recorder --record FILE [--stop-at CHECK]

With --stop-at, the first failure that stands for this check ends the run. When the process dies, the last
line without an outcome says in which test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.model import Check
from tests.mutation.probe import check_of

_MESSAGE_CHARACTERS = 800


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", help="the file that gets one JSON line per event")
    parser.addoption("--stop-at", type=Check, help="stop when this check has found something")


def _write(config: pytest.Config, event: dict[str, Any]) -> None:
    path = config.getoption("--record")
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _write(item.config, {"test": item.nodeid, "event": "started"})


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        kind, message = call.excinfo.typename, str(call.excinfo.value)[:_MESSAGE_CHARACTERS]
        _write(item.config, {"test": item.nodeid, "event": "failed", "kind": kind, "message": message})
        if check_of(kind, message) is item.config.getoption("--stop-at"):
            item.session.shouldfail = "found"
    elif call.when == "call":
        _write(item.config, {"test": item.nodeid, "event": "passed"})
