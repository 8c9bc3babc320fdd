"""Measuring: a problem's candidate kernels, each checked and timed; and problem after problem.

Each kernel first runs once, with its log-sum-exp, and is held to the numerics rule (accuracy.py). Those that
pass are timed side by side on the same inputs (timing.py), and what the timed calls left behind is checked
again: only a kernel whose timed output is right counts as measured. The reference is made once a problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from sdpa_cutlass.choice.select import families_with_plain, order, ranking
from sdpa_cutlass.cli import measure as measuring
from sdpa_cutlass.cli import providers
from sdpa_cutlass.cli.accuracy import Errors, Reference, make_reference
from sdpa_cutlass.cli.providers import OwnCall, describe_failure
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.timing import Contestant, Timing, time_on_cpu, time_on_gpu
from sdpa_cutlass.cli.tuning.journal import Entry, Measured, Writer
from sdpa_cutlass.cli.tuning.tasks import Task
from sdpa_cutlass.library.abi import Library
from sdpa_cutlass.library.device import DeviceInfo
from sdpa_cutlass.library.registry import Family, KernelInfo
from sdpa_cutlass.problem import DType, Problem

if TYPE_CHECKING:
    import torch

REPEATS = 25
BUDGET_S = 0.06  # of GPU time for each kernel of a problem
SURE_CANDIDATES = 7
HOPEFUL = 1.5  # times the cost model's best: what it holds to be slower than that is not tried


class Posed(Protocol):
    """A problem that can be measured: a Task, or anything else that has these."""

    @property
    def case(self) -> Case: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def name(self) -> str: ...
    @property
    def problem(self) -> Problem: ...


Measure = Callable[[Task, Sequence[KernelInfo]], list[Measured]]


class GpuLostError(Exception):
    """The device answers no more; the message names the kernel that ran last."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a sweep came to. `ended`: why it stopped before the last task, or None."""

    measured: int
    kept: int  # tasks that the journal had already
    left: int  # tasks that it did not come to
    ended: str | None = None
    skipped: tuple[str, ...] = ()  # tasks that could not be measured, and why


def candidates(
    library: Library, task: Posed, device: DeviceInfo, *, glob: str | None = None, everything: bool = False
) -> list[KernelInfo]:
    """The kernels to measure at `task`, the cost model's best first.

    Unless `everything` is wanted: no general kernel where plain ones serve, but for split ones that have a
    gain, and of all the SURE_CANDIDATES best by the cost model and what it holds to be at most HOPEFUL times
    slower than the best.
    """
    ranked = [
        (kernel, cost)
        for kernel, cost in ranking(library, task.problem, Family.FMHA_FWD, device)
        if glob is None or fnmatch.fnmatchcase(kernel.name, glob)
    ]
    if not everything:
        plain = families_with_plain(kernel for kernel, _ in ranked)
        ranked = [
            (kernel, cost) for kernel, cost in ranked if not order(kernel, cost, task.problem, plain)[0]
        ]
        ranked = [
            pair
            for place, pair in enumerate(ranked)
            if place < SURE_CANDIDATES or pair[1].cycles <= HOPEFUL * ranked[0][1].cycles
        ]
    return [kernel for kernel, _ in ranked]


def run(
    tasks: Sequence[Task],
    *,
    candidates_of: Callable[[Task], list[KernelInfo]],
    measure: Measure,
    writer: Writer,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
    advance: Callable[[str, int], None] = lambda text, steps: None,
) -> Outcome:
    """Measures the tasks one by one, and journals each. An interrupt or a spent budget ends it early.

    Of a task that is in the journal, only the kernels that are not. Raises GpuLostError; what was measured
    before is in the journal.
    """
    start, measured, kept, done = clock(), 0, 0, 0
    ended: str | None = None
    skipped: list[str] = []
    for task in tasks:
        if budget_s is not None and clock() - start >= budget_s:
            ended = f"the budget of {budget_s:g} s is spent"
        else:
            advance(task.name, 0)
            wanted = candidates_of(task)
            known = writer.journal.measured_kernels(task.name)
            missing = [kernel for kernel in wanted if kernel.name not in known]
            try:
                if not missing:
                    kept += bool(wanted)
                else:
                    found = measure(task, missing)
                    writer.add(_entry(task, found), missing)
                    measured += 1
            except KeyboardInterrupt:
                ended = "interrupted"
            except measuring_failures() as error:
                skipped.append(f"{task.name}: {describe_failure(error)}")
        if ended is not None:
            break
        done += 1
        advance(task.name, 1)
    left = len(tasks) - done
    return Outcome(measured=measured, kept=kept, left=left, ended=ended, skipped=tuple(skipped))


def measuring_failures() -> tuple[type[Exception], ...]:
    """What can keep one problem from being measured, and no other: its inputs do not fit, say."""
    import torch

    return (torch.cuda.OutOfMemoryError, MemoryError)


def _entry(task: Task, found: Sequence[Measured]) -> Entry:
    return Entry(case=task.name, problem=task.problem, bucket=task.bucket, measured=tuple(found))


class Measurer:
    """Measures kernels on one torch device. On a CPU the times are those of the emulation."""

    def __init__(self, device: torch.device, *, seed: int, repeats: int, budget_s: float = BUDGET_S) -> None:
        self._device = device
        self._seed = seed
        self._repeats = repeats
        self._budget_s = budget_s

    def __call__(self, task: Posed, kernels: Sequence[KernelInfo]) -> list[Measured]:
        """Every kernel at `task`, in order. Raises GpuLostError, or torch's error when memory is short."""
        fused = providers.ALL["fused"]
        settings = measuring.Settings(
            device=self._device,
            dtype=task.dtype.value,
            providers=[fused],
            seed=self._seed,
            repeats=self._repeats,
            budget_s=self._budget_s,
        )
        inputs = measuring.input_sets(task.case, settings)
        calls = [providers.own_call(fused, task.case, operands) for operands in inputs]
        reference = make_reference(
            inputs[0].qkv,
            causal=task.case.causal,
            seed=self._seed,
            conditions=inputs[0].conditions,
            max_scores=measuring.PLAIN_CHECKED_SCORES,
            offset=task.problem.causal_offset,
        )
        trials = {kernel.name: _Trial(kernel.name, calls, reference) for kernel in kernels}
        for trial in trials.values():
            trial.first_run()
            self._check_alive(task, trial)
        self._time(task, trials)
        return [trial.result(self._device.type) for trial in trials.values()]

    def _time(self, task: Posed, trials: dict[str, _Trial]) -> None:
        contestants = {name: trial.contestant() for name, trial in trials.items() if trial.failure is None}

        def failed(name: str, error: Exception) -> None:
            trials[name].failure = describe_failure(error)
            self._check_alive(task, trials[name])

        if self._device.type == "cuda":
            timings = time_on_gpu(
                contestants, budget_s=self._budget_s, max_replays=self._repeats, failed=failed
            )
        else:
            timings = time_on_cpu(contestants, repeats=self._repeats, failed=failed)
        for name, timing in timings.items():
            trials[name].timing = timing
            trials[name].check_timed(contestants[name])
            self._check_alive(task, trials[name])

    def _check_alive(self, task: Posed, trial: _Trial) -> None:
        """Raises GpuLostError when `trial` left the device unusable, as an illegal address does."""
        if self._device.type != "cuda" or trial.failure is None:
            return
        import torch

        try:
            torch.cuda.synchronize(self._device)
            torch.zeros(1, device=self._device).item()
        except RuntimeError as error:
            text = str(error).strip().splitlines()[0]
            raise GpuLostError(f"{trial.kernel} at {task.name} left the GPU unusable: {text}") from error


class _Trial:
    """One kernel at one problem: what is known so far."""

    def __init__(self, kernel: str, calls: Sequence[OwnCall], reference: Reference) -> None:
        self.kernel = kernel
        self._calls = calls
        self._reference = reference
        self._errors: Errors | None = None
        self.timing: Timing | None = None
        self.failure: str | None = None

    def first_run(self) -> None:
        """Runs the kernel once and checks output and log-sum-exp."""
        try:
            out, lse = self._calls[0](kernel=self.kernel, return_lse=True)
            self._errors = self._reference.check(out, lse)
        except Exception as error:
            self.failure = describe_failure(error)
        else:
            if self._errors.violation:
                self.failure = f"wrong: {self._errors.violation}"

    def contestant(self) -> Contestant:
        """What is timed: a call into an output of its own, for every input set."""
        import torch

        outs = [torch.empty_like(call.tensors[0]) for call in self._calls]

        def call(index: int) -> torch.Tensor:
            self._calls[index](kernel=self.kernel, out=outs[index])
            return outs[index]

        return Contestant(call, contextlib.nullcontext, len(outs))

    def check_timed(self, contestant: Contestant) -> None:
        """Checks what the timed calls left: the first set against the reference, the others for NaN."""
        if self.failure is not None:
            return
        try:
            errors = self._reference.check(contestant.outputs[0], None)
            unwritten = sum(bool(out.isnan().any()) for out in contestant.outputs.values())
        except Exception as error:
            self.failure = describe_failure(error)
            return
        if unwritten:
            self.failure = f"wrong: {unwritten} of {len(contestant.outputs)} timed outputs hold NaN"
        elif errors.violation:
            self.failure = f"wrong: in the timed run, {errors.violation}"
        elif self._errors is not None:
            worst = max(self._errors.max_err_out, errors.max_err_out)
            self._errors = dataclasses.replace(self._errors, max_err_out=worst)

    def result(self, device_type: str) -> Measured:
        """What the journal gets."""
        timing, errors = self.timing, self._errors
        gpu_us = spread = None
        if timing is not None:
            gpu_us = timing.gpu_us if device_type == "cuda" else timing.wall_us
            spread = timing.gpu_us_spread
        failure = self.failure or (None if gpu_us else "error: it was not timed")
        return Measured(
            kernel=self.kernel,
            gpu_us=gpu_us,
            gpu_us_spread=spread,
            max_err_out=errors.max_err_out if errors else None,
            max_err_lse=errors.max_err_lse if errors else None,
            status=failure or "ok",
        )
