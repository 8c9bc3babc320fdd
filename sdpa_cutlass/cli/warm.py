"""The `warm` command: kernels loaded ahead, so that the first call of a process does not wait for a compiler.

Where the library has machine code for the GPU, loading takes milliseconds. Where it has PTX only, the driver
compiles a unit as a whole when its first kernel is loaded, which takes seconds, and keeps the result in its
cache on disk (CUDA_CACHE_PATH, at most CUDA_CACHE_MAXSIZE bytes): that is what this command is for. It runs
no kernel and needs no torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import time
from collections.abc import Callable, Sequence

from sdpa_cutlass.choice.legal import unsupported
from sdpa_cutlass.choice.select import choose_first
from sdpa_cutlass.cli import FAILED, OK, CommandError, running
from sdpa_cutlass.cli.profiling.problems import ShapeError, parse_shape
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.tuning.tasks import problem_of
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.device import DeviceInfo, check_can_serve, cuda_device
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, read_kernels
from sdpa_cutlass.problem import ATTENTION_DTYPES, DType

SLOW_S = 0.5  # what takes longer was compiled
SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Loaded:
    """One kernel: the seconds that loading took, or why it could not be loaded."""

    kernel: str
    seconds: float
    failure: str | None = None


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    running.require(["rich"])
    try:
        cases = [parse_shape(text) for text in options.shape]
    except ShapeError as error:
        raise CommandError(str(error)) from error
    try:
        native = library(Target.CUDA)
        device = cuda_device(options.gpu)
        check_can_serve(native.build, device)
    except SdpaError as error:
        raise CommandError(str(error)) from error
    dtypes = [DType(options.dtype)] if options.dtype else list(ATTENTION_DTYPES)
    kernels = wanted(native, device, cases, options.kernels, dtypes)
    console = running.make_console()
    with running.progress(console, len(kernels), quiet=options.quiet) as advance:
        found = load(native, device, kernels, advance)
    for line in report(found, device):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return FAILED if any(one.failure for one in found) else OK


def wanted(
    native: Library,
    device: DeviceInfo,
    cases: Sequence[Case],
    globs: Sequence[str],
    dtypes: Sequence[DType],
) -> list[KernelInfo]:
    """The kernels to load, each once, in the library's order. Raises CommandError when there is none."""
    rows = [row for row in read_kernels(native) if unsupported(row, native, device) is None]
    if cases:
        problems = [problem_of(case, dtype) for case in cases for dtype in dtypes]
        chosen = {choose_first(native, problem, device) for problem in problems}
        rows = [row for row in rows if row.name in chosen]
    else:
        rows = [row for row in rows if row.dtype in dtypes or row.dtype not in ATTENTION_DTYPES]
    if globs:
        rows = [row for row in rows if any(fnmatch.fnmatchcase(row.name, glob) for glob in globs)]
    if not rows:
        raise CommandError("no kernel is left to load: `info --kernels` lists those of the library")
    return rows


def load(
    native: Library,
    device: DeviceInfo,
    kernels: Sequence[KernelInfo],
    advance: Callable[[str, int], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Loaded]:
    """Loads the kernels one after the other."""
    found = []
    for kernel in kernels:
        advance(kernel.name, 0)
        begin, failure = clock(), None
        try:
            native.prepare(kernel.index, device.index)
        except SdpaError as error:
            failure = str(error).splitlines()[0]
        found.append(Loaded(kernel.name, clock() - begin, failure))
        advance(kernel.name, 1)
    return found


def report(found: Sequence[Loaded], device: DeviceInfo) -> list[str]:
    """Lines: how many in what time, what took long, what failed."""
    good = [one for one in found if one.failure is None]
    slow = sorted((one for one in good if one.seconds >= SLOW_S), key=lambda one: -one.seconds)
    seconds = sum(one.seconds for one in found)
    lines = [f"{len(good)} kernels are loaded on {device.name}: {seconds:.1f} s"]
    if slow:
        lines.append(f"{len(slow)} took more than {SLOW_S:g} s: the driver compiled their units")
        lines += [f"  {one.seconds:6.1f} s  {one.kernel}" for one in slow[:SHOWN]]
    lines += [f"not loaded: {one.kernel}: {one.failure}" for one in found if one.failure]
    return lines
