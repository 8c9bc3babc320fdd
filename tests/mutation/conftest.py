"""With `--turn N`, tests marked `in_turns` have every sixth of their cases, the next turns the others."""

from __future__ import annotations

import pytest

from tests.kernels.turns import of_turn


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    turn = config.getoption("--turn")
    if turn is not None:
        kept = of_turn(items, turn, _test)
        config.hook.pytest_deselected(items=list(set(items) - set(kept)))
        items[:] = kept


def _test(item: pytest.Item) -> str:
    """The item's name, without its case where cases take turns."""
    return item.nodeid.partition("[")[0] if item.get_closest_marker("in_turns") else item.nodeid
