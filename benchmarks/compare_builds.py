"""Two builds of the CUDA library against each other, in one process: did a change of the kernels cost time?

    python -m benchmarks.compare_builds BEFORE.so AFTER.so
    python -m benchmarks.compare_builds BEFORE.so AFTER.so --suite mission --suite small --json FILE
    python -m benchmarks.compare_builds BEFORE.so AFTER.so --random 1 --filter '*_s??_*' --json FILE

Each problem runs on the kernel that the first build chooses for it, in both builds. They take turns, replay
by replay (see sdpa_cutlass/cli/timing.py). The first build takes part twice: the ratio of its two times is
the noise that a difference has to exceed. Both files must have the C ABI of this checkout; packed sequences
are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sdpa_cutlass.call import binding, planning
from sdpa_cutlass.call.arguments import Inputs, Options
from sdpa_cutlass.cli import environment, random_suite
from sdpa_cutlass.cli.measure import Settings, input_sets
from sdpa_cutlass.cli.providers import Operands
from sdpa_cutlass.cli.results import write_atomically
from sdpa_cutlass.cli.suites import SUITES, Case
from sdpa_cutlass.cli.timing import Contestant, Timing, time_on_gpu
from sdpa_cutlass.errors import SdpaError
from sdpa_cutlass.library import abi
from sdpa_cutlass.library.abi import Library, load
from sdpa_cutlass.library.locate import Target

FORMAT = 1
CONTESTANTS = ("before", "after", "before_again")


@contextlib.contextmanager
def serving(library: Library) -> Iterator[None]:
    """Makes `library` the one that CUDA tensors are served by."""
    usual = abi._loaded.get(Target.CUDA)
    abi._loaded[Target.CUDA] = library
    try:
        yield
    finally:
        if usual is None:
            del abi._loaded[Target.CUDA]
        else:
            abi._loaded[Target.CUDA] = usual


def bind(
    case: Case, operands: Operands, library: Library, kernel: str | None
) -> tuple[Callable[[], Any], str]:
    """A call of `case` in `library`, as a new plan each time, and the kernel that it runs."""
    conditions = operands.conditions
    options = Options(causal=case.problem().causal, kernel=kernel, p_dropout=case.p_dropout, return_lse=False)
    inputs = Inputs(*operands.qkv, attn_mask=conditions.own_mask, seqlens_k=conditions.seqlens_k)
    philox = (1, 2) if case.p_dropout else None
    out = torch.empty_like(operands.qkv[0])

    def call() -> torch.Tensor:
        with serving(library):
            planning.execute(binding.bind(options, inputs), options, out, philox)
        return out

    with serving(library):
        plan = planning.execute(binding.bind(options, inputs), options, out, philox).plan
    assert plan is not None, f"{case.name} runs no kernel"
    return call, plan.kernel.name


def contestant(calls: Sequence[Callable[[], Any]]) -> Contestant:
    """The calls, one an input set, as timing.py takes them."""
    return Contestant(lambda index: calls[index](), contextlib.nullcontext, len(calls))


def compare(case: Case, libraries: Sequence[Library], settings: Settings) -> dict[str, Any]:
    """A row: the kernel, the times of both builds in microseconds, and `failures` where one is missing."""
    sets = input_sets(case, settings)
    _, kernel = bind(case, sets[0], libraries[0], None)
    bound = {
        name: contestant([bind(case, operands, library, kernel)[0] for operands in sets])
        for name, library in zip(CONTESTANTS, (*libraries, libraries[0]), strict=True)
    }
    failures: dict[str, str] = {}
    timings: dict[str, Timing] = time_on_gpu(
        bound,
        budget_s=settings.budget_s,
        max_replays=settings.repeats,
        failed=lambda name, error: failures.update({name: str(error)}),
    )
    times = {name: timing.gpu_us for name, timing in timings.items()}
    return {"problem": case.name, "kernel": kernel, **times, "failures": failures}


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One line a suite: geometric mean and extremes of after / before, and the same of the noise."""
    lines = [
        f"{'suite':<10}{'problems':>9}{'after/before':>14}{'least':>8}{'most':>8}{'noise':>8}{'most':>8}"
    ]
    for suite in dict.fromkeys(row["problem"].split("/")[0] for row in rows):
        timed = [
            row
            for row in rows
            if row["problem"].startswith(f"{suite}/") and all(row.get(name) for name in CONTESTANTS)
        ]
        if not timed:
            continue
        ratios = [row["after"] / row["before"] for row in timed]
        noise = [row["before_again"] / row["before"] for row in timed]
        means = [math.exp(statistics.fmean(map(math.log, values))) for values in (ratios, noise)]
        lines.append(
            f"{suite:<10}{len(timed):>9}{means[0]:>14.4f}{min(ratios):>8.3f}{max(ratios):>8.3f}"
            f"{means[1]:>8.4f}{max(noise):>8.3f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the head of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a libsdpa_cutlass.so")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument(
        "--suite", action="append", choices=sorted(SUITES), help="default: mission, small, long"
    )
    parser.add_argument("--random", type=int, metavar="SEED", help="problems of `bench --suite random`")
    parser.add_argument("--count", type=int, default=400, metavar="N", help="of these")
    parser.add_argument("--filter", default="*", metavar="GLOB", help="of problems' names")
    parser.add_argument("--dtype", choices=("f16", "bf16"), default="f16")
    parser.add_argument("--repeats", type=int, default=60, metavar="N", help="replays of each contestant")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("torch sees no GPU")
    libraries = [load(path.resolve(), Target.CUDA) for path in (given.before, given.after)]
    settings = Settings(
        device=torch.device("cuda", 0), dtype=given.dtype, providers=(), seed=0, repeats=given.repeats
    )
    named = given.suite or (("mission", "small", "long") if given.random is None else ())
    cases = [case for suite in named for case in SUITES[suite]()]
    if given.random is not None:
        drawn = random_suite.draw(given.random, given.count)
        cases += [case for case in drawn if case.dtype in (None, given.dtype)]
    rows = []
    for case in cases:
        if case.mask == "packed" or not fnmatch.fnmatch(case.name, given.filter):
            continue
        try:
            row = compare(case, libraries, settings)
        except SdpaError as error:  # builds of some kernels do not serve every problem
            row = {"problem": case.name, "kernel": None, "failures": {"before": str(error)}}
        rows.append(row)
        times = "".join(f"{row.get(name) or math.nan:>10.2f}" for name in CONTESTANTS)
        print(f"{row['problem']:<44}{times}  {row['kernel']}", flush=True)
    print(summary(rows))
    if given.json:
        env = environment.record(settings.device)
        builds = [library.build.digest for library in libraries]
        record = {"format": FORMAT, "env": env, "builds": builds, "rows": rows}
        write_atomically(given.json, json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
