"""What the built host library says that it needs of the CPU."""

from __future__ import annotations

import platform

import pytest

from sdpa_cutlass.library import cpu_features
from tests.build.conftest import LIBRARIES, built


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the default of other CPUs is the compiler's")
def test_the_host_library_names_the_instructions_that_it_uses() -> None:
    needed = cpu_features.needed_features(built(LIBRARIES["host"], "make host"))
    assert needed == {"pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "f16c"}
