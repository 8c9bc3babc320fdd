"""Parametrises `fused_kernel` and `unfused_kernel` over every row of the registry on every device under test.

The test id is the kernel's name and the device. When a library cannot be loaded, each test fails once and
says how to build it. `@pytest.mark.kernels(causal=..., head_dim=..., device=...)` narrows the rows of one
test.
"""

from __future__ import annotations

import contextlib

import pytest

from sdpa_cutlass._c_api import library
from sdpa_cutlass._locate import Target
from sdpa_cutlass.api import kernels
from sdpa_cutlass.errors import LibraryError
from sdpa_cutlass.registry import Family
from tests.conftest import devices
from tests.kernels.harness import HOST_THREADS, TestedKernel

_FIXTURES = {"fused_kernel": Family.FMHA_FWD, "unfused_kernel": Family.UNFUSED}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, family in _FIXTURES.items():
        if fixture in metafunc.fixturenames:
            wanted = metafunc.definition.get_closest_marker("kernels")
            cases = _cases(metafunc.config, family, **(wanted.kwargs if wanted else {}))
            metafunc.parametrize(fixture, cases, indirect=True)


def _cases(
    config: pytest.Config,
    family: Family,
    *,
    causal: bool | None = None,
    head_dim: int | None = None,
    device: str | None = None,
) -> list:
    """The kernels of `family`, narrowed by what a test's `kernels` mark asks for."""
    cases = []
    for where in devices(config) if device is None else [device]:
        try:
            rows = kernels(Target.CUDA if where == "cuda" else Target.HOST)
        except LibraryError as error:
            cases.append(pytest.param(str(error), id=f"no-library@{where}"))
            continue
        cases += [
            pytest.param(TestedKernel(where, row), id=f"{row.name}@{where}")
            for row in rows
            if row.family is family
            and not row.has_dropout
            and causal in (None, row.is_causal)
            and head_dim in (None, row.head_dim)
        ]
    return cases


def _kernel(request: pytest.FixtureRequest) -> TestedKernel:
    if isinstance(request.param, str):
        pytest.fail(request.param, pytrace=False)
    return request.param


@pytest.fixture
def fused_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def unfused_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture(scope="session", autouse=True)
def _host_threads(pytestconfig: pytest.Config) -> None:
    """Under xdist every worker keeps to one core."""
    if "cpu" in devices(pytestconfig):
        with contextlib.suppress(LibraryError):
            library(Target.HOST).host_configure(num_threads=HOST_THREADS)
