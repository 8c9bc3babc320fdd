"""Everything that only a GPU can show, in one command.

    python -m tests.gpu_report --out report.json        # also writes report.md
    python -m tests.gpu_report --only racecheck,twins   # parts alone; --list names them
    python -m tests.gpu_report --only soak --soak 12000
    python -m tests.gpu_report --device cpu             # the parts that mean something on the host library

Every part runs in processes of its own, so a fault ends nothing but itself. Exit code 1 unless every part is
clean, skipped for a reason, or clean but for exceptions that docs/trust.md documents.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library.abi import library
from sdpa_cutlass.library.locate import Target
from sdpa_cutlass.library.registry import KernelInfo, read_kernels
from tests.gpu_report import report
from tests.gpu_report.context import named
from tests.gpu_report.jobs import Runner, run_all, run_process
from tests.gpu_report.parts import PARTS, Outcome, Part, Settings

_BUDGET = 480.0  # seconds


def chosen(only: str | None, device: str) -> list[Part]:
    """The parts to run. Raises ValueError for a name that does not exist or needs a GPU."""
    if only is None:
        return [part for part in PARTS if device == "cuda" or not part.needs_gpu]
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise ValueError(f"--only names {name!r}; allowed: {', '.join(known)}")
        if known[name].needs_gpu and device != "cuda":
            raise ValueError(f"--only names {name!r}, which needs a GPU; --device is {device}")
    return [part for part in PARTS if part.name in names]


def make(
    parts: Sequence[Part],
    settings: Settings,
    rows: Sequence[KernelInfo],
    *,
    budget: float,
    runner: Runner = run_process,
) -> list[Outcome]:
    """Runs the parts' processes together and returns one outcome for each part."""
    jobs = [job for part in parts for job in part.jobs(settings)]
    ended = run_all(
        jobs,
        workers=settings.workers,
        budget=budget,
        runner=runner,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    named = {row.name: row for row in rows}
    outcomes = []
    for part in parts:
        outcomes.append(part.outcome(settings, [end for end in ended if end.job.part == part.name], named))
    return outcomes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu_report", description="Everything that only a GPU can show."
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="the report; Markdown goes beside it")
    parser.add_argument("--budget", type=float, default=_BUDGET, metavar="SECONDS", help="for everything")
    parser.add_argument("--only", metavar="NAME,...", help="these parts alone")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--soak", type=int, default=500, metavar="N", help="random problems (default 500)")
    parser.add_argument("--repeats", type=int, default=0, metavar="N", help="runs of each launch (1000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of random problems; each process adds its number"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--kernels", default="*", metavar="GLOB", help="only kernels whose name matches")
    parser.add_argument("--list", action="store_true", help="name the parts and stop")
    options = parser.parse_args(arguments)
    for name in ("budget", "soak", "workers"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} is {getattr(options, name)}; allowed: more than 0")
    if options.out is not None and options.out.suffix != ".json":
        parser.error(f"--out is {options.out}; allowed: a name that ends in .json")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for part in PARTS:
            print(f"{part.name:18}{'GPU  ' if part.needs_gpu else '     '}{part.what}")
        return 0
    try:
        parts = chosen(options.only, options.device)
        found = library(Target.CUDA if options.device == "cuda" else Target.HOST)
        every = read_kernels(found)
        matching = [row for row in every if fnmatch.fnmatchcase(row.name, options.kernels)]
        facts = report.machine(options.device, found, matching)
        if not matching:
            raise ValueError(f"--kernels is {options.kernels!r}, which matches no kernel of {found.path}")
    except (ValueError, RuntimeError, SdpaError) as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        settings = Settings(
            device=options.device,
            workers=options.workers,
            seed=options.seed,
            soak=options.soak,
            repeats=options.repeats,
            kernels=options.kernels,
            folder=Path(folder),
        )
        outcomes = make(parts, settings, named(every, options.kernels), budget=options.budget)
    used = {
        name: getattr(options, name) for name in ("budget", "soak", "repeats", "seed", "workers", "kernels")
    }
    markdown = report.to_markdown(facts, used, outcomes)
    if options.out is not None:
        write_atomically(options.out, report.to_json(facts, used, outcomes))
        write_atomically(options.out.with_suffix(".md"), markdown)
    print(markdown)
    return 0 if report.is_clean(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
