"""Each row of the table of mappings in docs/edge-cases.md gives what torch's own kernel gives."""

from __future__ import annotations

import pytest

from tests.library.mappings import MAPPINGS


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.usefixtures("_torch_is_left_as_found")
def test_row(name: str, device: str) -> None:
    MAPPINGS[name].check(device)
