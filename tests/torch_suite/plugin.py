"""pytest inside PyTorch's own test file: puts the library in place, and notes what becomes of each test.

Loaded with `-p tests.torch_suite.plugin` by __main__.py, in a process for each mode. Every test is a line of
JSON when it starts and another when it ends, so that a crash names its test and a second process goes on
behind it. This file compares nothing.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdpa_cutlass.errors import UnsupportedError
from sdpa_cutlass.integrations import flash_impl, torch_sdpa, usage
from sdpa_cutlass.integrations.usage import Usage
from tests.torch_suite.records import Mode, of_mode


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torch suite")
    group.addoption("--suite-mode", type=Mode, required=True)
    group.addoption("--suite-device", required=True, help="cpu or cuda")
    group.addoption(
        "--suite-records", type=Path, required=True, help="file of lines; its tests are not run again"
    )
    group.addoption("--suite-names", type=Path, help="file with the names of the tests to run")
    group.addoption("--suite-timeout", type=float, required=True, help="seconds a test may take")
    group.addoption(
        "--suite-stop", type=float, required=True, help="time.time() at which no more tests start"
    )
    group.addoption(
        "--suite-part", type=int, nargs=2, required=True, help="which of how many shares of tests"
    )
    group.addoption(
        "--suite-max-work", type=float, required=True, help="multiply-adds of the largest call served"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(config), "torch-suite-recorder")


class Recorder:
    """The hooks, and the counts of the calls that the library served."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.records: Path = config.getoption("--suite-records")
        self.timeout: float = config.getoption("--suite-timeout")
        self.stop: float = config.getoption("--suite-stop")
        self.outcome = "passed"
        self.message = ""
        self.mode: Mode = config.getoption("--suite-mode")
        self.usage = put_in_place(
            self.mode,
            config.getoption("--suite-device"),
            config.getoption("--suite-max-work"),
        )
        self.served_before = 0
        self.began = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        self.write({"collected": len(items)})  # those that -k picks
        known = of_mode(self.records.parent, self.mode).outcomes
        part, parts = config.getoption("--suite-part")
        names: Path | None = config.getoption("--suite-names")
        wanted = None if names is None else set(names.read_text(encoding="utf-8").split("\n"))
        chosen = [
            item
            for item in items[part::parts]
            if name_of(item.nodeid) not in known and (wanted is None or name_of(item.nodeid) in wanted)
        ]
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.outcome, self.message = "passed", ""
        self.served_before, self.began = self.usage.served, time.perf_counter()
        self.write({"started": name_of(nodeid)})

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        def expired(*_: object) -> None:
            raise TimeoutError(f"more than {self.timeout:g} s")

        before = signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, self.timeout)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome = "failed" if report.when == "call" else "error"
            crash = getattr(report.longrepr, "reprcrash", None)
            self.message = str(report.longrepr if crash is None else crash.message)[:500]
            if "TimeoutError: more than" in self.message:
                self.outcome = "timeout"
        elif report.skipped and self.outcome == "passed":
            self.outcome = "xfailed" if hasattr(report, "wasxfail") else "skipped"
            if isinstance(report.longrepr, tuple):
                self.message = report.longrepr[2][:500]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(
            {
                "test": name_of(nodeid),
                "outcome": self.outcome,
                "message": self.message,
                "served": self.usage.served - self.served_before,
                "seconds": round(time.perf_counter() - self.began, 3),
            }
        )
        if time.time() > self.stop:
            raise pytest.exit("out of time", returncode=0)

    def pytest_sessionfinish(self) -> None:
        self.write({"served": self.usage.served, "fallbacks": dict(self.usage.fallbacks)})

    def write(self, line: dict[str, Any]) -> None:
        with self.records.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def name_of(nodeid: str) -> str:
    """Class and function, without the file."""
    return nodeid.partition("::")[2]


def put_in_place(mode: Mode, device: str, max_work: float) -> Usage:
    """Starts `mode` for the whole process, before PyTorch's file is imported."""
    if mode is Mode.PLAIN:
        return Usage()
    if mode is Mode.SWAP:
        counts = Usage()
        usage.watchers = (counts,)  # the swap point counts for them
        torch.nn.attention.activate_flash_attention_impl(flash_impl.NAME)
        return counts
    serve = torch_sdpa._serve

    def bounded(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
        if not torch.compiler.is_dynamo_compiling():
            work = query.numel() * key.shape[-2]
            if work > max_work:
                raise UnsupportedError(f"{work:g} multiply-adds are too many for the host library's time")
        return serve(query, key, *rest)

    if device == "cpu":
        torch_sdpa._serve = bounded
    return torch_sdpa.enable(devices=[device])
