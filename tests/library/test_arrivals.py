"""Where the CTAs of split kernels meet, and what else outlives a call.

Counters are the library's own: launches that may overlap share none, and all are zero between launches. Calls
keep no memory of torch's, which could be that of a CUDA graph.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sdpa_cutlass import attention, attention_varlen, plan
from sdpa_cutlass.call import calls, launch
from tests.host_compiler import compiler, include_flags
from tests.library.reference import decoding, expect_close, rand, softmax_lse, torchs_attention

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    *("streams", "prepared", "threads", "a_handle_that_comes_back", "captures", "the_callers_own"),
    *("the_first_call_may_be_captured", "the_pool_grows_and_has_an_end", "short_of_memory"),
)


# ---- the CUDA backend, on a CUDA runtime of the test's ----


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counters") / "cuda_counters_test"
    sources = [
        Path(__file__).with_name("cuda_counters_test.cpp"),
        ROOT / "templates" / "src" / "backend_cuda.cpp",
    ]
    folders = [f"-I{ROOT / 'templates' / folder}" for folder in ("include", "src")]
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *folders, *include_flags()]
    subprocess.run([compiler(), *flags, *sources, "-o", path, "-lpthread"], check=True)
    return path


def test_all_cases_are_run(program: Path) -> None:
    listed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert sorted(listed) == sorted(CASES)


@pytest.mark.parametrize("case", CASES)
def test_counters_of_the_cuda_library(case: str, program: Path) -> None:
    done = subprocess.run([program, case], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# ---- what outlives a call ----


@pytest.fixture
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is a first one."""
    monkeypatch.setattr(calls.call_table, "table", None)
    monkeypatch.setattr(calls.call_table, "latest", None)
    monkeypatch.setattr(calls, "_latest", (calls.Plans(), (None,), None))
    for module, name in ((calls, "_plain"), (calls, "_general"), (calls, "_packed")):
        monkeypatch.setattr(module, name, calls.Plans())


def memory_in_use() -> dict[int, tuple[torch.Size, torch.dtype]]:
    """What is alive of torch's memory: (shape, dtype) of a tensor for each address."""
    gc.collect()
    tensors = (found for found in gc.get_objects() if type(found) is torch.Tensor)
    return {found.data_ptr(): (found.shape, found.dtype) for found in tensors if found.data_ptr()}


@pytest.mark.usefixtures("_nothing_known")
@pytest.mark.parametrize("repeats", [1, 3])
def test_a_call_keeps_no_memory(repeats: int, device: str) -> None:
    """A first call, and known ones: split, with softmax_lse, with dropout, packed, and in a thread."""
    split, short = decoding(device), [rand(1, 2, 9, 64, device=device, seed=seed) for seed in range(3)]
    packed = [tensor[0].transpose(0, 1).contiguous() for tensor in short]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 9, "max_seqlen_k": 9}

    def call() -> None:
        attention(*split, return_lse=True)
        attention(*split)
        attention(*short, return_lse=True, p_dropout=0.5)
        attention_varlen(*packed, **options, return_lse=True)

    before = memory_in_use()
    for _ in range(repeats):
        call()
    if device == "cpu":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
    kept = memory_in_use()
    assert calls._plain
    assert calls._packed
    assert [kept[address] for address in kept.keys() - before.keys()] == []


@pytest.mark.parametrize("options", [{}, {"seqlens_k": True}], ids=["plain", "general"])
@pytest.mark.parametrize("shape", [(2, 3, 9, 64), (3, 9, 64), (1, 1, 9, 64)], ids=str)
def test_softmax_lse_of_known_calls_is_as_that_of_the_first(
    shape: tuple[int, ...], options: dict[str, object], device: str
) -> None:
    tensors = [rand(*shape, device=device, seed=seed) for seed in range(3)]
    if options:
        options = {"seqlens_k": torch.tensor([7] * (1 if len(shape) == 3 else shape[0]), device=device).int()}
    found = [attention(*tensors, scale=0.17, return_lse=True, **options)[1] for _ in range(4)]
    for lse in found:
        assert (lse.shape, lse.stride(), lse.dtype) == (shape[:-1], found[0].stride(), torch.float32)
        assert lse.is_contiguous()
        assert torch.equal(lse, found[0])
    assert len({lse.data_ptr() for lse in found}) == len(found)


@pytest.mark.usefixtures("_nothing_known")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["out", "lse"])
@pytest.mark.parametrize("is_split", [True, False], ids=["split", "one CTA"])
def test_nothing_of_a_fake_tensor_mode_is_kept(is_split: bool, options: dict[str, bool]) -> None:
    """In the mode, torch makes tensors without memory. What becomes of the call there is another matter."""
    tensors = decoding("cpu", keys=3000 if is_split else 9)

    def call() -> None:
        out = torch.empty_like(tensors[0])
        for known in (False, True):
            with FakeTensorMode(allow_non_fake_inputs=True), contextlib.suppress(Exception):
                attention(*tensors, out=out if known else torch.empty_like(tensors[0]), **options)
        for _ in range(3):
            found = attention(*tensors, out=out, **options)
            expect_close(out, torchs_attention(*tensors, enable_gqa=True))
            if options:
                lse = softmax_lse(tensors[0], tensors[1].repeat_interleave(4, 1))
                torch.testing.assert_close(found[1], lse, atol=1e-4, rtol=1e-5)

    with FakeTensorMode():  # torch 2.11 without a GPU crashes when the first thread that enters it has ended
        pass
    with ThreadPoolExecutor(1) as pool:  # a thread that has called nothing before
        pool.submit(call).result()


FAILED_LAUNCHES = """
import ctypes, os, resource, signal, torch, sdpa_cutlass
from sdpa_cutlass import HostCheckError, attention, plan
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.structs import MAX_TILES, Params
from sdpa_cutlass.library.locate import Target

def tensors():
    return [torch.randn(1, heads, rows, 64).half() for heads, rows in ((8, 2), (2, 3000), (2, 3000))]

torch.manual_seed(0)
given = tensors()
host = library(Target.HOST)
host.host_configure(num_threads=1)
expected = attention(*given)
out = torch.empty_like(expected)
planned = plan(*given)._plan
assert planned.num_splits > 1
counters = torch.zeros(MAX_TILES, dtype=torch.int32)

def with_own_counters():
    params = sdpa_cutlass.call.launch.make_params(planned.problem, 0.125, *given, out, None)
    params.num_splits, params.workspace_bytes = planned.num_splits, planned.workspace_bytes
    room, params.workspace = planned._make_workspace(out, 0)
    params.split_arrivals = counters.data_ptr()
    host.check(host.launch_function(planned.kernel.index, ctypes.byref(params), 0, None), "own counters")
    return out

with_own_counters()
def attempt(run, mebibytes):
    # 0: there was enough memory, 1: the launch failed and the next one was right, 2: it was wrong
    pages = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
    limit = 1024 * int(pages.split()[1]) + mebibytes * 2**20
    host.host_configure(num_threads=2)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        run()
        return 0
    except HostCheckError:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        host.host_configure(num_threads=1)
        return 1 if not counters.any() and torch.equal(run(), expected) else 2

# The first OS thread has memory for its CTA from the launches above. A second one starts with a stack of
# 8 MiB, and fails for want of more. Where glibc itself runs out of memory, it ends the process.
for name, run in {"attention": lambda: attention(*given), "own counters": with_own_counters}.items():
    found = []
    for mebibytes in range(10, 40, 4):
        process = os.fork()
        if process == 0:
            os._exit(attempt(run, mebibytes))
        found.append(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
    assert 2 not in found, f"{name} after a failed launch: {found}"
    assert 1 in found, f"{name}: no launch failed: {found}"
    assert set(found) <= {0, 1, -signal.SIGABRT}, f"{name}: {found}"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is limited as Linux does")
def test_a_failed_launch_leaves_no_counts() -> None:
    """Memory runs out while some CTAs of a tile have counted themselves in."""
    command = [sys.executable, "-W", "ignore", "-c", FAILED_LAUNCHES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# ---- threads and streams ----


def test_threads_may_decode_in_parallel() -> None:
    """One plan, several threads: each launch meets at counters of its own."""
    tensors = [decoding("cpu", seed) for seed in range(4)]
    planned = plan(*tensors[0])
    assert planned._plan.num_splits > 1
    expected = [attention(*given, kernel=planned.kernel.name) for given in tensors]
    expect_close(expected[0], torchs_attention(*tensors[0], enable_gqa=True))
    barrier = threading.Barrier(len(tensors))

    def decode(given: list[torch.Tensor], wanted: torch.Tensor) -> bool:
        barrier.wait()
        out = torch.empty_like(wanted)
        same = []
        for _ in range(20):
            out.zero_()
            planned.run(*given, out)
            same.append(torch.equal(out, wanted))
        return all(same)

    with ThreadPoolExecutor(len(tensors)) as pool:
        assert all(pool.map(decode, tensors, expected))


class FakeTorch:
    """torch.cuda's streams, and where `empty` was called."""

    uint8 = torch.uint8

    def __init__(self, *, is_capturing: bool) -> None:
        self.current: tuple[object, ...] = ("cuda:0", "stream 0 of 0")
        self.made: list[tuple[object, ...]] = []
        self.recorded: list[object] = []
        self.cuda = SimpleNamespace(
            device=lambda device: self.inside(str(device), f"stream 2 of {device.index}"),
            stream=lambda stream: self.inside(self.current[0], stream),
            Stream=lambda index: f"another stream of {index}",
            current_stream=lambda device: f"stream 2 of {device.index}",
            is_current_stream_capturing=lambda: is_capturing and self.current[0] == "cuda:1",
        )

    @contextlib.contextmanager
    def inside(self, *place: object) -> Iterator[None]:
        before, self.current = self.current, place
        yield
        self.current = before

    def empty(self, size: int, dtype: torch.dtype, device: object) -> SimpleNamespace:
        assert (dtype, str(device)) == (torch.uint8, "cuda:1")
        self.made.append((size, *self.current))
        return SimpleNamespace(data_ptr=lambda: 255, record_stream=self.recorded.append)


@pytest.mark.parametrize(
    ("stream", "is_capturing", "made_on", "recorded"),
    [
        (0, False, ("cuda:0", "stream 0 of 0"), []),
        (64, False, ("cuda:0", "stream 0 of 0"), []),
        (2, False, ("cuda:1", "another stream of 1"), ["stream 2 of 1"]),
        (2, True, ("cuda:1", "stream 2 of 1"), []),
    ],
)
def test_threads_share_no_workspace_on_their_default_streams(
    stream: int,
    is_capturing: bool,
    made_on: tuple[object, ...],
    recorded: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's allocator takes them for one: it would give a thread what another's kernel still uses."""
    planned = plan(*decoding("cpu"))._plan
    fake = FakeTorch(is_capturing=is_capturing)
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    launch._stream_to_allocate_on.cache_clear()
    try:
        _, address = planned._make_workspace(SimpleNamespace(device=torch.device("cuda", 1)), stream)  # type: ignore[arg-type]
    finally:
        launch._stream_to_allocate_on.cache_clear()
    assert address == 256
    assert fake.made == [(planned.workspace_bytes + 256, *made_on)]
    assert fake.recorded == recorded
