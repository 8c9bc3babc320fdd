"""The `profile` command: the static half from the library's code, the other one from a launch under ncu.

Exit status: 0; 1 when the code of a fused kernel breaks a gate; 2 for wrong usage, or when a GPU or ncu is
missing: then the static half of the kernel that would have run is shown instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sdpa_cutlass
from sdpa_cutlass.cli import FAILED, OK, USAGE, CommandError, results, running
from sdpa_cutlass.cli.profiling import diagnosis, ncu, static, view
from sdpa_cutlass.cli.profiling.problems import ShapeError, Task, parse_shape
from sdpa_cutlass.errors import SdpaError

if TYPE_CHECKING:
    from rich.console import Console

GLOB_CHARACTERS = "*?["


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    if [options.static, options.shape is not None, options.saved is not None].count(True) != 1:
        raise CommandError("give --static, or --shape B,H,S,D, or --from FILE: one of them")
    if options.write_gates and (not options.static or options.kernel):
        raise CommandError("--write-gates writes every kernel: it goes with --static and without --kernel")
    running.require(["rich"])
    console = running.make_console()
    try:
        if options.saved is not None:
            return _show_saved(options.saved, console)
        return _run_static(options, console) if options.static else _run_launch(options, console)
    except SdpaError as error:
        raise CommandError(str(error)) from error


def _run_static(options: argparse.Namespace, console: Console) -> int:
    names = "*" if options.write_gates else options.kernel or static.FUSED
    found = _read(names, console)
    if options.write_gates:
        if found.space != "release":
            raise CommandError(
                f"{options.write_gates} is not written: it is about every kernel of space release, and "
                f"{found.path} holds {found.space!r}; build it with `make cuda`"
            )
        if found.problems:
            lines = "\n  ".join(found.problems)
            raise CommandError(f"{options.write_gates} is not written: the code breaks gates\n  {lines}")
        table = functools.partial(results.write_atomically, content=static.gate_table(found))
        running.write_all([(options.write_gates, table)], console)
    else:
        view.show_static(console, static.all_facts(found))
    _write_static(options.json, found, console)
    return FAILED if found.problems else OK


def _write_static(path: Path | None, found: static.Library, console: Console) -> None:
    if path is not None:
        running.write_all([(path, _json_writer(static.document(found)))], console)


def _read(names: str, console: Console) -> static.Library:
    with console.status("disassembling; this takes a moment once per build"):
        found = static.read(names)
    if not found.code:
        raise CommandError(
            f"--kernel {names!r} matches no kernel of {found.path}; "
            "`python -m sdpa_cutlass info --kernels` lists them"
        )
    return found


def _json_writer(document: dict[str, Any]) -> Callable[..., None]:
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    return functools.partial(results.write_atomically, content=text)


def _run_launch(options: argparse.Namespace, console: Console) -> int:
    try:
        parse_shape(options.shape)
    except ShapeError as error:
        raise CommandError(str(error)) from error
    running.require(["torch"])
    missing = _missing()
    task = Task(options.shape, options.dtype, "")
    task = dataclasses.replace(task, kernel=_kernel(options.kernel, task, "cpu" if missing else "cuda:0"))
    if missing:
        return _show_static_instead(
            f"Nothing was run: {' and '.join(missing)}.", task.kernel, options, console
        )
    program = ncu.find()
    assert program is not None
    with console.status("ncu repeats the kernel for each set of counters"):
        counters = ncu.profile(program, task)
    document = _launch_document(task, counters)
    _show_launch(document["env"].get("gpu"), task, counters, console)
    running.write_all([(options.json, _json_writer(document))], console)
    return OK


def _show_static_instead(why: str, kernel: str, options: argparse.Namespace, console: Console) -> int:
    console.print(why, style="bold", markup=False, highlight=False)
    console.print(f"What {kernel}, which would have run, is made of:\n", markup=False, highlight=False)
    found = _read(kernel, console)
    view.show_static(console, static.all_facts(found))
    _write_static(options.json, found, console)
    return USAGE


def _show_launch(gpu: str | None, task: Task, counters: ncu.Counters, console: Console) -> None:
    title = f"{gpu or 'GPU unknown'}, {task.shape} {task.dtype}"
    view.show_launch(console, title, counters, diagnosis.diagnose(counters))


def _show_saved(path: Path, console: Console) -> int:
    if not path.is_dir():
        _show_launch(*_read_saved(path), console)
        return OK
    files = sorted(path.glob("*.json"))
    if not files:
        raise CommandError(f"--from {path}: no *.json in this folder")
    view.show_launches(console, [_read_saved(file) for file in files])
    return OK


def _read_saved(path: Path) -> tuple[str | None, Task, ncu.Counters]:
    """The GPU, the task and the counters that `--json` saved."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        task = Task(**document["task"])
        values = {name: document["counters"].get(name) for name in ncu.COUNTERS}
        if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
            raise ValueError("a counter is not a number")
        gpu, capability = document["env"].get("gpu"), str(document["compute_capability"])
        function = str(document.get("function", task.kernel))  # older files have none
    except OSError as error:
        raise CommandError(f"--from {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandError(
            f"--from {path}: not a launch that `profile --shape --json` saved: {error}"
        ) from error
    return gpu, task, ncu.Counters(function, capability, values)


def _missing() -> list[str]:
    """What profiling a launch needs and this machine does not have."""
    import torch

    found = []
    if not torch.cuda.is_available():
        found.append("torch finds no GPU")
    if ncu.find() is None:
        found.append("ncu (Nsight Compute) is neither on PATH nor in /usr/local/cuda/bin")
    return found


def _kernel(name: str | None, task: Task, device: str) -> str:
    from sdpa_cutlass.cli.profiling import child

    if name is None:
        return child.choose(task, device)
    if any(character in name for character in GLOB_CHARACTERS):
        raise CommandError(f"--kernel {name!r}: with --shape, the whole name of one kernel")
    if not name.startswith(("fmha_fwd", "fmha_bwd")):
        raise CommandError(
            f"--kernel {name!r}: only fused kernels have one launch that counts; their names begin with "
            "fmha_fwd or fmha_bwd"
        )
    if name not in {kernel.name for kernel in sdpa_cutlass.kernels()}:
        raise CommandError(
            f"--kernel {name!r} is not in the library; see `python -m sdpa_cutlass info --kernels`"
        )
    return name


def _launch_document(task: Task, counters: ncu.Counters) -> dict[str, Any]:
    import torch

    from sdpa_cutlass.cli import environment

    return {
        "env": environment.record(torch.device("cuda", 0)),
        "task": dataclasses.asdict(task),
        "function": counters.kernel,
        "compute_capability": counters.compute_capability,
        "counters": dict(counters.values),
        "stalls": dict(diagnosis.stalls(counters)),
        "diagnosis": dataclasses.asdict(diagnosis.diagnose(counters)),
    }
