"""Puts one defect after the other into the headers and shows which checks find it.

python -m tests.mutation                     # all of them; exit status 1 when one is not caught
python -m tests.mutation --every-check       # and which other checks find each; takes longer
python -m tests.mutation --list
python -m tests.mutation --only 'mask_*' --only no_rescale
python -m tests.mutation --shard 1/4 --json mutants.json
python -m tests.mutation --random 50 --seed 7      # operators and constants changed at random instead
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from tests.mutation.build import Workshop
from tests.mutation.catalogue import MUTANTS
from tests.mutation.model import Mutant
from tests.mutation.random_defects import draw
from tests.mutation.random_suite import Fate, run_random
from tests.mutation.suite import Result, Verdict, run_mutants
from tests.mutation.tables import checks_table, list_table, results_table


def _shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not i/n with 1 <= i <= n, such as 1/4")
    return int(part), int(parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--only", action="append", metavar="GLOB", help="mutants by name; may be repeated")
    parser.add_argument("--shard", type=_shard, metavar="I/N", help="every N-th mutant, from the I-th on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--every-check",
        action="store_true",
        help="go on when the check that has to find a mutant has found it",
    )
    parser.add_argument("--lines", action="store_true", help="name the source lines of races; a third slower")
    parser.add_argument("--random", type=int, metavar="N", help="N mutants drawn at random instead")
    parser.add_argument("--seed", type=int, default=0, help="of --random (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at a time (all cores)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="build in DIR instead of a temporary folder")
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs {arguments.jobs} is not positive")
    if arguments.random is not None and arguments.random < 1:
        parser.error(f"--random {arguments.random} is not positive")
    return arguments


def chosen(only: list[str] | None, shard: tuple[int, int] | None) -> list[Mutant]:
    """Raises ValueError for a glob that no mutant's name matches."""
    for glob in only or []:
        if not any(fnmatchcase(mutant.name, glob) for mutant in MUTANTS):
            raise ValueError(f"--only {glob!r} matches no mutant; --list shows their names")
    globs = only or ["*"]
    found = [mutant for mutant in MUTANTS if any(fnmatchcase(mutant.name, glob) for glob in globs)]
    return found if shard is None else found[shard[0] - 1 :: shard[1]]


def _run_random(arguments: argparse.Namespace, console: Console) -> int:
    """Prints what became of each, then the survivors. 1 when there are any."""

    def show(text: object) -> None:
        console.print(str(text), markup=False, emoji=False, highlight=False, soft_wrap=True)

    mutants = draw(arguments.random, arguments.seed)
    if arguments.list:
        for mutant in mutants:
            show(mutant)
        return 0
    with tempfile.TemporaryDirectory(prefix="sdpa-mutation-") as temporary:
        folder = arguments.work or Path(temporary)
        try:
            results = run_random(mutants, folder.resolve(), arguments.jobs, show)
        except RuntimeError as error:
            console.print(f"[red]error:[/] {error}", soft_wrap=True)
            return 1
    numbers = Counter(result.fate for result in results)
    show(", ".join(f"{numbers[fate]} {fate.value}" for fate in Fate))
    survivors = [result.mutant for result in results if result.fate is Fate.SURVIVED]
    for mutant in survivors:
        show(f"survived: {mutant}")
    return 1 if survivors else 0


def main() -> int:
    arguments = _arguments()
    console = Console()
    if arguments.random is not None:
        return _run_random(arguments, console)
    try:
        mutants = chosen(arguments.only, arguments.shard)
    except ValueError as error:
        console.print(f"[red]error:[/] {error}")
        return 2
    if arguments.list:
        console.print(list_table(mutants))
        return 0

    def done(result: Result) -> None:
        checks = ", ".join(check.value for check in result.failures)
        console.print(f"{result.mutant.name}: {result.verdict.value} {checks} ({result.seconds:.0f} s)")

    with tempfile.TemporaryDirectory(prefix="sdpa-mutation-") as temporary:
        folder = arguments.work or Path(temporary)
        try:
            results = run_mutants(
                Workshop.open(folder.resolve()),
                mutants,
                arguments.jobs,
                done,
                every_check=arguments.every_check,
                lines=arguments.lines,
            )
        except RuntimeError as error:
            console.print(f"[red]error:[/] {error}")
            return 1
    console.print(results_table(results, every_check=arguments.every_check))
    if arguments.every_check:
        console.print(checks_table(results))
    if arguments.json:
        report = {"mutants": [result.as_json() for result in results]}
        partial = arguments.json.with_suffix(".partial")
        partial.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(arguments.json)
    bad = [result for result in results if result.verdict is not Verdict.CAUGHT]
    console.print(f"{len(results) - len(bad)} of {len(results)} mutants caught as they should be")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
