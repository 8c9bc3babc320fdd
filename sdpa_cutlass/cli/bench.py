"""The `bench` command: a complete record of whole suites on one machine, written into a folder.

`compare` is the quick look, with a table and files on request; `bench` measures the same problems in the same
way (measure.py) and adds what a record needs:

    peers       other libraries of attention where they are installed (peers.py); masks with every provider
    random      problems that a seed draws (random_suite.py), for each K-th of them the other kernels too, and
                what that says (random_report.py)
    wall time   of every small problem, and of each way to call this library at the mission shape (wall.py)
    roofline    the GPU's ceilings, a floor under every time and the bandwidth at which this GPU copies
    files       STEM.json, rewritten whole after every problem: a run that is killed keeps its rows, marked as
                interrupted; at the end STEM.csv and pictures of speed, speed-up and roofline

STEM is `<date>-<gpu>-<dtype>-<suites>`, with a number where that is taken: no file is ever replaced. The exit
status is 1 when a row of this library is wrong or failed, any time is below its floor, or `--against` finds
a regression (changes.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sdpa_cutlass.cli import (
    FAILED,
    OK,
    CommandError,
    bench_plots,
    changes,
    environment,
    peers,
    plots,
    providers,
    random_report,
    random_suite,
    results,
    roofline,
    running,
    suites,
    summary,
    tables,
    timing,
    wall,
)
from sdpa_cutlass.cli.bench_arguments import ALL
from sdpa_cutlass.cli.providers import Provider
from sdpa_cutlass.cli.results import Results, Row
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.summary import kind
from sdpa_cutlass.problem import DType

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from sdpa_cutlass.cli.measure import Settings

RANDOM_PROVIDERS = ("fused", "torch_flash", "torch_efficient", "torch_cudnn")
RANDOM_BUDGET_S = 0.02  # of GPU time for a provider: there are many problems
RANDOM_CHECKED_SCORES = 2**24
LOOPS = 12  # of calls from Python, for each small problem
RESULTS = Path("benchmarks", "results")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    running.require(["torch", "rich", "safetensors", "matplotlib"])
    device = running.pick_device(options.device)
    names = _expanded(options.suite) if options.list and options.suite else suite_names(options.suite, device)
    cases = find_cases(names, options, device)
    if options.list:
        print("\n".join(case.name for case in cases))
        return OK
    running.require_library(options.providers or results.PROVIDERS, device)
    earlier = changes.load(options.against) if options.against else None
    console = running.make_console()
    bench = Bench(options, device, names, cases)
    console.print(f"writing {bench.path('.json')}", highlight=False, markup=False)
    found = bench.measure(console)
    bench.show(found, console)
    for name, about in found.env["peers"].items():
        console.print(f"  {name}: {about}", style="dim", highlight=False, markup=False)
    bench.write_the_rest(found, console)
    status = max(running.verdict(found, console), _impossible(found, console))
    return max(status, changes.report(changes.find(earlier, found))) if earlier else status


def find_cases(names: Sequence[str], options: argparse.Namespace, device: torch.device) -> list[Case]:
    """The problems of the run; those with a dtype of their own, unless it is the run's anyway."""
    more = wall.cases() if "mission" in names and device.type == "cuda" else []
    if random_suite.SUITE in names:
        limits = random_suite.GPU if device.type == "cuda" else random_suite.CPU
        drawn = random_suite.draw(options.seed, options.count, limits)
        for case in drawn:  # what is of the run's own type says so no longer
            more.append(dataclasses.replace(case, dtype=None) if case.dtype == options.dtype else case)
    known = [name for name in names if name != random_suite.SUITE]
    found = running.find_cases(known, options.filter, more=more)
    return [case for case in found if case.dtype != options.dtype]


def suite_names(wanted: Sequence[str] | None, device: torch.device) -> tuple[str, ...]:
    """The suites to run on `device`. Raises CommandError for those that need a GPU where there is none."""
    if device.type == "cuda":
        return _expanded(wanted or (ALL,))
    allowed = (*suites.CPU_SUITES, random_suite.SUITE)
    running.refuse_gpu_suites(wanted or (), allowed)
    return tuple(wanted or ("host",))


def _expanded(names: Sequence[str]) -> tuple[str, ...]:
    """The names, each once, with what ALL stands for instead of it."""
    every = [name for given in names for name in (suites.GPU_SUITES if given == ALL else (given,))]
    return tuple(dict.fromkeys(every))


def folder(device: torch.device) -> Path:
    """Where results go unless `--out` says so: among the committed ones only what a GPU measured."""
    if not RESULTS.is_dir():
        return Path("bench-results")
    return RESULTS if device.type == "cuda" else Path("build", "bench")


def slug(text: str) -> str:
    """A part of a file name: `NVIDIA GeForce RTX 4090` → `rtx-4090`."""
    words = re.sub(r"[^a-z0-9]+", " ", text.lower()).split()
    return "-".join(word for word in words if word not in ("nvidia", "geforce")) or "unknown"


class Bench:
    """One run: what is measured, and the files that it is written to."""

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device,
        names: Sequence[str],
        cases: Sequence[Case],
    ) -> None:
        self._options = options
        self._device = device
        self._names = names
        self._cases = cases
        self._env = environment.record(device)
        self._peers, about = peers.find()
        absent = [name for name in options.providers or () if name in about and name not in self._peers]
        if absent:
            raise CommandError(f"--providers {absent[0]}: {about[absent[0]]}")
        is_gpu = device.type == "cuda"
        self._ceilings = roofline.ceilings_of(self._env) if is_gpu else None
        self._env |= {
            "command": {"name": "bench", "suites": list(names), "filter": list(options.filter)}
            | {"seed": options.seed, "repeats": self._repeats, "sustained_s": options.sustained},
            "peers": about,
            "roofline": dataclasses.asdict(self._ceilings) if self._ceilings else None,
            "copy_bandwidth_gbps": roofline.copy_bandwidth_gbps(device) if is_gpu else None,
            "interrupted": True,  # until the end
        }
        self._samples: list[random_report.Sample] = []
        self._folder: Path = options.out or folder(device)
        self._stem = self._free_stem()

    @property
    def _repeats(self) -> int:
        return self._options.repeats or timing.REPEATS[self._device.type]

    def path(self, suffix: str) -> Path:
        """A file of this run, such as that of `.json`."""
        return self._folder / f"{self._stem}{suffix}"

    def _free_stem(self) -> str:
        """The first stem of this run that no file has."""
        machine = slug(self._env["gpu"] or "cpu")
        is_all = set(self._names) >= set(suites.GPU_SUITES)
        parts = "all" if is_all else "-".join(name.replace("_", "-") for name in self._names)
        stem = f"{self._env['date'][:10]}-{machine}-{self._options.dtype}-{parts}"
        number, free = 1, stem
        while (self._folder / f"{free}.json").exists():
            number += 1
            free = f"{stem}-{number}"
        return free

    def measure(self, console: Console) -> Results:
        """Measures everything and writes the JSON as it goes; an interrupt ends it early."""
        import torch

        torch.set_float32_matmul_precision("highest")
        rows: list[Row] = []
        self._save(rows)  # a folder that cannot be written to shows now
        begin = time.monotonic()
        with running.progress(console, len(self._cases), quiet=self._options.quiet) as advance:
            try:
                for number, case in enumerate(self._cases):
                    if self._is_late(begin):
                        self._env["left_out"] = len(self._cases) - number
                        break
                    advance(case.name, 0)
                    rows += self._measure_case(case)
                    if case.suite == random_suite.SUITE and number % self._options.every == 0:
                        self._sample(case)
                    self._save(rows)
                    advance(case.name, 1)
            except KeyboardInterrupt:
                console.print(f"interrupted after {len(rows)} rows", style="bold yellow")
            else:
                self._env["interrupted"] = False
        self._env["seconds"] = round(time.monotonic() - begin)
        environment.close(self._env, self._device)
        return self._save(rows)

    def _is_late(self, begin: float) -> bool:
        return self._options.seconds is not None and time.monotonic() - begin >= self._options.seconds

    def _sample(self, case: Case) -> None:
        """Times the kernels that could have been chosen for a random problem."""
        from sdpa_cutlass.cli import random_sample

        sample = random_sample.measure(
            case, DType(case.dtype or self._options.dtype), self._device, self._options.seed, self._repeats
        )
        if sample is not None:
            self._samples.append(sample)

    def _measure_case(self, case: Case) -> list[Row]:
        """The rows of one problem; what it left in torch's cache is given back for the next one."""
        import torch

        from sdpa_cutlass.cli.measure import measure

        if case.suite == wall.SUITE:
            return wall.measure(case, self._options.dtype, self._device, seed=self._options.seed)
        rows = measure(case, self._settings(case))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return rows

    def _settings(self, case: Case) -> Settings:
        from sdpa_cutlass.cli.measure import Settings

        is_masked = case.suite in suites.MASK_SUITES
        if case.suite == random_suite.SUITE:
            names = self._options.providers or RANDOM_PROVIDERS
            every = providers.ALL | self._peers
            return Settings(
                device=self._device,
                dtype=self._options.dtype,
                providers=[every[name] for name in names],
                seed=self._options.seed,
                repeats=self._repeats,
                budget_s=RANDOM_BUDGET_S,
                ceilings=self._ceilings,
                checked_scores=RANDOM_CHECKED_SCORES,
            )
        return Settings(
            device=self._device,
            dtype=self._options.dtype,
            providers=self._providers(),
            seed=self._options.seed,
            repeats=self._repeats,
            budget_s=timing.MASK_BUDGET_S if is_masked else timing.BUDGET_S,
            sustained_s=self._options.sustained,
            ceilings=self._ceilings,
            loops=LOOPS,
        )

    def _providers(self) -> list[Provider]:
        every = providers.ALL | self._peers
        return [every[name] for name in self._options.providers or every]

    def show(self, found: Results, console: Console) -> None:
        """Prints the tables; of random problems, which are many, what they say as a whole."""
        others = [row for row in found.rows if row.suite != random_suite.SUITE]
        if others:
            tables.show(Results(found.env, others), console)
        if len(others) < len(found.rows):
            console.print(summary.heading(found), style="bold", highlight=False, markup=False)
            random_report.show(found.rows, self._samples, console)
        if self._env.get("left_out"):
            left = self._env["left_out"]
            console.print(f"{left} problems were left out: --seconds {self._options.seconds}")

    def _save(self, rows: Sequence[Row]) -> Results:
        if random_suite.SUITE in self._names:
            self._env["random"] = random_report.record(rows, self._samples)
        found = Results(self._env, list(rows))
        try:
            results.save(found, self.path(".json"))
        except OSError as error:
            raise CommandError(f"cannot write {self.path('.json')}: {error.strerror or error}") from error
        return found

    def write_the_rest(self, found: Results, console: Console) -> None:
        """The files that are made from the JSON."""
        writers: list[tuple[Path | None, Callable[[Path], None]]] = [
            (self.path(".csv"), lambda path: results.write_atomically(path, results.to_csv(found.rows))),
        ]
        drawn = [row for row in found.rows if row.suite != random_suite.SUITE]
        if self._device.type == "cuda" and drawn:  # on a CPU, times mean nothing
            found = Results(found.env, drawn)
            shown = Results(found.env, _without_masks(found.rows))
            writers.append((self.path("-speed.png"), lambda path: plots.save(shown, path)))
            for name, draw in bench_plots.PICTURES.items():
                if (drawing := draw(found)) is not None:
                    writers.append((self.path(f"-{name}.png"), functools.partial(bench_plots.save, drawing)))
        running.write_all(writers, console)


def _without_masks(rows: Sequence[Row]) -> list[Row]:
    """The rows without masks, whose panels would be too many; all of them where there are no others."""
    return [row for row in rows if row.suite not in suites.MASK_SUITES] or list(rows)


def _impossible(found: Results, console: Console) -> int:
    """FAILED when a time is below its floor."""
    rows = [row for row in found.rows if kind(row.status) == results.INVALID]
    for row in rows:
        text = f"impossible: {row.suite}, {row.provider}: {row.status}"
        console.print(text, style="bold red", markup=False, highlight=False)
    return FAILED if rows else OK
