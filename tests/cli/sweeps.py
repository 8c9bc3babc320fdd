"""A sweep on the host library with made-up times, for the tests of `tune`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from sdpa_cutlass import KernelInfo
from sdpa_cutlass.choice.tuned_table import HeadDims
from sdpa_cutlass.cli import make_parser
from sdpa_cutlass.cli.tuning import command, journal, sweep, tasks
from sdpa_cutlass.cli.tuning.journal import Journal, Measured, Writer
from sdpa_cutlass.cli.tuning.tasks import Task
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.device import HOST
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import read_kernels

ENV = {
    "gpu": None,
    "driver": "580.0",
    "torch": "2.13.0",
    "date": "2026-11-21T03:00:00+00:00",
    "library": {"version": "0.1.0", "digest": "0123456789abcdef"},
}


def made_up_us(task: Task, kernel: KernelInfo) -> float:
    """Grows with the size of the tile, against what the cost model holds of small problems."""
    return 5.0 + kernel.block_m * kernel.block_n / 4096 + kernel.stages / 10 + kernel.warps / 100


class FakeMeasurer:
    """Gives made-up times, and fails where it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.wrong: Callable[[Task, KernelInfo], bool] = lambda task, kernel: False
        self.raises: dict[int, BaseException] = {}  # at which call

    def __call__(self, task: Task, kernels: Sequence[KernelInfo]) -> list[Measured]:
        number = len(self.asked)
        self.asked.append((task.name, tuple(kernel.name for kernel in kernels)))
        if number in self.raises:
            raise self.raises[number]
        found = []
        for kernel in kernels:
            status = "wrong: made up" if self.wrong(task, kernel) else "ok"
            found.append(
                Measured(
                    kernel=kernel.name,
                    gpu_us=made_up_us(task, kernel) if status == "ok" else None,
                    gpu_us_spread=0.1,
                    max_err_out=1.25e-4,
                    max_err_lse=float("nan") if status != "ok" else 1e-6,
                    status=status,
                )
            )
        return found


def fresh_journal(**changes: Any) -> Journal:
    values: dict[str, Any] = {"env": dict(ENV), "device": HOST, "seed": 0}
    return Journal(**{**values, **changes})


def options(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["tune", "--quiet", *arguments])


def host_tasks(*names: str, dtypes: Sequence[str] = ("f16",)) -> list[Task]:
    native = library(Target.HOST)
    return tasks.make_tasks(names or ("host",), dtypes, HeadDims(read_kernels(native)))


def run_tune(
    folder: Path,
    measurer: FakeMeasurer,
    *arguments: str,
    names: Sequence[str] = ("host",),
    resume: bool = False,
) -> int:
    """What the command does after it has found a GPU, with made-up times; writes table.json in `folder`."""
    found = options(*arguments)
    found.suite, found.dtype = tuple(names), ("f16",)
    writer = command.open_journal(folder / "journal.jsonl", fresh_journal(), resume=resume)
    try:
        return command.sweep_and_write(
            found, library(Target.HOST), HOST, writer, measurer, folder / "table.json", Console(width=140)
        )
    finally:
        writer.close()


def swept(folder: Path, some: Sequence[Task], measurer: FakeMeasurer | None = None, **kwargs: Any) -> Journal:
    """The journal of a sweep over `some` tasks, read back from its file."""
    native, path = library(Target.HOST), folder / "journal.jsonl"
    writer = Writer(path, fresh_journal(), is_new=True)
    try:
        sweep.run(
            some,
            candidates_of=lambda task: sweep.candidates(native, task, HOST),
            measure=measurer or FakeMeasurer(),
            writer=writer,
            **kwargs,
        )
    finally:
        writer.close()
    return journal.read(path)
