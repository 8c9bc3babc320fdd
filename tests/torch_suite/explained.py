"""Tests of PyTorch that fail only with the library, and have to: patterns of names, each with its reason.

A reason says why the test asks for something that is torch's own and cannot be ours. A defect has no place
here.
"""

from __future__ import annotations

from tests.torch_suite.records import Mode

EXPLAINED: dict[Mode, dict[str, str]] = {Mode.ENABLED: {}, Mode.SWAP: {}}
