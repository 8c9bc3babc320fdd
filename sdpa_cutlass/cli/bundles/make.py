"""The command `bundle`: one problem's result, measured here or out of a result file, as one archive.

From a result file come its rows of the problem and its `env`; it keeps medians only, so such a bundle has no
raw times and no digests of tensors, and says so. Nothing is made up for what was not kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from typing import TYPE_CHECKING

import sdpa_cutlass
from sdpa_cutlass.cli import OK, CommandError, changes, results, running, timing
from sdpa_cutlass.cli.bundles import archive, measuring, record
from sdpa_cutlass.cli.bundles.arguments import SUFFIX
from sdpa_cutlass.cli.bundles.measuring import OURS, Unit, is_of
from sdpa_cutlass.cli.bundles.record import Record
from sdpa_cutlass.cli.results import Results
from sdpa_cutlass.cli.suites import Case

if TYPE_CHECKING:
    import torch

README = """\
One result of sdpa_cutlass {version}: {problem} in {dtype} on {where}.

    kernel      {kernel}
    time        {time}
    error       {error}

To check this file and to run it again:

    python -m sdpa_cutlass verify THIS_FILE

result.json has the rows and the machine, bundle.json how they were measured, unit.cu the kernel's generated
source{no_unit}, manifest.json the SHA-256 of each.
"""


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status. Raises CommandError for what the user can put right."""
    running.require(["torch", "safetensors"])
    if options.out.suffix != SUFFIX:
        raise CommandError(f"--out {options.out}: the name must end in {SUFFIX}")
    case = measuring.find_case(options.problem)
    if OURS not in options.providers:
        raise CommandError(f"--providers must name {OURS}: a bundle is about this library")
    found, about = _taken(case, options) if options.source else _measured(case, options)
    unit = measuring.unit_of(about.kernel, (found.env.get("library") or {}).get("digest"))
    about = dataclasses.replace(about, unit=unit.path, no_unit=unit.reason)
    files = contents(found, about, unit)
    try:
        archive.write(options.out, files)
    except OSError as error:
        raise CommandError(f"cannot write {options.out}: {error.strerror or error}") from error
    print(f"wrote {options.out}, SHA-256 {archive.digest(archive.to_bytes(files))}")
    return OK


def contents(found: Results, about: Record, unit: Unit) -> dict[str, bytes]:
    """The files of a bundle."""
    ours = next(row for row in found.rows if row.provider == OURS)
    time, error = "not measured: the kernel ran on a CPU", "not measured"
    if ours.gpu_us is not None:
        time = f"{ours.gpu_us:.4g} us, half the spread of the replays {ours.gpu_us_spread or 0:.2g} us"
    if ours.max_err_out is not None:
        error = f"{ours.max_err_out:.3g} at most in O"
    readme = README.format(
        version=found.env.get("package"),
        problem=about.problem,
        dtype=about.dtype,
        where=found.env.get("gpu") or f"the host library ({found.env.get('cpu')})",
        kernel=about.kernel,
        time=time,
        error=error,
        no_unit="" if unit.text else f" (empty: {unit.reason})",
    )
    return {
        "README.txt": readme.encode(),
        "result.json": results.to_json(found).encode(),
        "bundle.json": record.to_json(about),
        "unit.cu": unit.text,
    }


def _measured(case: Case, options: argparse.Namespace) -> tuple[Results, Record]:
    """The problem measured here."""
    device = running.pick_device(options.device)
    repeats = options.repeats or timing.REPEATS[device.type]
    dtype = case.dtype or options.dtype
    seen = measuring.measure(
        case, options.providers, dtype=dtype, device=device, seed=options.seed, repeats=repeats
    )
    return seen.results, Record(
        problem=case.name,
        dtype=dtype,
        device=device.type,
        seed=options.seed,
        repeats=repeats,
        command=_command(case, options, device, repeats),
        source=None,
        kernel=seen.kernel,
        library=seen.library,
        unit=None,
        no_unit=None,
        inputs=seen.inputs,
        outputs=seen.outputs,
        samples_us=seen.samples_us,
    )


def _command(case: Case, options: argparse.Namespace, device: torch.device, repeats: int) -> list[str]:
    """The command line that measures the same, without paths."""
    words = ["python", "-m", sdpa_cutlass.__name__, "bundle", case.name, "--device", device.type]
    words += ["--dtype", options.dtype, "--seed", str(options.seed), "--repeats", str(repeats)]
    return [*words, "--providers", ",".join(options.providers)]


def _taken(case: Case, options: argparse.Namespace) -> tuple[Results, Record]:
    """The problem's rows of a result file."""
    found = changes.load(options.source)
    dtype = case.dtype or options.dtype
    rows = [row for row in found.rows if is_of(row, case, dtype)]
    ours = next((row for row in rows if row.provider == OURS), None)
    if ours is None:
        raise CommandError(f"{options.source} has no row of {OURS} for {case.name} in {dtype}")
    if not ours.ok or ours.kernel is None:
        raise CommandError(f"{options.source}: {case.name}: {ours.status}: there is nothing to repeat")
    command = found.env.get("command") or {}
    data = options.source.read_bytes()
    return Results(found.env, rows), Record(
        problem=case.name,
        dtype=dtype,
        device="cpu" if found.env.get("gpu") is None else "cuda",
        seed=command.get("seed", 0),
        repeats=command.get("repeats"),
        command=["python", "-m", sdpa_cutlass.__name__, command.get("name", "bench"), json.dumps(command)],
        source={"name": options.source.name, "sha256": hashlib.sha256(data).hexdigest()},
        kernel=ours.kernel,
        library=None,
        unit=None,
        no_unit=None,
        inputs=None,
        outputs=None,
        samples_us={},
    )
