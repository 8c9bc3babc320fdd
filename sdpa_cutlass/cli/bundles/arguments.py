"""The arguments of `bundle` and `verify`; imports nothing that takes time."""

from __future__ import annotations

import argparse
from pathlib import Path

from sdpa_cutlass.cli import arguments
from sdpa_cutlass.cli.results import PEERS, PROVIDERS

SUFFIX = ".zip"


def add_bundle(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass bundle` takes."""
    parser.description = (
        "Writes one file from which anybody can repeat a result: problem, kernel and its generated unit, "
        "digests of the library and the tensors, environment, clocks, command, raw times and the numerics "
        "check. Measures the problem here, or takes it from a result file."
    )
    parser.add_argument(
        "problem",
        metavar="PROBLEM",
        help="a suite's problem, such as mission/b1_h8_s512_d64 (compare --list)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"to write (*{SUFFIX})")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RESULTS",
        help="take the problem's rows from this result file (.json) instead of measuring",
    )
    parser.add_argument(
        "--providers",
        type=arguments.names_of((*PROVIDERS, *PEERS)),
        default=("fused",),
        metavar="NAMES",
        help="comma-separated, fused among them (default: fused)",
    )
    arguments.add_measuring(parser)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Adds what `python -m sdpa_cutlass verify` takes."""
    parser.description = (
        "Runs the problem of a bundle again here and says what agrees, what differs and by how much. Exit "
        "status: 0 confirmed, 1 something differs that should not, 2 no bundle, or nothing can run."
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="a file that `bundle` wrote")
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: as the bundle's, where there is one, else the host library",
    )
    parser.add_argument(
        "--repeats", type=arguments.positive, metavar="N", help="timed repetitions (default: the bundle's)"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
