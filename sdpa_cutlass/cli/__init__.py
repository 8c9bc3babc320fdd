"""`python -m sdpa_cutlass`: the commands' arguments, and nothing that takes time to import.

    bundle     one result in one file, from which anybody can repeat it
    bench      whole suites next to every peer, recorded in a folder
    changes    what differs between two result files: times, regressions, machines
    compare    fused attention next to the piped baseline, torch's backends and the naive chain
    info       what was built, from what, for which GPUs, and what is found on this machine
    profile    what a kernel's code is made of, and what bounds a launch
    warm       loads kernels ahead, so that the first call does not wait for the driver's compiler
    tune       measures which kernel is the fastest where, and writes this GPU's tuned table
    verify     runs a bundle again here: what agrees, what differs, by how much

Each command lives in a module of its own, imported when it is called. Exit status: 0 success, 1 a kernel of
this library failed, was wrong or, in `changes` and `bench --against`, became slower, or `verify` does not
confirm a bundle, 2 wrong usage or something missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import sdpa_cutlass
from sdpa_cutlass.cli import arguments, bench_arguments, warm_arguments
from sdpa_cutlass.cli.bundles import arguments as bundles
from sdpa_cutlass.cli.profiling import arguments as profiling
from sdpa_cutlass.cli.results import PROVIDERS
from sdpa_cutlass.cli.suites import SUITE_NAMES
from sdpa_cutlass.cli.tuning import arguments as tuning

OK, FAILED, USAGE = 0, 1, 2


class CommandError(Exception):
    """A command cannot go on; the message says why and what to do."""


def make_parser() -> argparse.ArgumentParser:
    """Makes the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m sdpa_cutlass",
        description="Fused scaled-dot-product attention next to its peers.",
    )
    parser.add_argument("--version", action="version", version=f"sdpa_cutlass {sdpa_cutlass.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    bench_arguments.add_arguments(commands.add_parser("bench", help="whole suites, recorded in a folder"))
    bundles.add_bundle(commands.add_parser("bundle", help="one result in one file, for others to repeat"))
    _add_changes(commands.add_parser("changes", help="what differs between two result files"))
    _add_compare(commands.add_parser("compare", help="fused, piped and every torch backend side by side"))
    _add_info(commands.add_parser("info", help="what was built, and what is found on this machine"))
    profiling.add_arguments(
        commands.add_parser("profile", help="what a kernel is made of and what bounds it")
    )
    warm_arguments.add_arguments(commands.add_parser("warm", help="load kernels ahead of the first call"))
    tuning.add_arguments(commands.add_parser("tune", help="measure which kernel is the fastest where"))
    bundles.add_verify(commands.add_parser("verify", help="run a bundle again: what agrees, what differs"))
    return parser


def _add_changes(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares two result files problem by problem and provider: the later time over the earlier one, "
        "with the noise of both respected. Exit status 1 when this library became slower or wrong somewhere."
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the earlier result file (.json)")
    parser.add_argument("after", type=Path, metavar="AFTER", help="the later result file (.json)")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a grid of problems through the fused kernels, the piped CUTLASS baseline, every torch backend "
        "that runs here and the naive chain; checks ours against a float32 reference. On a CPU the kernels "
        "run on an emulated GPU: the results are real, the times are not."
    )
    suites = (
        f"comma-separated, of {', '.join(SUITE_NAMES)}; default: mission,small,long,real, on a CPU host,real"
    )
    what = parser.add_argument_group("what")
    what.add_argument("--suite", type=arguments.names_of(SUITE_NAMES), metavar="NAMES", help=suites)
    what.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="GLOB",
        help="only problems whose name matches, such as 'long/*_d64_causal'; may be repeated",
    )
    what.add_argument("--list", action="store_true", help="print the names of the problems and stop")
    what.add_argument(
        "--input",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="also run your own q, k, v [batch, heads, seqlen, head_dim] (.safetensors); may be repeated",
    )
    what.add_argument(
        "--providers",
        type=arguments.names_of(PROVIDERS),
        metavar="NAMES",
        help=f"comma-separated, of {', '.join(PROVIDERS)}; default: all, for masks only the fast ones",
    )
    arguments.add_measuring(parser)
    files = parser.add_argument_group("files to write")
    files.add_argument("--json", type=Path, metavar="FILE", help="the results in the project's result format")
    files.add_argument("--csv", type=Path, metavar="FILE", help="the rows as comma-separated values")
    files.add_argument("--markdown", type=Path, metavar="FILE", help="the tables as Markdown")
    files.add_argument("--plot", type=Path, metavar="FILE", help="the speeds as a picture (.png)")


def _add_info(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints what was built, from what, for which GPUs, and what is found on this machine, with a "
        "one-line fix for what is wrong."
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--kernels", action="store_true", help="also list every kernel and what it occupies")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (default: sys.argv); returns the exit status."""
    options = make_parser().parse_args(argv)
    try:
        if options.command == "bench":
            from sdpa_cutlass.cli import bench

            return bench.run(options)
        if options.command == "bundle":
            from sdpa_cutlass.cli.bundles import make

            return make.run(options)
        if options.command == "changes":
            from sdpa_cutlass.cli import changes

            return changes.run(options)
        if options.command == "compare":
            from sdpa_cutlass.cli import compare

            return compare.run(options)
        if options.command == "profile":
            from sdpa_cutlass.cli.profiling import command as profile

            return profile.run(options)
        if options.command == "tune":
            from sdpa_cutlass.cli.tuning import command

            return command.run(options)
        if options.command == "warm":
            from sdpa_cutlass.cli import warm

            return warm.run(options)
        if options.command == "verify":
            from sdpa_cutlass.cli.bundles import check

            return check.run(options)
        from sdpa_cutlass.cli import info

        return info.run(options)
    except CommandError as error:
        print(f"sdpa_cutlass {options.command}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 130
