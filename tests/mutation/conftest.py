"""With `--turn N`, tests marked `in_turns` have every sixth of their cases, the next turns the others."""

from __future__ import annotations

import pytest

from tests.kernels.turns import leave_other_turns


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_other_turns(config, items, _test)


def _test(item: pytest.Item) -> str:
    """The item's name, without its case where cases take turns."""
    return item.nodeid.partition("[")[0] if item.get_closest_marker("in_turns") else item.nodeid
