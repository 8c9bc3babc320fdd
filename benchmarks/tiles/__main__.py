"""What the journals of `python -m sdpa_cutlass tune` say of this repository's tiles and its cost model.

    python -m benchmarks.tiles choose JOURNAL...      # the smallest set of tiles that stays near the best
    python -m benchmarks.tiles model JOURNAL...       # how well the cost model predicts
    python -m benchmarks.tiles corrections            # fits corrections.json to all results, and writes it
    python -m benchmarks.tiles constants              # proposes constants of prices, fitted to all results

Needs no GPU. Exit status: 0 success, 2 wrong usage or a journal that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.tiles import choice, constants, corrections, model
from benchmarks.tiles.model import Quality
from sdpa_cutlass.choice.cost.corrections import FILE
from sdpa_cutlass.cli import OK, USAGE, CommandError
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.tuning import derive, journal
from sdpa_cutlass.cli.tuning.derive import Choice
from sdpa_cutlass.cli.tuning.journal import Journal

RESULTS = Path(__file__).parents[1] / "results"
RESOURCES = Path("build/cuda/resource_usage.json")
LEAST_WIDTH = 140


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: sys.argv); returns the exit status."""
    options = _parser().parse_args(argv)
    console = Console(width=max(LEAST_WIDTH, shutil.get_terminal_size().columns))
    try:
        if options.command == "choose":
            return choose(options, console)
        if options.command == "corrections":
            return correct(console)
        if options.command == "constants":
            return propose(console)
        return judge(options.journals, console)
    except CommandError as error:
        print(f"benchmarks.tiles: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiles", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    choosing = commands.add_parser(
        "choose", help="the smallest set of tiles that stays near the best everywhere"
    )
    judging = commands.add_parser("model", help="how well the cost model predicts")
    commands.add_parser("corrections", help="fits what kernels take beside their prices to all results")
    commands.add_parser("constants", help="proposes constants of prices, fitted to all results: minutes")
    for command in (choosing, judging):
        command.add_argument("journals", type=Path, nargs="+", metavar="JOURNAL")
    choosing.add_argument(
        "--within",
        type=_percent,
        default=0.03,
        metavar="PERCENT",
        help="how far from the best (default: 3 percent)",
    )
    choosing.add_argument(
        "--resources",
        type=Path,
        metavar="FILE",
        help="the build's resource_usage.json, for what the choice costs (default: build/cuda/..., if there)",
    )
    return parser


def _percent(text: str) -> float:
    value = float(text.removesuffix("%"))
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError("must be 0 to 100 percent")
    return value / 100


def choose(options: argparse.Namespace, console: Console) -> int:
    """Prints the smallest set of tiles for the journals' measurements, and what it costs."""
    journals, found = _read(options.journals)
    kernels = {name: kernel for item in journals for name, kernel in item.kernels.items()}
    selection = choice.select(found, kernels, options.within)
    lines = [_head(journals, found), *choice.report(selection, found, options.within)]
    path = options.resources or (RESOURCES if RESOURCES.is_file() else None)
    if path is not None:
        try:
            resources = choice.read_resources(path)
        except (OSError, ValueError) as error:
            raise CommandError(f"--resources {path}: {error}") from error
        lines += ["", f"cost, from {path}:"]
        lines.append(choice.cost_line("  chosen", choice.cost(selection.tiles, resources)))
        lines.append(choice.cost_line("  all measured", choice.cost(selection.candidates, resources)))
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return OK


def judge(paths: Sequence[Path], console: Console) -> int:
    """Prints how well the cost model predicts the journals' measurements."""
    journals, found = _read(paths)
    kernels = {name: kernel for item in journals for name, kernel in item.kernels.items()}
    console.print(_head(journals, found), highlight=False, markup=False, soft_wrap=True)
    _show_qualities(model.by_groups(found, kernels, journals[0].device), console)
    return OK


def propose(console: Console) -> int:
    """Prints what held-out problems lose with other constants and factors, and these constants."""
    for line in constants.report(corrections.read(RESULTS)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return OK


def correct(console: Console) -> int:
    """Writes corrections.json, and prints what held-out problems lose without and with such factors."""
    problems = corrections.read(RESULTS)
    fit = corrections.Fit(problems)
    for line in corrections.report(problems, fit):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    write_atomically(FILE, json.dumps(corrections.table(fit, problems), indent=1) + "\n")
    return OK


def _read(paths: Sequence[Path]) -> tuple[list[Journal], list[Choice]]:
    try:
        journals = [journal.read(path) for path in paths]
    except journal.JournalError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}") from error
    reason = journal.same_sweep(journals)
    if reason:
        raise CommandError(f"journals of different GPUs: {reason}")
    found = derive.choices(journals)
    if not found:
        raise CommandError("the journals hold no measurement of a right kernel")
    return journals, found


def _head(journals: Sequence[Journal], found: Sequence[Choice]) -> str:
    """What was measured, in one line."""
    device = journals[0].device
    kernels = {name for choice in found for name, _ in choice.times}
    dates = sorted({str(item.env.get("date"))[:10] for item in journals})
    return (
        f"{device.name}, {device.sms} SMs, {' and '.join(dates)}: {len(found)} buckets, "
        f"{len(kernels)} kernels, {sum(len(choice.times) for choice in found)} times"
    )


def _show_qualities(rows: Sequence[Quality], console: Console) -> None:
    """The cost model's quality: one row for all buckets, then one per group."""
    view = Table()
    view.add_column("buckets")
    for column in ("count", "hits", "regret, mean", "worst", "ρ, mean", "least", "scale"):
        view.add_column(column, justify="right")
    view.add_column("where the regret is worst")
    for row in rows:
        view.add_row(
            row.what,
            str(row.buckets),
            str(row.hits),
            f"{row.mean_regret - 1:.2%}",
            f"{row.worst_regret - 1:.1%}",
            "–" if row.mean_rho is None else f"{row.mean_rho:.2f}",
            "–" if row.least_rho is None else f"{row.least_rho:.2f}",
            f"{row.scale:.2f}",
            row.worst if row.worst_regret > 1 else "–",
        )
    console.print(view)


if __name__ == "__main__":
    sys.exit(main())
