"""What `compare` and `bench` share: what must be there, which problems, the progress bar and the verdict."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdpa_cutlass.cli import FAILED, OK, CommandError, inputs, results, suites, summary
from sdpa_cutlass.cli.inputs import QKV
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target

if TYPE_CHECKING:
    import torch
    from rich.console import Console

LEAST_WIDTH = 180  # of a table whose cells all fit


def require(modules: list[str]) -> None:
    """Raises CommandError when one of `modules` is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"needs {', '.join(missing)}: pip install 'sdpa_cutlass[cli]'")


def require_library(names: Sequence[str], device: torch.device) -> None:
    """Raises CommandError, with what to do, when ours are wanted and their library cannot be used."""
    if any(name in summary.OURS for name in names):
        try:
            library(Target.CUDA if device.type == "cuda" else Target.HOST)
        except SdpaError as error:
            raise CommandError(str(error)) from error


def refuse_gpu_suites(names: Iterable[str], allowed: Sequence[str]) -> None:
    """Raises CommandError for suites that are not among `allowed`: a CPU would compute them for hours."""
    refused = [name for name in names if name not in allowed]
    if refused:
        raise CommandError(
            f"--suite {','.join(refused)}: needs a GPU, and there is none (or --device cpu was said). "
            f"What a CPU can run, for correctness only: --suite {', '.join(allowed)}"
        )


def pick_device(name: str) -> torch.device:
    """The device that `auto`, `cpu` or `cuda` means here. Raises CommandError when there is no GPU."""
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            "--device cuda: torch finds no GPU; `python -m sdpa_cutlass info` says what is missing"
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def find_cases(
    names: Sequence[str], globs: Sequence[str], *, files: Sequence[Path] = (), more: Sequence[Case] = ()
) -> list[Case]:
    """The problems of the named suites, of `files` and `more`, whose name matches one of `globs`.

    Raises CommandError when a file holds no problem, or when none is left.
    """
    cases: list[Case] = []
    for name in names:
        cases += [_file_case(inputs.MINILM)] if name == "real" else suites.cases_of([name])
    cases += [_file_case(path) for path in files]
    cases = suites.matching([*cases, *more], globs)
    if not cases:
        raise CommandError("no problem matches --filter; --list shows their names")
    return cases


def file_case(path: Path, qkv: QKV, *, causal: bool = False) -> Case:
    """The problem that a file's tensors pose; its suite is `real` for MINILM, else `input:<name>`."""
    batch, num_heads_q, seqlen_q, head_dim = qkv.q.shape
    return Case(
        suite="real" if path == inputs.MINILM else f"input:{path.stem}",
        batch=batch,
        num_heads_q=num_heads_q,
        num_heads_kv=qkv.k.shape[1],
        seqlen_q=seqlen_q,
        seqlen_k=qkv.k.shape[2],
        head_dim=head_dim,
        causal=causal,
        source=path,
    )


def _file_case(path: Path) -> Case:
    try:
        return file_case(path, inputs.load_qkv(path))
    except inputs.InputError as error:
        raise CommandError(str(error)) from error


def make_console() -> Console:
    """A console that is wide enough for the tables."""
    from rich.console import Console

    return Console(width=max(LEAST_WIDTH, shutil.get_terminal_size().columns))


def verdict(found: results.Results, console: Console) -> int:
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


@contextlib.contextmanager
def progress(console: Console, total: int, *, quiet: bool) -> Iterator[Callable[[str, int], None]]:
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


def write_all(writers: Sequence[tuple[Path | None, Callable[[Path], None]]], console: Console) -> None:
    """Calls each writer with its path, where it has one. Raises CommandError when one cannot be written."""
    for path, write in writers:
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
        console.print(f"wrote {path}", highlight=False, markup=False)
