"""The arguments of `bench`; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from sdpa_cutlass.cli import arguments, random_suite
from sdpa_cutlass.cli.results import PEERS, PROVIDERS
from sdpa_cutlass.cli.suites import SUITE_NAMES

ALL = "all"
SUITES = (*SUITE_NAMES, random_suite.SUITE, ALL)
COUNT, EVERY = 150, 5  # of the suite `random`
EVERYBODY = (*PROVIDERS, *PEERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass bench` takes."""
    parser.description = (
        "Measures whole suites next to every peer that can be imported and writes a complete record into a "
        "folder: JSON (as it is measured), CSV and pictures. For a quick look, or your own inputs, there is "
        "`compare`. Exit status: 0 done, 1 a kernel of this library is wrong or failed or a time is below "
        "what the hardware can do, 2 wrong usage or no GPU for a suite that needs one."
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--suite",
        type=arguments.names_of(SUITES),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(SUITES)}; default: all, on a CPU host",
    )
    what.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="GLOB",
        help="only problems whose name matches, such as 'decode/*_d64'; may be repeated",
    )
    what.add_argument("--list", action="store_true", help="print the names of the problems and stop")
    what.add_argument(
        "--providers",
        type=arguments.names_of(EVERYBODY),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(EVERYBODY)}; default: all that can be imported",
    )
    drawn = parser.add_argument_group("the suite `random`, whose problems --seed draws")
    drawn.add_argument(
        "--count", type=arguments.positive, default=COUNT, metavar="M", help="problems (default: %(default)s)"
    )
    drawn.add_argument(
        "--every",
        type=arguments.positive,
        default=EVERY,
        metavar="K",
        help="of every K-th problem, also time the other kernels that could have been chosen "
        "(default: %(default)s)",
    )
    arguments.add_measuring(parser)
    parser.add_argument(
        "--sustained",
        type=arguments.positive,
        metavar="S",
        help="on a GPU, for all suites but `random`: each provider alone for so many seconds, without a "
        "pause, instead of turns on a cool card",
    )
    parser.add_argument(
        "--seconds",
        type=arguments.positive,
        metavar="S",
        help="begin no problem after so many seconds; what was left out is counted in the file",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: benchmarks/results of a checkout for a GPU, build/bench for a CPU; "
        "elsewhere bench-results)",
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="FILE",
        help="then compare with this earlier result file, as `changes` does; exit status 1 on regressions",
    )
