"""Runs one check in a process of its own and writes what it found.

    python -m tests.gpu_report.child NAME --device cuda --shard 0/4 --result FILE

A process that dies writes none; whoever started it has its output. Exit code 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from sdpa_cutlass.cli.results import write_atomically
from tests.gpu_report import (  # noqa: F401  (their checks register themselves)
    check_behaviour,
    check_faults,
    check_memory,
    check_repeats,
    check_soak,
    check_soak_rules,
    check_twins,
)
from tests.gpu_report.context import CHECKS, Context
from tests.gpu_report.jobs import DEADLINE


def result_of(context: Context, *, finished: bool) -> dict[str, object]:
    return {
        "finished": finished,
        "skipped": context.skipped,
        "numbers": dict(context.numbers),
        "largest": context.largest,
        "failures": context.failures,
    }


def run(name: str, context: Context) -> bool:
    """Runs the check; what it raises is kept as a failure. True when nothing failed."""
    try:
        CHECKS[name](context)
    except BaseException as error:
        where = f"{context.progress}: " if context.progress else ""
        context.fail(f"{where}{''.join(traceback.format_exception(error)).strip()[-3000:]}")
    return not context.numbers["failures"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_report.child")
    parser.add_argument("check", choices=sorted(CHECKS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shard", default="0/1", help="which part of the kernels: INDEX/COUNT")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float(os.environ.get(DEADLINE, "1e9")) - time.monotonic(),
        help="stop early after this time",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=0)
    parser.add_argument("--kernels", default="*", metavar="GLOB")
    parser.add_argument("--result", type=Path, required=True, help="a JSON file to write")
    options = parser.parse_args(arguments)
    shard, shards = (int(part) for part in options.shard.split("/"))
    context = Context(
        device=options.device,
        shard=shard,
        shards=shards,
        seconds=options.seconds,
        seed=options.seed,
        examples=options.examples,
        kernels=options.kernels,
    )
    torch.set_num_threads(1)  # there are as many processes as cores
    if options.device == "cpu":
        context.library.host_configure(num_threads=1)
    good = run(options.check, context)
    write_atomically(options.result, json.dumps(result_of(context, finished=True), indent=1) + "\n")
    for failure in context.failures:
        print(failure, file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
