"""The arguments of `bench`; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from sdpa_cutlass.cli.results import PEERS, PROVIDERS
from sdpa_cutlass.cli.suites import SUITE_NAMES

ALL = "all"
SUITES = (*SUITE_NAMES, ALL)
EVERYBODY = (*PROVIDERS, *PEERS)


def _names(text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        wrong = ", ".join(unknown) or "nothing"
        raise argparse.ArgumentTypeError(f"{wrong} is not among {', '.join(allowed)}")
    return names


def _suites(text: str) -> tuple[str, ...]:
    return _names(text, SUITES)


def _providers(text: str) -> tuple[str, ...]:
    return _names(text, EVERYBODY)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass bench` takes."""
    parser.description = (
        "Measures whole suites beside every peer that can be imported and writes a complete record into a "
        "folder: JSON (as it is measured), CSV and pictures. For a quick look, or your own inputs, there is "
        "`compare`. Exit status: 0 done, 1 a kernel of this library is wrong or failed or a time is below "
        "what the hardware can do, 2 wrong usage or no GPU for a suite that needs one."
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--suite",
        type=_suites,
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
        type=_providers,
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(EVERYBODY)}; default: all that can be imported",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda where there is a GPU"
    )
    how.add_argument(
        "--dtype", choices=("f16", "bf16"), default="f16", help="element type (default: %(default)s)"
    )
    how.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    how.add_argument(
        "--repeats",
        type=_positive,
        metavar="N",
        help="timed repetitions (default: 2 on a CPU; on a GPU at most 25, fewer where they take long)",
    )
    how.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where to write (default: benchmarks/results of a checkout for a GPU, build/bench for a CPU; "
        "elsewhere bench-results)",
    )
