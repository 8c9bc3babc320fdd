"""The compiled call path: it does what the path through Python does, and leaves to that what it must."""

from __future__ import annotations

import hashlib
import importlib.machinery
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from sdpa_cutlass import (
    ArgumentError,
    HostCheckError,
    LibraryMismatchError,
    UntrustedLibraryError,
    attention,
    enabled,
    plan,
    unfused_attention,
)
from sdpa_cutlass.call import call_table, calls, launch
from sdpa_cutlass.library import abi, launcher, locate
from sdpa_cutlass.library.structs import Addresses
from tests.library.launchers import PLAN, SHAPE, Recorder, Subclass, qkv
from tests.library.reference import rand

pytestmark = pytest.mark.usefixtures("_compiled_only")

ROOT = Path(__file__).resolve().parents[2]


def test_a_third_call_is_compiled(device: str, without_python: Callable[[], None]) -> None:
    strided = torch.empty(1, 9, 2, 64, dtype=torch.float16, device=device).transpose(1, 2)
    variants: list[dict[str, Any]] = [
        {},
        {"causal": "top_left"},
        {"scale": 0.3},
        {"return_lse": True},
        {"out": strided},
        {"return_lse": True, "out": torch.empty(SHAPE, dtype=torch.float16, device=device)},
    ]

    def answers(seed: int) -> list[list[torch.Tensor]]:
        results = [attention(*qkv(device, seed), **options) for options in variants]
        return [[t.clone() for t in (r if isinstance(r, tuple) else (r,))] for r in results]

    expected = [answers(seed) for seed in range(2)]
    without_python()
    for seed in (1, 0):
        for got, wanted in zip(answers(seed), expected[seed], strict=True):
            assert [t.stride() for t in got] == [t.stride() for t in wanted]
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("function", [attention, unfused_attention])
def test_kernels_with_a_workspace(
    function: Callable[..., Any], device: str, without_python: Callable[[], None]
) -> None:
    """Split kernels, whose CTAs meet, and the piped baseline's logits."""
    q, k, v = (rand(1, heads, n, 64, device=device, seed=n) for heads, n in ((4, 1), (2, 3000), (2, 3001)))
    v = v[:, :, :3000]
    expected = [function(q, k, v) for _ in range(2)]
    (prepared,) = calls._plain.values()
    assert prepared.plan.workspace_bytes > 0
    without_python()
    for _ in range(3):
        assert torch.equal(function(q, k, v), expected[0])
    planned = plan(q, k, v, kernel=prepared.plan.kernel.name, family=prepared.plan.kernel.family)
    out = torch.empty_like(q)
    planned.run(q, k, v, out)
    assert torch.equal(out, expected[0])


def test_the_struct_has_the_calls_addresses_and_nothing_else_of_it(module: ModuleType) -> None:
    recorder = Recorder()
    q, k, v = qkv("cpu")
    out, lse = torch.empty_like(q), torch.empty(SHAPE[:3])
    asked: list[tuple[Any, int]] = []

    def make_workspace(written: torch.Tensor, stream: int) -> tuple[object, int]:
        asked.append((written, stream))
        return None, 2**63 + 256

    made = recorder.launcher(module)
    assert made.run(q, k, v, out, lse) is True
    assert made.run(q, k, v, out, None) is True
    kept = bytes(Addresses(struct_size=5, workspace_bytes=2**40, mask=64, seqlens_k=128, philox_seed=3))
    with_workspace = recorder.launcher(module, make_workspace=make_workspace, addresses=kept)
    assert with_workspace.run(q, k, v, out, lse) is True
    tensors = {"q": q, "k": k, "v": v, "out": out}
    for plan_address, addresses, stream in recorder.seen:
        assert (plan_address, stream, addresses.struct_size) == (PLAN, None, 5)
        assert {name: getattr(addresses, name) for name in tensors} == {
            name: tensor.data_ptr() for name, tensor in tensors.items()
        }
    first, second, third = (addresses for _, addresses, _ in recorder.seen)
    assert (first.softmax_lse, second.softmax_lse) == (lse.data_ptr(), None)
    assert (first.workspace, first.workspace_bytes, first.split_arrivals) == (None, 9, None)
    assert (third.workspace, third.workspace_bytes, third.split_arrivals) == (2**63 + 256, 2**40, None)
    assert (third.mask, third.seqlens_k, third.philox_seed) == (64, 128, 3)
    assert len(asked) == 1
    assert asked[0][0] is out
    assert asked[0][1] == 0


def test_a_view_begins_where_it_begins(module: ModuleType) -> None:
    recorder = Recorder()
    q = rand(1, 2, 9, 64, device="cpu")
    part = q[:, 1:, 4:]
    recorder.launcher(module).run(part, part, part, part, None)
    assert recorder.seen[0][1].q == part.data_ptr() == q.data_ptr() + 2 * (9 * 64 + 4 * 64)


@pytest.mark.parametrize("place", range(5))
def test_what_is_no_tensor_with_memory_is_left_alone(place: int, module: ModuleType) -> None:
    recorder = Recorder()
    made = recorder.launcher(module)
    tensors = [*qkv("cpu"), rand(*SHAPE, device="cpu"), torch.empty(SHAPE[:3])]
    others = [
        "text",
        tensors[place].numpy(),
        tensors[place].to("meta"),
        tensors[place].as_subclass(Subclass),
        torch.nn.Parameter(tensors[place]),
    ]
    if place < 4:
        others.append(None)
    for other in others:
        assert made.run(*tensors[:place], other, *tensors[place + 1 :]) is False
    assert recorder.seen == []
    assert made.run(*tensors) is True


def test_a_failed_launch_says_what_failed(module: ModuleType) -> None:
    statuses = []

    def fail(status: int) -> None:
        statuses.append(status)
        raise HostCheckError("kernel and problem")

    tensors = [*qkv("cpu"), rand(*SHAPE, device="cpu"), None]
    with pytest.raises(HostCheckError, match="kernel and problem"):
        Recorder(status=4).launcher(module, fail=fail).run(*tensors)
    assert statuses == [4]
    with pytest.raises(RuntimeError, match="failed with status 4"):
        Recorder(status=4).launcher(module, fail=lambda status: None).run(*tensors)


def test_the_plans_failure_names_kernel_and_problem(device: str) -> None:
    bound = plan(*qkv(device))._plan
    refused = bytes(Addresses(struct_size=1))
    made = launcher.make_launcher(bound.library, str(bound), bound._native, bound.device, refused, None)
    q, k, v = qkv(device)
    with pytest.raises(Exception, match=rf"{bound.kernel.name} on .*struct_size is 1"):
        made.run(q, k, v, torch.empty_like(q), None)


def test_a_workspace_that_cannot_be_made_is_the_callers_to_know(module: ModuleType) -> None:
    recorder = Recorder()
    tensors = [*qkv("cpu"), rand(*SHAPE, device="cpu"), None]

    def make_workspace(out: torch.Tensor, stream: int) -> tuple[object, int]:
        raise MemoryError("no workspace")

    with pytest.raises(MemoryError, match="no workspace"):
        recorder.launcher(module, make_workspace=make_workspace).run(*tensors)
    with pytest.raises(TypeError):
        recorder.launcher(module, make_workspace=lambda out, stream: (None,)).run(*tensors)
    assert recorder.seen == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"addresses": bytes(143)}, "addresses has 143 bytes; allowed are 144"),
        ({"device_type": 3}, "device_type is 3; allowed are 1"),
        ({"exchange": 5}, "PyCapsule_GetPointer"),
    ],
    ids=["addresses", "device_type", "exchange"],
)
def test_a_launcher_of_nonsense_is_not_made(
    changes: dict[str, Any], message: str, module: ModuleType
) -> None:
    with pytest.raises(ValueError, match=message):
        Recorder().launcher(module, **changes)


def test_signatures_that_were_dropped_come_back(device: str, without_python: Callable[[], None]) -> None:
    def answer(rows: int) -> torch.Tensor:
        return attention(*(tensor[:, :, :rows] for tensor in qkv(device)), scale=1 / (1 + rows))

    first = answer(1)
    for rows in range(1, 10):
        for _ in range(2):
            answer(rows)
    for scale in range(40):
        for _ in range(2):
            attention(*qkv(device), scale=1 / (100 + scale))
    for _ in range(2):
        assert torch.equal(answer(1), first)
    without_python()
    assert torch.equal(answer(1), first)
    with pytest.raises(TypeError, match="NoneType"):
        answer(2)


def test_options_that_may_change_are_never_known(device: str) -> None:
    class Scale(float):
        pass

    results = [attention(*qkv(device), scale=Scale(0.5)) for _ in range(3)]
    assert call_table.table is None
    assert torch.equal(attention(*qkv(device), scale=0.5), results[2])


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_can_be_left_out() -> None:
    code = (
        "import torch, sdpa_cutlass\n"
        "from sdpa_cutlass.call import call_table; from sdpa_cutlass.library import launcher\n"
        "q = torch.ones(1, 1, 4, 64).half()\n"
        "for _ in range(3): sdpa_cutlass.attention(q, q, q)\n"
        "print(launcher.is_used(), call_table.table)"
    )
    assert run_python(code, SDPA_CUTLASS_LAUNCHER="off").stdout == "False None\n"
    assert run_python(code, SDPA_CUTLASS_LAUNCHER="").stdout.startswith("True <")


_REFUSED = """
import torch, sdpa_cutlass
from sdpa_cutlass.library import abi
q = torch.randn(1, 2, 9, 64).half()
out = torch.full_like(q, float("nan"))
packed, lengths = torch.randn(9, 2, 64).half(), torch.tensor([0, 9], dtype=torch.int32)
def run():
    with sdpa_cutlass.enabled(devices="cpu"):
        out.copy_(torch.nn.functional.scaled_dot_product_attention(q, q, q))
for call in (
    lambda: sdpa_cutlass.attention(q, q, q, out=out),
    lambda: sdpa_cutlass.attention(q, q, q, out=out, attn_mask=torch.ones(9, 9, dtype=torch.bool)),
    lambda: sdpa_cutlass.unfused_attention(q, q, q, out=out),
    lambda: sdpa_cutlass.attention_varlen(packed, packed, packed, lengths, lengths, 9, 9),
    lambda: sdpa_cutlass.plan(q, q, q).run(q, q, q, out),
    run,
):
    try: call()
    except sdpa_cutlass.SdpaError as error: print(type(error).__name__, error)
print("kernel ran:", bool(out.isfinite().any()), "library loaded:", bool(abi._loaded))
"""


def test_a_wrong_variable_is_told_before_a_kernel_runs() -> None:
    """Everywhere, and at the start of enabled(): no call is computed twice."""
    told = run_python(_REFUSED, SDPA_CUTLASS_LAUNCHER="no")
    *errors, end = told.stdout.splitlines()
    assert end == "kernel ran: False library loaded: False", told.stderr
    assert errors == ["ArgumentError SDPA_CUTLASS_LAUNCHER is 'no'; allowed is 'off', or nothing"] * 6


def test_a_launcher_that_is_refused_is_told_before_a_kernel_runs(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> None:
    def refuse() -> None:
        raise UntrustedLibraryError("the launcher")

    monkeypatch.setattr(abi, "_loaded", {})
    monkeypatch.setattr(locate, "locate_launcher", refuse)
    monkeypatch.setattr(launcher, "module", launcher.module.__wrapped__)
    launched: list[object] = []
    monkeypatch.setattr(launch.Plan, "launch_at", lambda *arguments: launched.append(arguments))
    for _ in range(2):
        forget()
        with pytest.raises(UntrustedLibraryError, match="the launcher"):
            attention(*qkv("cpu"))
        with pytest.raises(UntrustedLibraryError, match="the launcher"), enabled(devices="cpu"):
            pytest.fail("calls would be computed twice")
    assert launched == []


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the launcher as a package has it, listed in libraries.json."""
    source = locate.locate_launcher()
    assert source is not None
    package = tmp_path / "sdpa_cutlass"
    package.mkdir(mode=0o755)
    monkeypatch.setattr(locate, "__file__", str(package / "library" / "locate.py"))
    copy = package / locate.LAUNCHER
    shutil.copyfile(source, copy)
    copy.chmod(0o644)
    digest = hashlib.sha256(copy.read_bytes()).hexdigest()
    (package / locate.HASHES).write_text(json.dumps({copy.name: digest}))
    return copy


def test_an_installed_launcher_is_found_and_is_the_one_that_was_built(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate.locate_launcher() == installed
    found = launcher.module.__wrapped__()
    assert found is not None
    assert found.__file__ == str(installed)
    with monkeypatch.context() as without_stable_abi:
        without_stable_abi.setattr(importlib.machinery, "EXTENSION_SUFFIXES", [".so"])
        assert launcher.module.__wrapped__() is None
    for name, other in (("__version__", "0.0.7"), ("_INTERFACE", 1)):
        with monkeypatch.context() as another_package:
            another_package.setattr(launcher, name, other)
            assert launcher.module.__wrapped__() is None
    installed.unlink()  # what is loaded stays as it is
    installed.write_bytes(b"another one")
    installed.chmod(0o644)
    with pytest.raises(LibraryMismatchError, match="SDPA_CUTLASS_LAUNCHER=off"):
        locate.locate_launcher()
    installed.with_name(locate.HASHES).unlink()
    with pytest.raises(LibraryMismatchError, match=r"libraries\.json.*SDPA_CUTLASS_LAUNCHER=off"):
        locate.locate_launcher()
    installed.unlink()
    assert locate.locate_launcher() is None


def test_a_launcher_that_anyone_can_write_is_refused(installed: Path) -> None:
    installed.chmod(0o666)
    with pytest.raises(UntrustedLibraryError, match="anyone can write"):
        launcher.module.__wrapped__()


def test_torch_without_the_exchange_takes_the_way_through_python(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(launcher, "exchange", lambda: None)
    results = [attention(*qkv(device)) for _ in range(3)]
    assert call_table.table is None
    assert torch.equal(results[0], results[2])
    tensors = qkv(device)
    with pytest.raises(ArgumentError, match="overlaps"):
        attention(*tensors, out=tensors[0])
