"""The `compare` command: problems of the wanted suites, every provider, one table, and files of the results.

Results are saved whatever fails on the way. The exit status is 1 when a row of this library's own families is
wrong or failed, 2 when its library cannot be used at all. An interrupt saves what was measured so far.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sdpa_cutlass.cli import OK, environment, plots, providers, results, running, suites, tables
from sdpa_cutlass.cli.suites import Case
from sdpa_cutlass.cli.timing import BUDGET_S, MASK_BUDGET_S, REPEATS

if TYPE_CHECKING:
    import torch
    from rich.console import Console

# Without the slow ones.
MASK_PROVIDERS = ("fused", "plain", "torch_flash", "torch_cudnn", "torch_efficient")


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    running.require(["torch", "rich", "safetensors"] + (["matplotlib"] if options.plot else []))
    device = running.pick_device(options.device)
    names = options.suite or suites.DEFAULT_SUITES[device.type]
    cases = running.find_cases(names, options.filter, files=options.input)
    if options.list:
        print("\n".join(case.name for case in cases))
        return OK
    if device.type == "cpu":
        running.refuse_gpu_suites(names, (*suites.CPU_SUITES, "mission"))
    running.require_library(options.providers or results.PROVIDERS, device)
    console = running.make_console()
    found = measure_all(cases, options, device, console)
    tables.show(found, console)
    _write_files(options, found, console)
    return running.verdict(found, console)


def measure_all(
    cases: list[Case], options: argparse.Namespace, device: torch.device, console: Console
) -> results.Results:
    """Measures every case; an interrupt ends it early with what is there."""
    import torch

    from sdpa_cutlass.cli.measure import Settings, measure

    torch.set_float32_matmul_precision("highest")
    repeats = options.repeats or REPEATS[device.type]

    def settings(case: Case) -> Settings:
        is_masked = case.suite in suites.MASK_SUITES
        names = options.providers or (MASK_PROVIDERS if is_masked else results.PROVIDERS)
        return Settings(
            device=device,
            dtype=options.dtype,
            providers=[providers.ALL[name] for name in names],
            seed=options.seed,
            repeats=repeats,
            budget_s=MASK_BUDGET_S if is_masked else BUDGET_S,
        )

    env = environment.record(device)
    env["command"] = {"name": "compare", "seed": options.seed, "repeats": repeats}
    rows: list[results.Row] = []
    with running.progress(console, len(cases), quiet=options.quiet) as advance:
        try:
            for case in cases:
                advance(case.name, 0)
                rows += measure(case, settings(case))
                advance(case.name, 1)
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(rows)} rows", style="bold yellow")
            env["interrupted"] = True
    environment.close(env, device)
    return results.Results(env, rows)


def _write_files(options: argparse.Namespace, found: results.Results, console: Console) -> None:
    running.write_all(
        [
            (options.json, lambda path: results.save(found, path)),
            (options.csv, lambda path: results.write_atomically(path, results.to_csv(found.rows))),
            (options.markdown, lambda path: results.write_atomically(path, tables.to_markdown(found))),
            (options.plot, lambda path: plots.save(found, path)),
        ],
        console,
    )
