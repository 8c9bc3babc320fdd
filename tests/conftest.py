"""Options shared by all tests.

`--device cpu|cuda|all` picks where kernels run; by default the host library is tested everywhere and the
CUDA library as well where torch sees a GPU. Of kernel tests that differ in element type and tile alone,
and of cases marked `in_turns`, `--turn N` runs every sixth (tests/kernels/turns.py).
Tests marked `gpu` are left out (not skipped) on machines without one.
"""

from __future__ import annotations

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("all", "cpu", "cuda"), default="all", help="where kernels run")
    parser.addoption("--turn", type=int, help="of the tests that take turns, those of turn N")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kernels(causal, head_dim, device): narrows the kernels of a kernel test"
    )


def devices(config: pytest.Config) -> list[str]:
    """The torch devices that kernels are tested on."""
    chosen = config.getoption("--device")
    if chosen == "all":
        return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices(metafunc.config))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "cuda" in devices(config):
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
