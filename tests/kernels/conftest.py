"""Parametrises a test's kernel over the rows of the registry, on every device under test.

    fused_kernel     plain fused kernels
    general_kernel   those for masks, lengths and any head_dim, without dropout
    dropout_kernel   the same with dropout
    listing_kernel   those that find what a boolean mask hides ahead
    split_kernel     those for lengths and any head_dim whose keys several CTAs may share; with one CTA
    lengths_kernel   general ones, and split ones with each of SPLITS
    unfused_kernel   the piped baseline
    quantized_kernel those that multiply bytes, split ones with each of SPLITS
    backward_kernel  those that make gradients
    fused_backward   those of them that compute each score once
    masked_backward  those of them that take masks and make the gradient of a bias

The test id is the kernel's name, how many splits it has where that is more than one, and the device. When a
library cannot be loaded, each test fails once and says how to build it.
`@pytest.mark.kernels(causal=..., head_dim=..., device=..., masks=..., split=..., splits=...)` narrows the
rows of one test.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

import pytest
import torch

from sdpa_cutlass.errors import HostCheckError, LibraryError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import Accuracy, Family, KernelInfo, Op
from sdpa_cutlass.problem import MaskType
from sdpa_cutlass.public.api import kernels
from tests.conftest import devices
from tests.kernels.harness import HOST_THREADS, TestedKernel
from tests.kernels.masks import MASK_DTYPES, mask_dtypes
from tests.kernels.turns import leave_other_turns, without_type_and_tile
from tests.source_lines import with_lines

SPLITS = (1, 3)


_ROWS: dict[str, Callable[[KernelInfo], bool]] = {
    "fused_kernel": lambda row: row.serves(Family.FMHA_FWD) and not row.is_general,
    "general_kernel": lambda row: _is_exact(row) and not row.has_dropout and bool(row.mask_types),
    "dropout_kernel": lambda row: _is_exact(row) and row.has_dropout,
    "listing_kernel": lambda row: row.family is Family.FMHA_FWD_SM90 and MaskType.BOOL in row.mask_types,
    "hopper_general_kernel": lambda row: row.family is Family.FMHA_FWD_SM90 and row.is_general,
    "split_kernel": lambda row: _is_exact(row) and row.is_split,
    "lengths_kernel": lambda row: _is_exact(row) and not row.has_dropout,
    "unfused_kernel": lambda row: row.family is Family.UNFUSED,
    "quantized_kernel": lambda row: row.accuracy in (Accuracy.INT8_QK, Accuracy.INT8),
    "backward_kernel": lambda row: row.op is Op.BACKWARD,
    "fused_backward": lambda row: row.family is Family.FMHA_BWD_FUSED,
    "masked_backward": lambda row: row.op is Op.BACKWARD and bool(row.mask_types),
}


def _is_exact(row: KernelInfo) -> bool:
    """A general kernel whose results keep to the numerics rule."""
    return row.op is Op.FORWARD and row.is_general and row.accuracy is Accuracy.EXACT


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, belongs in _ROWS.items():
        if fixture in metafunc.fixturenames:
            wanted = metafunc.definition.get_closest_marker("kernels")
            splits = SPLITS if fixture in ("lengths_kernel", "quantized_kernel") else (1,)
            narrowed = {"splits": splits, **(wanted.kwargs if wanted else {})}
            cases = _cases(metafunc.config, belongs, **narrowed)
            metafunc.parametrize(fixture, cases, indirect=True)


def _cases(
    config: pytest.Config,
    belongs: Callable[[KernelInfo], bool],
    *,
    splits: tuple[int, ...],
    causal: bool | None = None,
    head_dim: int | None = None,
    device: str | None = None,
    masks: bool | None = None,
    split: bool | None = None,
) -> list:
    """The kernels that belong to a fixture, narrowed by what a test's `kernels` mark asks for."""
    cases = []
    for where in devices(config) if device is None else [device]:
        try:
            rows = kernels(Target.CUDA if where == "cuda" else Target.HOST)
        except LibraryError as error:
            cases.append(pytest.param(str(error), id=f"no-library@{where}"))
            continue
        cases += [
            pytest.param(kernel, id=f"{kernel}@{where}")
            for row in rows
            if belongs(row) and causal in (None, row.is_causal) and head_dim in (None, row.head_dim)
            if masks in (None, bool(row.mask_types)) and split in (None, row.is_split)
            for kernel in (TestedKernel(where, row, n) for n in (splits if row.is_split else (0,)))
        ]
    return cases


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops tests of a general kernel with a `dtype` of masks that it does not take, and another turn's."""

    def makes_sense(item: pytest.Item) -> bool:
        params = (
            item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        )
        kernel = params.get("general_kernel")
        return not isinstance(kernel, TestedKernel) or params.get("dtype") not in refused(kernel)

    def refused(kernel: TestedKernel) -> set[torch.dtype]:
        return set(MASK_DTYPES) - set(mask_dtypes(kernel.info))

    items[:] = [item for item in items if makes_sense(item)]
    leave_other_turns(config, items, without_type_and_tile)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Races are reported with their lines, where the host library knows them: see tests/source_lines.py."""
    report = yield
    if call.excinfo is not None and call.excinfo.errisinstance(HostCheckError):
        message = str(call.excinfo.value)
        lines = with_lines(message, library(Target.HOST).path)
        if lines != message:
            report.sections.append(("source lines", lines))
    return report


def _kernel(request: pytest.FixtureRequest) -> TestedKernel:
    if isinstance(request.param, str):
        pytest.fail(request.param, pytrace=False)
    return request.param


@pytest.fixture
def fused_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def general_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def dropout_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def listing_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def hopper_general_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def split_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def lengths_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def quantized_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def unfused_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def backward_kernel(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def fused_backward(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture
def masked_backward(request: pytest.FixtureRequest) -> TestedKernel:
    return _kernel(request)


@pytest.fixture(scope="session", autouse=True)
def _host_threads(pytestconfig: pytest.Config) -> None:
    """Kernels have all cores, or one under xdist. References are too small to gain from more than one."""
    torch.set_num_threads(1)
    if "cpu" in devices(pytestconfig):
        with contextlib.suppress(LibraryError):
            library(Target.HOST).host_configure(num_threads=HOST_THREADS)
