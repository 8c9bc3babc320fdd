"""The arguments of `tune`."""

from __future__ import annotations

import argparse
from pathlib import Path

from sdpa_cutlass.cli.arguments import names_of
from sdpa_cutlass.cli.suites import SUITE_NAMES

GRID = "grid"
# Of the others, one lies in files and two are for machines without a GPU.
SUITES = (*(name for name in SUITE_NAMES if name not in ("real", "host", "host_masks")), GRID)
BOTH_DTYPES = ("f16", "bf16")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass tune` takes."""
    parser.description = (
        "Measures the fused kernels over many problems, checks every result, and writes the table from which "
        "this GPU's kernels are chosen from then on. Needs a GPU, but for --list and --check. "
        "Exit status: 0 done, 1 a kernel failed or a table is not valid, 2 wrong usage."
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--suite",
        type=names_of(SUITES),
        default=SUITES,
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(SUITES)}; default: all",
    )
    what.add_argument(
        "--filter", action="append", default=[], metavar="GLOB", help="only problems whose name matches"
    )
    what.add_argument(
        "--dtype",
        type=names_of(BOTH_DTYPES),
        default=BOTH_DTYPES,
        metavar="NAMES",
        help="f16, bf16 or both, the default",
    )
    what.add_argument("--kernels", metavar="GLOB", help="only kernels whose name matches")
    what.add_argument(
        "--all", action="store_true", help="also kernels that the cost model holds to be much slower"
    )
    what.add_argument("--list", action="store_true", help="print the problems, most valuable first, and stop")
    how = parser.add_argument_group("how")
    how.add_argument("--budget", type=_seconds, metavar="SECONDS", help="begin no problem after that time")
    how.add_argument("--resume", action="store_true", help="go on with the journal that is there")
    how.add_argument("--gpu", type=int, default=0, metavar="N", help="torch's number of the GPU (default: 0)")
    how.add_argument("--seed", type=int, default=0, help="of the random inputs (default: %(default)s)")
    how.add_argument("--quiet", action="store_true", help="no progress bar")
    files = parser.add_argument_group("files to write")
    files.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the table (default: where it takes effect, ~/.cache/sdpa_cutlass/tuned/<gpu>.json)",
    )
    files.add_argument(
        "--journal", type=Path, metavar="FILE", help="raw measurements (default: <table>.journal.jsonl)"
    )
    instead = parser.add_argument_group("instead of measuring")
    instead.add_argument(
        "--check", type=Path, nargs="+", metavar="TABLE", help="say whether tables are valid"
    )
