"""A capability bit that one side forgets to ask for is found by what compares both sides.

What a problem needs of a kernel is computed twice: by `needs` of templates/src/checks.cpp and of
sdpa_cutlass/choice/legal.py, which tests/library/test_capabilities.py holds together. Here each side forgets
one bit after the other, and the comparison has to disagree. The C++ side is checks.cpp alone, compiled for
this: it answers for every row of attention of the host library.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from sdpa_cutlass import Causal, MaskType
from sdpa_cutlass.choice import legal
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, Takes
from sdpa_cutlass.library.structs import Params, RawKernelInfo
from sdpa_cutlass.problem import Problem
from tests.host_compiler import compiler
from tests.library.test_capabilities import PLAIN, host_rows, params_of
from tests.mutation.model import INCLUDE, ROOT

Refusal = Callable[[KernelInfo, Params], bool]

SOURCES = ROOT / "templates" / "src"
ASKS_FOR_ALL = "  return bits;\n"
FORGETS = "  return bits & ~forgotten;\n"
PROGRAM = """
#include <cstdarg>
#include <cstdio>
#include "sdpa/registry.hpp"
namespace sdpa {{
static uint64_t forgotten;
Status make_status(sdpa_status code, const char *format, ...) {{
  Status status;
  status.code = code;
  return status;
}}
}}  // namespace sdpa
{checks}
extern "C" void forget(uint64_t bits) {{ sdpa::forgotten = bits; }}
extern "C" int refuses(const sdpa_kernel_info *info, const sdpa_params *params) {{
  sdpa::KernelRow row = {{}};
  row.info = *info;
  row.can_implement = [](const sdpa_params &) {{ return sdpa::Status(); }};
  return !sdpa::check_problem(row, *params).ok();
}}
"""


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """checks.cpp with `refuses`, whose `needs` leaves out the bits that were handed to `forget`."""
    folder = tmp_path_factory.mktemp("checks")
    text = (SOURCES / "checks.cpp").read_text(encoding="utf-8")
    assert text.count(ASKS_FOR_ALL) == 1
    source, target = folder / "checks.cpp", folder / "checks.so"
    source.write_text(PROGRAM.format(checks=text.replace(ASKS_FOR_ALL, FORGETS)), encoding="utf-8")
    flags = ("-std=c++17", "-O0", "-w", "-fPIC", "-shared", "-DSDPA_TARGET_HOST")
    command = [compiler(), *flags, f"-I{INCLUDE}", f"-I{SOURCES}", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(target))
    loaded.forget.argtypes = [ctypes.c_uint64]
    loaded.refuses.argtypes = [ctypes.POINTER(RawKernelInfo), ctypes.POINTER(Params)]
    return loaded


@pytest.fixture
def refuses(checks: ctypes.CDLL) -> Iterator[Refusal]:
    native = library(Target.HOST)
    yield lambda row, params: bool(checks.refuses(native.kernel_info(row.index), params))
    checks.forget(0)


def problems() -> Iterator[Problem]:
    """Each thing that a problem can ask for, alone and with each other one."""
    asked = [
        {"causal": Causal.TOP_LEFT}, {"mask": MaskType.BOOL}, {"mask": MaskType.F16}, {"mask": MaskType.F32},
        {"has_lengths": True}, {"has_dropout": True}, {"head_dim_v": 56}, {"head_dim": 40, "head_dim_v": 40},
        {"window": (3, 1)}, {"has_sinks": True},
    ]  # fmt: skip
    yield PLAIN
    for one, other in itertools.combinations_with_replacement(asked, 2):
        yield replace(PLAIN, **{**one, **other})


def disagreement(refuses: Refusal) -> str | None:
    """Where the package and checks.cpp answer differently; None where they never do."""
    for row, problem, packed, splits in itertools.product(
        host_rows(), problems(), (False, True), (False, True)
    ):
        params = params_of(problem, packed=packed, num_splits=int(splits))
        known = legal.mismatches(row, problem)
        is_refused = bool(known) or (splits and Takes.SPLITS not in row.takes)
        if refuses(row, params) != is_refused:
            return f"{row.name}, {problem}, packed {packed}, splits {splits}: the package says {known}"
    return None


def test_both_sides_agree_where_nothing_is_forgotten(refuses: Refusal) -> None:
    assert disagreement(refuses) is None


@pytest.mark.parametrize("bit", Takes, ids=lambda bit: bit.name)
def test_a_bit_that_the_library_forgets_is_found(bit: Takes, refuses: Refusal, checks: ctypes.CDLL) -> None:
    assert any(bit not in row.takes for row in host_rows())
    checks.forget(bit.value)
    assert disagreement(refuses) is not None


# Lengths and packs are one thing to the package, and splits are its own choice: neither is asked for alone.
ASKED = [bit for bit in Takes if bit not in (Takes.LENGTHS, Takes.PACKED, Takes.SPLITS)]


@pytest.mark.parametrize(
    "bits", [*ASKED, Takes.LENGTHS | Takes.PACKED], ids=lambda bits: bits.name or "LENGTHS and PACKED"
)
def test_a_bit_that_the_package_forgets_is_found(
    bits: Takes, refuses: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = legal.needs
    monkeypatch.setattr(legal, "needs", lambda row, problem: asks(row, problem) & ~bits)
    assert disagreement(refuses) is not None
