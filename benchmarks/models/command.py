"""The command: arguments, the rows in turn, the file, the exit status."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import measure, quantised, report
from benchmarks.models.case import DTYPES, Case, Mode
from benchmarks.models.families import ENCODER, NAMES, cases
from benchmarks.models.machine import Gpu, Machine
from benchmarks.models.providers import NAMES as PROVIDERS
from benchmarks.models.providers import TORCH
from sdpa_cutlass.cli import environment
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.integrations.quantising import MIN_SEQLEN
from sdpa_cutlass.library.registry import Precision
from tests.models import encoder

FORMAT = 2
ROUNDS = 11
SMALL_MIN_SEQLEN = 64  # the keys of one block


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints a table, writes the file. Returns the exit status."""
    options = parser().parse_args(arguments)
    machine = Gpu() if options.device == "cuda" else Machine()
    return run(options, machine)


def run(options: argparse.Namespace, machine: Machine) -> int:
    """As `main`, on a machine that may be a fake."""
    device = torch.device(machine.device)
    env = environment.record(device) | {"transformers": environment.package_version("transformers")}
    plan = measure.Plan(
        dtypes=tuple(DTYPES) if options.dtype == "both" else (options.dtype,),
        modes=_modes(options, machine),
        rounds=options.rounds,
        compiler=machine.compiler,
        providers={TORCH, *options.provider},
    )
    folder = _encoder_folder(options.encoder) if ENCODER in options.family else None
    found = cases(options.family, machine.device, small=options.small, encoder_folder=folder)
    records: list[dict[str, Any]] = []
    verdicts: list[bool | None] = []
    with torch.no_grad():
        for record, line, is_right in _results(found, machine, plan, options):
            records.append(record)
            verdicts.append(is_right)
            print(line, flush=True)
    environment.close(env, device)
    verb = "agree" if options.precision is None else "hold the contract"
    judged = [verdict for verdict in verdicts if verdict is not None]
    left = len(verdicts) - len(judged)
    print(f"{sum(judged)} of {len(judged)} {verb}" + (f", {left} could not be captured" if left else ""))
    print(", ".join(f"{key} {env[key]}" for key in ("gpu", "driver", "torch", "transformers", "date")))
    if options.json is not None:
        kept = {"format": FORMAT, "small": options.small, "env": env, "rows": records}
        write_atomically(options.json, json.dumps(kept, indent=1) + "\n")
    return 0 if all(judged) else 1


def _results(
    found: Iterator[Case], machine: Machine, plan: measure.Plan, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], str, bool | None]]:
    """(the row as the file has it, as the table has it, whether it is as it should be; None: not judged)."""
    if options.precision is None:
        print(report.HEAD)
        for case in found:
            for row in measure.rows(case, machine, plan):
                yield dataclasses.asdict(row), report.line(row), row.agrees
        return
    print(report.QUANTISED_HEAD)
    precisions = [Precision(word) for word in options.precision]
    min_seqlen = options.min_seqlen
    if min_seqlen is None:
        min_seqlen = SMALL_MIN_SEQLEN if options.small else MIN_SEQLEN
    for case in found:
        for precision in precisions:
            for each in quantised.rows(case, machine, plan, precision, min_seqlen):
                yield dataclasses.asdict(each), report.quantised_line(each), each.holds and each.heads_hold


def parser() -> argparse.ArgumentParser:
    """Of the command."""
    import benchmarks.models

    made = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=benchmarks.models.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--small", action="store_true", help="models that a CPU can run")
    made.add_argument(
        "--family", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES)
    )
    made.add_argument("--dtype", choices=(*DTYPES, "both"), default="both")
    made.add_argument(
        "--mode",
        nargs="+",
        choices=[mode.value for mode in Mode],
        help="default: all on a GPU, eager on a CPU",
    )
    made.add_argument(
        "--provider",
        nargs="+",
        choices=PROVIDERS,
        default=PROVIDERS,
        metavar="NAME",
        help=f"beside torch's default: {', '.join(PROVIDERS[1:])}",
    )
    made.add_argument(
        "--precision",
        nargs="+",
        choices=[precision.value for precision in Precision],
        help="8-bit attention instead, end to end",
    )
    made.add_argument(
        "--min-seqlen",
        type=int,
        help=f"keys from which on to quantise; {MIN_SEQLEN}, with --small {SMALL_MIN_SEQLEN}",
    )
    made.add_argument("--rounds", type=int, default=ROUNDS, help="runs of each that are timed, in turns")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    made.add_argument(
        "--encoder",
        metavar="FOLDER",
        help="of the text encoder; 'none' leaves it out; default: the package's",
    )
    return made


def _modes(options: argparse.Namespace, machine: Machine) -> list[Mode]:
    """Those that were asked for and that the machine has."""
    asked = options.mode or ([mode.value for mode in Mode] if machine.claims_speed else [Mode.EAGER.value])
    modes = [Mode(word) for word in asked]
    if Mode.GRAPH in modes and not machine.has_graphs:
        sys.exit("--mode graph: a CPU has no graphs")
    return modes


def _encoder_folder(asked: str | None) -> Path | None:
    if asked is not None:
        return None if asked == "none" else Path(asked)
    try:
        return encoder.default_folder()
    except ModuleNotFoundError as error:
        sys.exit(f"{error}: install requirements/encoder.txt, or use --encoder FOLDER or --encoder none")
