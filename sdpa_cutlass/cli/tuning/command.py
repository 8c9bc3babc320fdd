"""The `tune` command: measures and writes a table, or checks tables."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.choice import tuned_lookup, tuned_table
from sdpa_cutlass.choice.tuned_table import HeadDims
from sdpa_cutlass.cli import FAILED, OK, CommandError
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.tuning import derive, journal, show
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library.abi import Library, library
from sdpa_cutlass.library.device import DeviceInfo, check_can_serve, cuda_device
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, read_kernels

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from sdpa_cutlass.cli.tuning.tasks import Task

LEAST_WIDTH = 140


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    if options.check:
        return check(options.check)
    _require("rich")
    from rich.console import Console

    console = Console(width=max(LEAST_WIDTH, shutil.get_terminal_size().columns))
    if options.list:
        _, native = _any_library()
        for task in _tasks(options, HeadDims(read_kernels(native))):
            print(task.name)
        return OK
    return tune(options, console)


# ---- measuring ----


def tune(options: argparse.Namespace, console: Console) -> int:
    """Measures on a GPU and writes journal and table."""
    native, device, torch_device = _gpu(options.gpu)
    from sdpa_cutlass.cli import environment
    from sdpa_cutlass.cli.tuning import sweep

    out, journal_path = _paths(options, device)
    env = environment.record(torch_device)
    env["command"] = {"name": "tune", "repeats": sweep.REPEATS, "budget_s": sweep.BUDGET_S}
    measurer = sweep.Measurer(torch_device, seed=options.seed, repeats=sweep.REPEATS, budget_s=sweep.BUDGET_S)
    writer = open_journal(
        journal_path, journal.Journal(env=env, device=device, seed=options.seed), resume=options.resume
    )
    with contextlib.closing(writer):
        return sweep_and_write(options, native, device, writer, measurer, out, console)


def sweep_and_write(
    options: argparse.Namespace,
    native: Library,
    device: DeviceInfo,
    writer: journal.Writer,
    measure: Callable[[Task, Sequence[KernelInfo]], list[journal.Measured]],
    out: Path,
    console: Console,
) -> int:
    """Measures all tasks with `measure`, writes the table of what the journal then holds, and shows it."""
    from sdpa_cutlass.cli.tuning import sweep

    tasks = _tasks(options, HeadDims(read_kernels(native)))

    def candidates_of(task: Task) -> list[KernelInfo]:
        return sweep.candidates(native, task, device, glob=options.kernels, everything=options.all)

    lost: str | None = None
    from sdpa_cutlass.cli.running import progress  # it brings torch

    with progress(console, len(tasks), quiet=options.quiet) as advance:
        try:
            outcome = sweep.run(
                tasks,
                candidates_of=candidates_of,
                measure=measure,
                writer=writer,
                budget_s=options.budget,
                advance=advance,
            )
        except sweep.GpuLostError as error:
            lost = str(error)
    if lost is None:
        show.outcome(outcome, console)
    else:
        show.failed(lost, console)
    found = write_table(writer.journal, out, native, console)
    for name, where in sorted(writer.journal.failures.items()):
        show.failed(f"{name} is not selected: {where}", console)
    if lost or writer.journal.failures:
        return FAILED
    if not found:
        raise CommandError("no kernel was measured: --suite, --filter, --dtype and --kernels leave nothing")
    return OK


def write_table(found: journal.Journal, out: Path, native: Library, console: Console) -> bool:
    """Writes the table of a journal and shows it; False when the journal has nothing for one."""
    table = derive.make_table(found)
    if table is None:
        return False
    text = tuned_table.to_json(table)
    reason = tuned_table.misfit(tuned_table.from_json(text), read_kernels(native), found.device)
    if reason:  # with --resume, of a journal that another space of kernels was measured for
        raise CommandError(f"{out} is not written, because it would not be used: {reason}")
    try:
        write_atomically(out, text)
    except OSError as error:
        raise CommandError(f"cannot write {out}: {error.strerror or error}") from error
    show.table(derive.choices([found]), console)
    console.print(f"wrote {out}: {_effect(out, found.device)}", highlight=False, markup=False, soft_wrap=True)
    return True


def _effect(out: Path, device: DeviceInfo) -> str:
    """When the table `out` will count."""
    variable = tuned_lookup.TABLE_VARIABLE
    explicit = os.environ.get(variable)
    if explicit:
        if explicit == str(out.resolve()):
            return "new processes choose by it"
        return f"not in use, because {variable} is {explicit}"
    if out.resolve() in [path.resolve() for path in tuned_lookup.default_paths(device)]:
        return "new processes choose by it"
    return f"it counts where {variable} names it"


def open_journal(path: Path, fresh: journal.Journal, *, resume: bool) -> journal.Writer:
    """A writer for a new journal, or with `resume` one that goes on with what is there.

    Raises CommandError when a journal is there and must not be lost, or is of another device or library.
    """
    try:
        if not path.exists():
            return journal.Writer(path, fresh, is_new=True)
        if not resume:
            raise CommandError(f"{path} is there already: --resume goes on with it; or remove it first")
        found = journal.read(path)
        before, now = _sweep_key(found), _sweep_key(fresh)
        for what in now:
            if before[what] != now[what]:
                raise CommandError(
                    f"{path} cannot be resumed: its {what} is {before[what]}, and now it is {now[what]}"
                )
        journal.cut_torn_line(path)
        return journal.Writer(path, found, is_new=False)
    except journal.JournalError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot use {path}: {error.strerror or error}") from error


def _sweep_key(found: journal.Journal) -> dict[str, Any]:
    """What must not change within a journal."""
    built = found.env.get("library")
    return {
        "GPU": f"{found.device.name}, {found.device.sms} SMs",
        "library": built.get("digest") if isinstance(built, dict) else None,
        "driver": found.env.get("driver"),
        "torch": found.env.get("torch"),
        "seed": found.seed,
    }


def _gpu(index: int) -> tuple[Library, DeviceInfo, torch.device]:
    _require("torch")
    import torch

    if not torch.cuda.is_available():
        raise CommandError(
            "torch finds no GPU, and times on a CPU say nothing about one. "
            "Without a GPU there are --list and --check"
        )
    if not 0 <= index < torch.cuda.device_count():
        raise CommandError(f"--gpu {index}: torch finds {torch.cuda.device_count()} GPUs, numbered from 0")
    try:
        native, device = library(Target.CUDA), cuda_device(index)
        check_can_serve(native.build, device)
    except SdpaError as error:
        raise CommandError(str(error)) from error
    torch.cuda.set_device(index)
    torch.set_float32_matmul_precision("highest")
    return native, device, torch.device("cuda", index)


def _paths(options: argparse.Namespace, device: DeviceInfo) -> tuple[Path, Path]:
    out: Path | None = options.out
    if out is None:
        folder = tuned_lookup.cache_folder()
        if folder is None:
            raise CommandError("there is no home directory for the table: say where with --out FILE")
        out = folder / f"{tuned_lookup.file_stem(device.name)}.json"
    return out, options.journal or out.with_suffix(".journal.jsonl")


def _tasks(options: argparse.Namespace, head_dims: HeadDims) -> list[Task]:
    from sdpa_cutlass.cli.tuning.tasks import make_tasks, matching

    tasks = matching(make_tasks(options.suite, options.dtype, head_dims), options.filter)
    if not tasks:
        raise CommandError("no problem matches --filter; --list shows their names")
    return tasks


# ---- without a GPU ----


def check(paths: Sequence[Path]) -> int:
    """Says of every file whether it is a tuned table for the library; needs neither a GPU nor torch."""
    target, native = _any_library()
    is_good = True
    for path in paths:
        try:
            table = tuned_lookup.read(path)
            if table is None:
                raise tuned_table.TunedTableError("there is no such file")
            reason = tuned_table.misfit(table, read_kernels(native), None)
            if reason:
                raise tuned_table.TunedTableError(reason)
        except tuned_table.TunedTableError as error:
            print(f"{path}: not valid: {error}")
            is_good = False
            continue
        same = (
            "the library here" if table.digest == native.build.digest else "another library than the one here"
        )
        print(
            f"{path}: valid for the {target.value} library: {table.gpu}, {len(table.rows)} rows, measured "
            f"{table.date} with {same}, driver {table.driver}, torch {table.torch}"
        )
    return OK if is_good else FAILED


def _any_library() -> tuple[Target, Library]:
    """The CUDA library, or else the host library: both have the same kernels when built from one space."""
    try:
        return Target.CUDA, library(Target.CUDA)
    except SdpaError as error:
        try:
            return Target.HOST, library(Target.HOST)
        except SdpaError:
            raise CommandError(str(error)) from error


def _require(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise CommandError(f"needs {module}: pip install 'sdpa_cutlass[cli]'")
