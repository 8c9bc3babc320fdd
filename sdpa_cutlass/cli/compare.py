"""The `compare` command: problems of the wanted suites, every provider, one table, and files of the results.

Results are saved whatever fails on the way. The exit status is 1 when a row of this library's own families is
wrong or failed, 2 when its library cannot be used at all. An interrupt saves what was measured so far.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_cutlass._c_api import library
from sdpa_cutlass._locate import Target
from sdpa_cutlass.cli import (
    FAILED,
    OK,
    CommandError,
    environment,
    inputs,
    plots,
    providers,
    results,
    suites,
    summary,
    tables,
)
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.errors import SdpaError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

REPEATS = {"cuda": 25, "cpu": 2}
BUDGET_S = 0.15  # of GPU time for each provider of a problem
MASK_BUDGET_S = 0.06  # there are many such problems
# Without the slow ones.
MASK_PROVIDERS = ("fused", "plain", "torch_flash", "torch_cudnn", "torch_efficient")
LEAST_WIDTH = 150  # of a table whose cells all fit


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    _require(["torch", "rich", "safetensors"] + (["matplotlib"] if options.plot else []))
    device = _device(options.device)
    cases = _cases(options, device)
    if options.list:
        print("\n".join(case.name for case in cases))
        return OK
    _require_library(options.providers or results.PROVIDERS, device)
    from rich.console import Console

    console = Console(width=max(LEAST_WIDTH, shutil.get_terminal_size().columns))
    found = measure_all(cases, options, device, console)
    tables.show(found, console)
    _write_files(options, found, console)
    return _verdict(found, console)


def measure_all(
    cases: list[Case], options: argparse.Namespace, device: torch.device, console: Console
) -> results.Results:
    """Measures every case; an interrupt ends it early with what is there."""
    import torch

    from sdpa_cutlass.cli.measure import Settings, measure

    torch.set_float32_matmul_precision("highest")
    repeats = options.repeats or REPEATS[device.type]

    def settings(case: Case) -> Settings:
        is_masked = case.suite in suites.MASK_SUITES
        names = options.providers or (MASK_PROVIDERS if is_masked else results.PROVIDERS)
        return Settings(
            device=device,
            dtype=options.dtype,
            providers=[providers.ALL[name] for name in names],
            seed=options.seed,
            repeats=repeats,
            budget_s=MASK_BUDGET_S if is_masked else BUDGET_S,
        )

    env = environment.record(device)
    env["command"] = {"name": "compare", "seed": options.seed, "repeats": repeats}
    rows: list[results.Row] = []
    with _progress(console, len(cases), quiet=options.quiet) as advance:
        try:
            for case in cases:
                advance(case.name, 0)
                rows += measure(case, settings(case))
                advance(case.name, 1)
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(rows)} rows", style="bold yellow")
            env["interrupted"] = True
    environment.close(env, device)
    return results.Results(env, rows)


def _verdict(found: results.Results, console: Console) -> int:
    """FAILED when a row of ours is wrong or failed, or when ours were asked for and none could run."""
    wrong = summary.unacceptable(found.rows)
    ours = [row for row in found.rows if row.provider in summary.OURS]
    if wrong:
        text = f"{len(wrong)} of {len(ours)} rows of this library are wrong or failed; the first: "
        first = summary.Comparison({wrong[0].provider: wrong[0]})
        text += f"{wrong[0].suite}, {first.label}, {wrong[0].provider}: {wrong[0].status}"
        console.print(text, style="bold red", markup=False, highlight=False)
    elif ours and not any(row.ok for row in ours):
        console.print("This library ran none of the problems.", style="bold red")
    else:
        return OK
    return FAILED


def _require(modules: list[str]) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"needs {', '.join(missing)}: pip install 'sdpa_cutlass[cli]'")


def _require_library(names: Sequence[str], device: torch.device) -> None:
    """Raises CommandError, with what to do, when ours are wanted and their library cannot be used."""
    if any(name in summary.OURS for name in names):
        try:
            library(Target.CUDA if device.type == "cuda" else Target.HOST)
        except SdpaError as error:
            raise CommandError(str(error)) from error


def _device(name: str) -> torch.device:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            "--device cuda: torch finds no GPU; `python -m sdpa_cutlass info` says what is missing"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _cases(options: argparse.Namespace, device: torch.device) -> list[Case]:
    names = options.suite or suites.DEFAULT_SUITES[device.type]
    cases = suites.cases_of(names)
    files: list[Path] = ([inputs.MINILM] if "real" in names else []) + options.input
    for path in files:
        try:
            cases.append(inputs.file_case(path, inputs.load_qkv(path)))
        except inputs.InputError as error:
            raise CommandError(str(error)) from error
    cases = suites.matching(cases, options.filter)
    if not cases:
        raise CommandError("no problem matches --filter; --list shows their names")
    return cases


@contextlib.contextmanager
def _progress(console: Console, total: int, *, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Yields advance(problem at hand, problems done since the last call)."""
    if quiet or not console.is_terminal:
        yield lambda text, steps: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [
        BarColumn(30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    ]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, steps: bar.update(task, description=text, advance=steps)


def _write_files(options: argparse.Namespace, found: results.Results, console: Console) -> None:
    writers: list[tuple[Path | None, Callable[[Path], None]]] = [
        (options.json, lambda path: results.save(found, path)),
        (options.csv, lambda path: results.write_atomically(path, results.to_csv(found.rows))),
        (options.markdown, lambda path: results.write_atomically(path, tables.to_markdown(found))),
        (options.plot, lambda path: plots.save(found, path)),
    ]
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
        console.print(f"wrote {path}", highlight=False, markup=False)
